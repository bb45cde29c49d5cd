"""Blocks: many messages as columns in one checksummed byte string; docs/spec/block.md.

Building and cutting are the same operation: slices of columns (a caller's, or those of other
blocks) are measured, then written one after the other. A set of messages has exactly one
encoding: a column that no message needs is left out, and so is a validity bitmap without
nulls. `Layout` accepts only that encoding, so an accepted block needs no further check.

No byte is read before it is checked against the end of the data, and no memory is allocated
before its size is checked. Offsets are read once, into a Slice, and checked there: a caller
that changes the bytes during the call gets a wrong block, never an invalid address. The
loops run without the GIL.
"""
cimport cython
from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport INT32_MAX, uint16_t, uint32_t
from libc.string cimport memcmp, memcpy, memset

cdef enum:
    HEADER = 48
    CHECKSUM_AT = 8
    CHECKED_FROM = 16  # the checksum covers the bytes from here to the end
    VERSION = 1
    ALIGNMENT = 8

    ROOM = 128  # headroom in front of a large block; a log entry's head is smaller

cdef enum Flag:
    KEYS = 1
    NULL_KEYS = 2
    HEADERS = 4
    NULL_HEADERS = 8
    ALL_FLAGS = 15

cdef char* MAGIC_BYTES = b"\x89PBLOCK\n"

MAGIC = MAGIC_BYTES[:8]
HEADER_BYTES = HEADER
# Allows the largest message, keeps offsets within int32, and bounds the allocation that a
# damaged size can cause.
MAX_BYTES = 256 * 1024 * 1024
cdef int64_t LARGEST = MAX_BYTES

# Work of this size takes some ten microseconds and releases the GIL. For less, releasing costs
# more than it gives, because the thread may have to wait to take it again.
cdef int64_t MIN_NOGIL_BYTES = 64 * 1024
cdef int64_t MANY = 16 * 1024
cdef int64_t FEW = 256  # keys to hash
# Messages without a key that follow each other into one shard: few, so that all consumers get
# some of a batch, and enough that a run costs little more than one message.
KEYLESS_RUN = 256
cdef int64_t RUN = KEYLESS_RUN


class BadBlock(ValueError):
    """The bytes are not a block, or changed during the read; the text is a stable reason."""


class UnknownVersion(BadBlock):
    """An intact block of a version that this code does not know."""


class BadColumns(ValueError):
    """The columns of a caller cannot form a block; the text names the column."""


cdef packed struct Header:
    char[8] magic
    uint64_t checksum
    uint16_t version
    uint16_t flags
    uint32_t count
    uint32_t size
    uint32_t bodies
    uint32_t keys
    uint32_t entries
    uint32_t names
    uint32_t values


def xxh64(data) -> int:
    """Return XXH64 with seed 0 of a contiguous buffer."""
    cdef Buffer held = Buffer(data)
    cdef uint64_t hashed
    with nogil:
        hashed = hash_of(held.at(), held.view.len, 0)
    return hashed


def read_message_count(data not None) -> int:
    """Return the message count in the header; the bytes must be a valid block."""
    cdef Buffer held = Buffer(data)
    cdef Header header
    if held.view.len < HEADER:
        raise BadBlock("size")
    memcpy(&header, held.at(), HEADER)
    return header.count


@cython.final
cdef class Buffer:
    """A caller's buffer, held while this object lives."""

    cdef Py_buffer view

    def __cinit__(self, data):
        PyObject_GetBuffer(data, &self.view, PyBUF_SIMPLE)

    def __dealloc__(self):
        PyBuffer_Release(&self.view)

    cdef const unsigned char* at(self) noexcept nogil:
        return <const unsigned char*>self.view.buf


@cython.final
cdef class HeadroomBlock:
    """A large block with headroom in front.

    A store writes its own head and the block as one value. With headroom it writes the head
    in place instead of copying the block once more.
    """

    cdef bytes whole  # the headroom, then the block
    cdef bint is_taken

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, self.at(), len(self), 1, flags)

    def __len__(self):
        return len(self.whole) - ROOM

    cdef unsigned char* at(self) noexcept:
        return <unsigned char*>PyBytes_AS_STRING(self.whole) + ROOM


cdef const unsigned char* data_of(block, Py_ssize_t* size) except NULL:
    """Return the address of an immutable block (bytes or HeadroomBlock) and set its size."""
    if isinstance(block, HeadroomBlock):
        size[0] = len(<HeadroomBlock>block)
        return (<HeadroomBlock>block).at()
    size[0] = len(<bytes?>block)
    return <const unsigned char*>PyBytes_AS_STRING(<bytes>block)


def prepend_head(bytes head not None, HeadroomBlock block not None):
    """Return head and block as one view, or None if the headroom is used or too small."""
    cdef Py_ssize_t size = len(head)
    if block.is_taken or size > ROOM:
        return None
    block.is_taken = True  # an earlier view of the headroom may still be in use
    memcpy(block.at() - size, PyBytes_AS_STRING(head), size)
    return memoryview(block.whole)[ROOM - size :]


# --- slices: measured, then written ---------------------------------------------


cdef bint stretch_of(
    const Strings* strings, int64_t start, int64_t end, Stretch* found
) noexcept nogil:
    # Read once into the stretch: the caller's bytes may change, the checked numbers do not.
    found.start = get_i32(strings.offsets, start)
    found.end = get_i32(strings.offsets, end)
    return 0 <= found.start <= found.end <= strings.size


cdef bint measure_one(Slice* slice, Sizes* sizes) noexcept nogil:
    """Add one slice to the sizes. Returns False if its offsets leave the data."""
    cdef const Columns* columns = slice.columns
    cdef int64_t start = slice.start, end = slice.end, count = end - start
    if not stretch_of(&columns.bodies, start, end, &slice.bodies):
        return False
    sizes.count += count
    sizes.bodies += slice.bodies.end - slice.bodies.start
    # A slice without keys adds none; the result has a key column if any slice has one.
    if columns.keys.offsets is not NULL:
        if not stretch_of(&columns.keys, start, end, &slice.keys):
            return False
        sizes.keys += slice.keys.end - slice.keys.start
        sizes.with_key += count if columns.key_bits is NULL else bits_set(
            columns.key_bits, columns.key_bit + start, count
        )
    if columns.header_offsets is not NULL:
        return measure_headers(slice, sizes)
    return True


cdef bint measure_headers(Slice* slice, Sizes* sizes) noexcept nogil:
    cdef const Columns* columns = slice.columns
    cdef int64_t count = slice.end - slice.start
    cdef Stretch entries
    entries.start = get_i32(columns.header_offsets, slice.start)
    entries.end = get_i32(columns.header_offsets, slice.end)
    slice.entries = entries
    if not 0 <= entries.start <= entries.end <= columns.entries:
        return False
    if not stretch_of(&columns.names, entries.start, entries.end, &slice.names):
        return False
    if not stretch_of(&columns.values, entries.start, entries.end, &slice.values):
        return False
    sizes.entries += entries.end - entries.start
    sizes.names += slice.names.end - slice.names.start
    sizes.values += slice.values.end - slice.values.start
    sizes.with_headers += count if columns.header_bits is NULL else bits_set(
        columns.header_bits, columns.header_bit + slice.start, count
    )
    return True


cdef bint measure(Slice* slices, int64_t slice_count, Sizes* sizes) noexcept nogil:
    cdef int64_t number
    memset(sizes, 0, sizeof(Sizes))
    for number in range(slice_count):
        if not measure_one(&slices[number], sizes):
            return False
    return True


cdef void write_strings(
    unsigned char* offsets,
    unsigned char* data,
    int64_t place,
    int64_t at,
    const Strings* strings,
    int64_t start,
    int64_t end,
    const Stretch* stretch,
) noexcept nogil:
    """Copy strings start…end to index `place`, their bytes to `at`."""
    cdef int32_t shift = <int32_t>(at - stretch.start)
    rebase(offsets + place * 4, strings.offsets + start * 4, end - start, shift)
    if stretch.end > stretch.start:  # an empty column may have a NULL address
        memcpy(data + at, strings.data + stretch.start, stretch.end - stretch.start)


cdef void write_keys(const Slice* slice, Target* target, Sizes* done) noexcept nogil:
    cdef const Columns* columns = slice.columns
    cdef int64_t count = slice.end - slice.start
    if columns.keys.offsets is NULL:  # key_bits are zero already
        repeat_i32(target.key_offsets + done.count * 4, count, <int32_t>done.keys)
        return
    write_strings(
        target.key_offsets, target.keys, done.count, done.keys,
        &columns.keys, slice.start, slice.end, &slice.keys,
    )
    if target.key_bits is not NULL:
        copy_bits(
            target.key_bits, done.count, columns.key_bits, columns.key_bit + slice.start, count
        )
    done.keys += slice.keys.end - slice.keys.start


cdef void write_headers(const Slice* slice, Target* target, Sizes* done) noexcept nogil:
    cdef const Columns* columns = slice.columns
    cdef const Stretch* entries = &slice.entries
    cdef int64_t count = slice.end - slice.start
    # No headers in this slice, but in another: nulls with empty ranges.
    if columns.header_offsets is NULL:
        repeat_i32(target.header_offsets + done.count * 4, count, <int32_t>done.entries)
        return
    rebase(
        target.header_offsets + done.count * 4, columns.header_offsets + slice.start * 4, count,
        <int32_t>(done.entries - entries.start),
    )
    if target.header_bits is not NULL:
        copy_bits(
            target.header_bits, done.count,
            columns.header_bits, columns.header_bit + slice.start, count,
        )
    write_strings(
        target.name_offsets, target.names, done.entries, done.names,
        &columns.names, entries.start, entries.end, &slice.names,
    )
    write_strings(
        target.value_offsets, target.values, done.entries, done.values,
        &columns.values, entries.start, entries.end, &slice.values,
    )
    done.entries += entries.end - entries.start
    done.names += slice.names.end - slice.names.start
    done.values += slice.values.end - slice.values.start


cdef void write_checked_bodies(const Slice* slice, Target* target, const Sizes* done) noexcept nogil:
    """Copy the bodies and verify the checksum of the whole block in the same pass.

    One pass over the memory instead of two; `is_damaged` holds the result.
    """
    cdef Columns* columns = <Columns*>slice.columns
    cdef const unsigned char* checked = columns.owed + CHECKED_FROM
    cdef const Stretch* stretch = &slice.bodies
    cdef size_t start = columns.bodies.data + stretch.start - checked
    cdef uint64_t wanted, found
    memcpy(&wanted, columns.owed + CHECKSUM_AT, 8)
    rebase(
        target.body_offsets + done.count * 4, columns.bodies.offsets + slice.start * 4,
        slice.end - slice.start, <int32_t>(done.bodies - stretch.start),
    )
    found = hash_copying(
        checked, columns.owed_size - CHECKED_FROM, 0,
        start, start + (stretch.end - stretch.start), target.bodies + done.bodies,
    )
    columns.is_damaged = found != wanted
    columns.owed = NULL


cdef void write_slice(const Slice* slice, Target* target, Sizes* done) noexcept nogil:
    cdef const Columns* columns = slice.columns
    cdef int64_t count = slice.end - slice.start
    if columns.insertion is NULL:
        repeat_i64(target.insertion + done.count * 8, count, columns.insertion_ms)
    else:
        memcpy(target.insertion + done.count * 8, columns.insertion + slice.start * 8, count * 8)
    # The checksum covers the whole block, so the first slice that reads it verifies all of it.
    if columns.owed is NULL:
        write_strings(
            target.body_offsets, target.bodies, done.count, done.bodies,
            &columns.bodies, slice.start, slice.end, &slice.bodies,
        )
    else:
        write_checked_bodies(slice, target, done)
    if target.key_offsets is not NULL:
        write_keys(slice, target, done)
    if target.header_offsets is not NULL:
        write_headers(slice, target, done)
    done.bodies += slice.bodies.end - slice.bodies.start
    done.count += count


cdef void write_columns(const Slice* slices, int64_t slice_count, Target* target) noexcept nogil:
    """Write measured slices. Bitmaps must be zero and the columns large enough for all."""
    cdef Sizes done
    cdef int64_t number
    memset(&done, 0, sizeof(Sizes))
    for number in range(slice_count):
        write_slice(&slices[number], target, &done)
    # Offset columns have one value more than messages: the end of the last one.
    set_i32(target.body_offsets, done.count, <int32_t>done.bodies)
    if target.key_offsets is not NULL:
        set_i32(target.key_offsets, done.count, <int32_t>done.keys)
    if target.header_offsets is not NULL:
        set_i32(target.header_offsets, done.count, <int32_t>done.entries)
        set_i32(target.name_offsets, done.entries, <int32_t>done.names)
        set_i32(target.value_offsets, done.entries, <int32_t>done.values)


# --- where the columns of a block lie -------------------------------------------


cdef inline int64_t padded(int64_t size) noexcept nogil:
    return (size + ALIGNMENT - 1) & ~<int64_t>(ALIGNMENT - 1)


cdef inline unsigned char* after(size_t* at, int64_t size) noexcept nogil:
    """Return the address of the next column of `size` bytes; moves `at` past its padding."""
    cdef size_t found = at[0]
    at[0] = found + padded(size)
    return <unsigned char*>found


cdef int64_t place_columns(
    unsigned char* start, int flags, const Sizes* sizes, Target* places
) noexcept nogil:
    """Compute the addresses of the columns. Returns the size of the whole block.

    Addresses are integers here: invalid sizes would make pointer arithmetic undefined.
    """
    cdef size_t at = <size_t>start + HEADER
    cdef int64_t count = sizes.count, offsets = (sizes.count + 1) * 4
    memset(places, 0, sizeof(Target))
    places.insertion = after(&at, count * 8)
    places.body_offsets = after(&at, offsets)
    places.bodies = after(&at, sizes.bodies)
    if flags & KEYS:
        if flags & NULL_KEYS:
            places.key_bits = after(&at, (count + 7) // 8)
        places.key_offsets = after(&at, offsets)
        places.keys = after(&at, sizes.keys)
    if flags & HEADERS:
        if flags & NULL_HEADERS:
            places.header_bits = after(&at, (count + 7) // 8)
        places.header_offsets = after(&at, offsets)
        places.name_offsets = after(&at, (sizes.entries + 1) * 4)
        places.names = after(&at, sizes.names)
        places.value_offsets = after(&at, (sizes.entries + 1) * 4)
        places.values = after(&at, sizes.values)
    return at - <size_t>start


cdef int flags_for(const Sizes* sizes) noexcept nogil:
    cdef int flags = 0
    if sizes.with_key:
        flags |= KEYS if sizes.with_key == sizes.count else KEYS | NULL_KEYS
    if sizes.with_headers:
        flags |= HEADERS if sizes.with_headers == sizes.count else HEADERS | NULL_HEADERS
    return flags


cdef void write_block(
    unsigned char* out, int64_t size, int flags,
    const Sizes* sizes, const Slice* slices, int64_t slice_count,
) noexcept nogil:
    cdef Target places
    cdef Header header
    place_columns(out, flags, sizes, &places)
    clear_padding(sizes, &places)
    write_columns(slices, slice_count, &places)
    memcpy(header.magic, MAGIC_BYTES, 8)
    header.version = VERSION
    header.flags = <uint16_t>flags
    header.count = <uint32_t>sizes.count
    header.size = <uint32_t>size
    header.bodies = <uint32_t>sizes.bodies
    header.keys = <uint32_t>sizes.keys
    header.entries = <uint32_t>sizes.entries
    header.names = <uint32_t>sizes.names
    header.values = <uint32_t>sizes.values
    memcpy(out, &header, HEADER)
    header.checksum = hash_of(out + CHECKED_FROM, size - CHECKED_FROM, 0)
    memcpy(out + CHECKSUM_AT, &header.checksum, 8)


cdef inline void clear_last(unsigned char* column, int64_t size) noexcept nogil:
    """Zero the last eight bytes of a padded column; the column itself is written later."""
    if column is not NULL and size:
        memset(column + padded(size) - ALIGNMENT, 0, ALIGNMENT)


cdef void clear_padding(const Sizes* sizes, const Target* places) noexcept nogil:
    cdef int64_t offsets = (sizes.count + 1) * 4, bits = (sizes.count + 7) // 8
    clear_last(places.body_offsets, offsets)
    clear_last(places.bodies, sizes.bodies)
    clear_last(places.key_offsets, offsets)
    clear_last(places.keys, sizes.keys)
    clear_last(places.header_offsets, offsets)
    clear_last(places.name_offsets, (sizes.entries + 1) * 4)
    clear_last(places.names, sizes.names)
    clear_last(places.value_offsets, (sizes.entries + 1) * 4)
    clear_last(places.values, sizes.values)
    if places.key_bits is not NULL:
        memset(places.key_bits, 0, padded(bits))
    if places.header_bits is not NULL:
        memset(places.header_bits, 0, padded(bits))


cdef object block_of(Slice* slices, int64_t slice_count, bint with_room=False):
    """Return the block of all messages of the slices.

    With `with_room` a large block is a HeadroomBlock. Raises OverflowError if the block would
    exceed MAX_BYTES, BadColumns if there is no message.
    """
    cdef Sizes sizes
    cdef Target unused
    cdef int64_t size
    cdef int flags
    cdef bint sound
    cdef bytes data
    cdef unsigned char* out
    if is_long(slices, slice_count):
        with nogil:
            sound = measure(slices, slice_count, &sizes)
    else:
        sound = measure(slices, slice_count, &sizes)
    if not sound:
        raise BadBlock("changed while read")
    if sizes.count == 0:
        raise BadColumns("a block must have at least one message")
    flags = flags_for(&sizes)
    size = place_columns(NULL, flags, &sizes, &unused)
    if size > LARGEST:
        raise OverflowError(f"block must have at most {MAX_BYTES} bytes, got {size}")
    with_room = with_room and size >= MIN_NOGIL_BYTES
    data = PyBytes_FromStringAndSize(NULL, size + (ROOM if with_room else 0))
    out = <unsigned char*>PyBytes_AS_STRING(data) + (ROOM if with_room else 0)
    if size >= MIN_NOGIL_BYTES:
        with nogil:
            write_block(out, size, flags, &sizes, slices, slice_count)
    else:
        write_block(out, size, flags, &sizes, slices, slice_count)
    return roomy(data) if with_room else data


cdef HeadroomBlock roomy(bytes whole):
    cdef HeadroomBlock made = HeadroomBlock.__new__(HeadroomBlock)
    made.whole = whole
    return made


cdef bint is_long(const Slice* slices, int64_t slice_count) noexcept nogil:
    cdef int64_t at, messages = 0
    for at in range(slice_count):
        messages += slices[at].end - slices[at].start
    return messages >= MANY


# --- opening --------------------------------------------------------------------


cdef bint is_clear(const unsigned char* column, int64_t size) noexcept nogil:
    """Return whether the padding of a column is zero."""
    cdef int64_t at
    for at in range(size, padded(size)):
        if column[at]:
            return False
    return True


cdef const char* check_strings(const Strings* strings, int64_t count) noexcept nogil:
    if not is_clear(strings.offsets, (count + 1) * 4) or not is_clear(strings.data, strings.size):
        return "padding"
    if get_i32(strings.offsets, 0) != 0 or get_i32(strings.offsets, count) != strings.size:
        return "offsets"
    if not is_ordered(strings.offsets, count):
        return "offsets"
    return NULL


cdef const char* check_bits(
    const unsigned char* bits, const unsigned char* offsets, int64_t count
) noexcept nogil:
    """Check a bitmap: nulls and values mixed, no bit beyond the last message, empty nulls."""
    cdef int64_t size = (count + 7) // 8, found
    if not is_clear(bits, size) or bits_set(bits, count, size * 8 - count):
        return "padding"
    found = bits_set(bits, 0, count)
    if found == 0 or found == count or not nulls_are_empty(offsets, bits, 0, count):
        return "validity"
    return NULL


cdef const char* check_text(const Strings* strings, int64_t count) noexcept nogil:
    if not is_utf8(strings.data, 0, strings.size, strings.offsets, count):
        return "utf8"
    return NULL


cdef const char* check_header_columns(const Columns* columns) noexcept nogil:
    cdef int64_t count = columns.count
    cdef const char* reason
    if not is_clear(columns.header_offsets, (count + 1) * 4):
        return "padding"
    if get_i32(columns.header_offsets, 0) != 0:
        return "offsets"
    if get_i32(columns.header_offsets, count) != columns.entries:
        return "offsets"
    if not is_ordered(columns.header_offsets, count):
        return "offsets"
    reason = check_strings(&columns.names, columns.entries)
    if reason is NULL:
        reason = check_strings(&columns.values, columns.entries)
    if reason is NULL and columns.header_bits is not NULL:
        reason = check_bits(columns.header_bits, columns.header_offsets, count)
    if reason is NULL:
        reason = check_text(&columns.names, columns.entries)
    return reason


cdef const char* check_columns(const Columns* columns) noexcept nogil:
    cdef const char* reason = check_strings(&columns.bodies, columns.count)
    if reason is NULL and columns.keys.offsets is not NULL:
        reason = check_strings(&columns.keys, columns.count)
        if reason is NULL and columns.key_bits is not NULL:
            reason = check_bits(columns.key_bits, columns.keys.offsets, columns.count)
        if reason is NULL:
            reason = check_text(&columns.keys, columns.count)
    if reason is NULL and columns.header_offsets is not NULL:
        reason = check_header_columns(columns)
    return reason


cdef const char* check_flags(const Header* header) noexcept nogil:
    cdef int flags = header.flags
    if flags & ~ALL_FLAGS:
        return "flags"
    if flags & NULL_KEYS and not flags & KEYS or flags & NULL_HEADERS and not flags & HEADERS:
        return "flags"
    if not flags & KEYS and header.keys:
        return "sizes"
    if not flags & HEADERS and (header.entries or header.names or header.values):
        return "sizes"
    return NULL


cdef void columns_of(Columns* columns, const Sizes* sizes, const Target* places) noexcept nogil:
    memset(columns, 0, sizeof(Columns))
    columns.count = sizes.count
    columns.insertion = places.insertion
    columns.bodies = Strings(places.body_offsets, places.bodies, sizes.bodies)
    columns.keys = Strings(places.key_offsets, places.keys, sizes.keys)
    columns.key_bits = places.key_bits
    columns.header_offsets = places.header_offsets
    columns.header_bits = places.header_bits
    columns.entries = sizes.entries
    columns.names = Strings(places.name_offsets, places.names, sizes.names)
    columns.values = Strings(places.value_offsets, places.values, sizes.values)


cdef const char* parse(
    const unsigned char* data, int64_t size, bint checksum, Columns* columns
) noexcept nogil:
    """Parse and check a block. Returns NULL, or the reason of a BadBlock."""
    cdef Header header
    cdef const char* reason
    if size < HEADER or size > LARGEST:
        return "size"
    memcpy(&header, data, HEADER)
    if memcmp(header.magic, MAGIC_BYTES, 8):
        return "magic"
    if header.size != size:
        return "size"
    if checksum and header.checksum != hash_of(data + CHECKED_FROM, size - CHECKED_FROM, 0):
        return "checksum"
    reason = find_columns(data, size, columns)
    return check_columns(columns) if reason is NULL else reason


cdef const char* find_columns(
    const unsigned char* data, int64_t size, Columns* columns
) noexcept nogil:
    """Locate the columns without checking their content. Returns NULL, or the reason."""
    cdef Header header
    cdef Sizes sizes
    cdef Target places
    cdef const char* reason
    if size < HEADER:
        return "size"
    memcpy(&header, data, HEADER)
    if header.version != VERSION:
        return "version"
    reason = check_flags(&header)
    if reason is not NULL:
        return reason
    sizes = Sizes(
        header.count, header.bodies, 0, header.keys, 0, header.entries, header.names, header.values
    )
    if header.count == 0:
        return "sizes"
    if place_columns(<unsigned char*>data, header.flags, &sizes, &places) != size:
        return "sizes"
    columns_of(columns, &sizes, &places)
    return NULL


cdef class Layout:
    """The checked columns of a block in a caller's buffer; nothing is copied.

    The buffer is held until `close` or the end of this object. A caller that passes bytes of
    a mapped file must close the layout before the file may change. Raises BadBlock if the
    bytes are not a block. Without `checksum` only the structure is checked; with `later` the
    checksum is verified when the messages are gathered.
    """

    def __cinit__(self, data, *, bint checksum=True, bint later=False):
        cdef const char* reason
        checksum = checksum and not later
        PyObject_GetBuffer(data, &self.view, PyBUF_SIMPLE)
        self.is_open = True
        self.size_bytes = self.view.len
        if self.view.len >= MIN_NOGIL_BYTES:
            with nogil:
                reason = parse(
                    <const unsigned char*>self.view.buf, self.view.len, checksum, &self.columns
                )
        else:
            reason = parse(
                <const unsigned char*>self.view.buf, self.view.len, checksum, &self.columns
            )
        # Report "checksum" for a damaged block, whichever field the damage hit.
        if reason is not NULL and later:
            reason = parse(<const unsigned char*>self.view.buf, self.view.len, True, &self.columns)
        if reason is not NULL:
            self.close()
            text = reason.decode()
            raise (UnknownVersion if text == "version" else BadBlock)(text)
        if later:
            self.columns.owed = <const unsigned char*>self.view.buf
            self.columns.owed_size = self.view.len

    def __dealloc__(self):
        if self.is_open:
            PyBuffer_Release(&self.view)

    @property
    def count(self):
        """Return the number of messages."""
        return self.columns.count

    def close(self):
        """Release the buffer; the layout cannot be read afterwards.

        Raises BufferError while another thread reads it.
        """
        if self.users:
            raise BufferError("layout must not be closed while it is read")
        if self.is_open:
            self.is_open = False
            PyBuffer_Release(&self.view)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    cdef int hold(self, bint compares=False) except -1:
        """Mark as read by one more call. `compares`: that call verifies a pending checksum."""
        if not self.is_open:
            raise ValueError("layout must be open, got a closed one")
        if self.columns.owed is not NULL and not compares:
            raise ValueError("layout was opened with later=True; gather verifies its checksum first")
        self.users += 1
        return 0

    cdef void release(self) noexcept:
        self.users -= 1


# --- making ---------------------------------------------------------------------


def concat(layouts) -> bytes:
    """Return one block of all messages of the layouts, in order."""
    cdef list items = list(layouts)
    cdef Py_ssize_t held = 0, number, count = len(items)
    cdef Layout layout
    cdef Slice* slices
    for item in items:
        if not isinstance(item, Layout):
            raise TypeError("concat takes layouts only")
    slices = <Slice*>PyMem_Malloc(max(1, count) * sizeof(Slice))
    if slices is NULL:
        raise MemoryError
    try:
        for number in range(count):
            layout = items[number]
            layout.hold()
            held += 1
            slices[number].columns = &layout.columns
            slices[number].start = 0
            slices[number].end = layout.columns.count
        return block_of(slices, count)
    finally:
        for number in range(held):
            (<Layout>items[number]).release()
        PyMem_Free(slices)


cdef class BlockMerger:
    """One block of all messages of several blocks: measured first, written later.

    Only for valid immutable blocks: it locates their columns and does not check the content.
    A single block is copied unchanged.
    """

    cdef list blocks
    cdef Columns* columns
    cdef Slice* slices
    cdef Py_ssize_t count
    cdef Sizes sizes
    cdef int flags
    cdef const unsigned char* only
    cdef readonly Py_ssize_t size_bytes

    def __cinit__(self, list blocks not None):
        cdef Py_ssize_t number
        self.blocks = list(blocks)
        self.count = len(self.blocks)
        if self.count == 0:
            raise BadColumns("a block must have at least one message")
        # One block is its own result; its columns need not be located.
        if self.count == 1:
            self.only = data_of(self.blocks[0], &self.size_bytes)
            return
        self.columns = <Columns*>PyMem_Malloc(self.count * sizeof(Columns))
        self.slices = <Slice*>PyMem_Malloc(self.count * sizeof(Slice))
        if self.columns is NULL or self.slices is NULL:
            raise MemoryError
        for number in range(self.count):
            self.take(number, self.blocks[number])
        self.measure()

    def __dealloc__(self):
        PyMem_Free(self.columns)
        PyMem_Free(self.slices)

    cdef int take(self, Py_ssize_t number, block) except -1:
        cdef Columns* columns = &self.columns[number]
        cdef Py_ssize_t size
        cdef const unsigned char* data = data_of(block, &size)
        cdef const char* reason = find_columns(data, size, columns)
        if reason is not NULL:
            raise BadBlock(reason.decode())
        self.slices[number].columns = columns
        self.slices[number].start = 0
        self.slices[number].end = columns.count
        return 0

    cdef int measure(self) except -1:
        cdef Target unused
        if not measure(self.slices, self.count, &self.sizes):
            raise BadBlock("offsets")
        self.flags = flags_for(&self.sizes)
        self.size_bytes = place_columns(NULL, self.flags, &self.sizes, &unused)
        if self.size_bytes > LARGEST:
            raise OverflowError(
                f"a block of {self.size_bytes} bytes; at most {MAX_BYTES} are possible"
            )
        return 0

    def write(self, bytes before not None) -> bytes:
        """Return `before` followed by the block."""
        cdef Py_ssize_t offset = len(before)
        cdef bytes data = PyBytes_FromStringAndSize(NULL, offset + self.size_bytes)
        cdef unsigned char* out = <unsigned char*>PyBytes_AS_STRING(data)
        memcpy(out, PyBytes_AS_STRING(before), offset)
        if self.size_bytes >= MIN_NOGIL_BYTES:
            with nogil:
                self.write_to(out + offset)
        else:
            self.write_to(out + offset)
        return data

    cdef void write_to(self, unsigned char* out) noexcept nogil:
        if self.count == 1:
            memcpy(out, self.only, self.size_bytes)
        else:
            write_block(out, self.size_bytes, self.flags, &self.sizes, self.slices, self.count)


def cut(Layout layout not None, int64_t start, int64_t end) -> bytes:
    """Return the block of messages `start` to `end` (exclusive). Raises IndexError if empty."""
    cdef Slice slice
    if not 0 <= start < end <= layout.columns.count:
        raise IndexError(f"messages {start} to {end} of {layout.columns.count}")
    slice.columns = &layout.columns
    slice.start = start
    slice.end = end
    layout.hold()
    try:
        return block_of(&slice, 1)
    finally:
        layout.release()


cdef bint is_sound(const Strings* strings, int64_t count) noexcept nogil:
    return (
        get_i32(strings.offsets, 0) >= 0
        and get_i32(strings.offsets, count) <= strings.size
        and is_ordered(strings.offsets, count)
    )


cdef int use_strings(
    Strings* strings, Buffer offsets, Buffer data, int64_t count, name
) except -1:
    """Use a caller's strings after checking that the offsets ascend within the data."""
    cdef bint sound
    if offsets.view.len != (count + 1) * 4:
        raise BadColumns(f"{name}: {offsets.view.len} bytes of offsets for {count} values")
    strings.offsets = offsets.at()
    strings.data = data.at()
    strings.size = min(data.view.len, INT32_MAX)
    if count < MANY:
        sound = is_sound(strings, count)
    else:
        with nogil:
            sound = is_sound(strings, count)
    if not sound:
        raise BadColumns(f"{name}: offsets must ascend within the data")
    return 0


cdef bint is_text(const Strings* strings, int64_t start, int64_t end, int64_t count) noexcept nogil:
    return is_utf8(strings.data, start, end, strings.offsets, count)


cdef int require_text(const Strings* strings, int64_t count, name) except -1:
    cdef int64_t start = get_i32(strings.offsets, 0), end = get_i32(strings.offsets, count)
    cdef bint sound
    if not 0 <= start <= end <= strings.size:
        raise BadColumns(f"{name}: changed while read")
    if end - start < MIN_NOGIL_BYTES:
        sound = is_text(strings, start, end, count)
    else:
        with nogil:
            sound = is_text(strings, start, end, count)
    if not sound:
        raise BadColumns(f"{name}: not UTF-8")
    return 0


cdef int require_bits(
    Buffer bits, int64_t first, const unsigned char* offsets, int64_t count, name
) except -1:
    cdef bint sound
    if first < 0 or first > bits.view.len * 8 - count:
        raise BadColumns(f"{name}: {bits.view.len} bytes of validity for {count} values")
    with nogil:
        sound = nulls_are_empty(offsets, bits.at(), first, count)
    if not sound:
        raise BadColumns(f"{name}: a null must be empty")
    return 0


def build(insertion_ms, bodies, body_offsets, keys=None, headers=None):
    """Copy a caller's columns into a block. Returns a HeadroomBlock if it is large, else bytes.

    `insertion_ms` is one number for all messages or a column of int64. `keys` is (data,
    offsets, validity or None, first bit); `headers` is (offsets, names, name_offsets, values,
    value_offsets, validity or None, first bit). Offsets are int32; the first need not be 0,
    and data may follow the last.

    Raises BadColumns with the name of the invalid column.
    """
    cdef Columns columns
    cdef Slice slice
    cdef Buffer held_insertion, held_bodies = Buffer(bodies), offsets = Buffer(body_offsets)
    memset(&columns, 0, sizeof(Columns))
    columns.count = offsets.view.len // 4 - 1
    if columns.count < 1:
        raise BadColumns("body: a block must have at least one message")
    use_strings(&columns.bodies, offsets, held_bodies, columns.count, "body")
    if isinstance(insertion_ms, int):
        columns.insertion_ms = insertion_ms
    else:
        held_insertion = Buffer(insertion_ms)
        if held_insertion.view.len != columns.count * 8:
            raise BadColumns(
                f"insertion_ms: {held_insertion.view.len} bytes for {columns.count} values"
            )
        columns.insertion = held_insertion.at()
    held = use_keys(&columns, keys), use_headers(&columns, headers)
    slice.columns = &columns
    slice.start = 0
    slice.end = columns.count
    return block_of(&slice, 1, True)


cdef tuple use_keys(Columns* columns, keys):
    """Use a caller's keys. Returns the objects that must live until the block is written."""
    cdef Buffer data, offsets, bits = None
    if keys is None:
        return ()
    given_data, given_offsets, validity, first_bit = keys
    data, offsets = Buffer(given_data), Buffer(given_offsets)
    use_strings(&columns.keys, offsets, data, columns.count, "shard_key")
    require_text(&columns.keys, columns.count, "shard_key")
    if validity is not None:
        bits = Buffer(validity)
        columns.key_bit = first_bit
        require_bits(bits, columns.key_bit, columns.keys.offsets, columns.count, "shard_key")
        columns.key_bits = bits.at()
    return data, offsets, bits


cdef tuple use_headers(Columns* columns, headers):
    """Use a caller's headers. Returns the objects that must live until the block is written."""
    cdef Buffer offsets, names, name_offsets, values, value_offsets, bits = None
    if headers is None:
        return ()
    offsets, names, name_offsets, values, value_offsets = [Buffer(part) for part in headers[:5]]
    columns.entries = name_offsets.view.len // 4 - 1
    if columns.entries < 0:
        raise BadColumns("headers: offsets of names are missing")
    use_strings(&columns.names, name_offsets, names, columns.entries, "headers' names")
    use_strings(&columns.values, value_offsets, values, columns.entries, "headers' values")
    require_text(&columns.names, columns.entries, "headers' names")
    use_maps(columns, offsets)
    validity, first_bit = headers[5:]
    if validity is not None:
        bits = Buffer(validity)
        columns.header_bit = first_bit
        require_bits(bits, columns.header_bit, offsets.at(), columns.count, "headers")
        columns.header_bits = bits.at()
    return offsets, names, name_offsets, values, value_offsets, bits


cdef int use_maps(Columns* columns, Buffer offsets) except -1:
    cdef const unsigned char* at = offsets.at()
    cdef int64_t count = columns.count
    if offsets.view.len != (count + 1) * 4:
        raise BadColumns(f"headers: {offsets.view.len} bytes of offsets for {count} values")
    if get_i32(at, 0) < 0 or get_i32(at, count) > columns.entries or not is_ordered(at, count):
        raise BadColumns("headers: offsets must ascend within the entries")
    columns.header_offsets = at
    return 0


# --- over shards ----------------------------------------------------------------


cdef bint place_messages(
    const Columns* columns, int32_t shards, int32_t keyless, int32_t* places
) noexcept nogil:
    """Compute the shard of each message. Returns False if a key's offsets leave the data."""
    cdef int64_t number, keyless_seen = 0
    cdef bint has_key
    cdef Stretch key
    for number in range(columns.count):
        has_key = columns.keys.offsets is not NULL
        if has_key and columns.key_bits is not NULL:
            has_key = bits_set(columns.key_bits, columns.key_bit + number, 1)
        if not has_key:
            places[number] = <int32_t>((keyless + keyless_seen // RUN) % shards)
            keyless_seen += 1
            continue
        if not stretch_of(&columns.keys, number, number + 1, &key):
            return False
        places[number] = <int32_t>(
            hash_of(columns.keys.data + key.start, key.end - key.start, 0) % <uint64_t>shards
        )
    return True


cdef void order_messages(
    const int32_t* places, int64_t count, int32_t shards, int64_t* ends, int32_t* order
) noexcept nogil:
    """Counting sort of messages by shard, stable; `ends` are the ends of the shards in `order`."""
    cdef int64_t number, at = 0
    memset(ends, 0, shards * sizeof(int64_t))
    for number in range(count):
        ends[places[number]] += 1
    for number in range(shards):
        at += ends[number]
        ends[number] = at - ends[number]
    for number in range(count):
        order[ends[places[number]]] = <int32_t>number
        ends[places[number]] += 1


cdef int64_t slices_of(
    const Columns* columns, const int32_t* order, int64_t count, Slice* slices
) noexcept nogil:
    """Make slices of the messages; consecutive messages share one. Returns their count."""
    cdef int64_t number, found = 0
    for number in range(count):
        if found and slices[found - 1].end == order[number]:
            slices[found - 1].end += 1
        else:
            slices[found].columns = columns
            slices[found].start = order[number]
            slices[found].end = order[number] + 1
            found += 1
    return found


cdef object block_of_some(const Columns* columns, const int32_t* order, int64_t count):
    cdef Slice* slices = <Slice*>PyMem_Malloc(count * sizeof(Slice))
    cdef int64_t slice_count
    if slices is NULL:
        raise MemoryError
    try:
        if count < MANY:
            slice_count = slices_of(columns, order, count, slices)
        else:
            with nogil:
                slice_count = slices_of(columns, order, count, slices)
        return block_of(slices, slice_count, True)
    finally:
        PyMem_Free(slices)


cdef bint order_by_shard(
    const Columns* columns,
    int32_t shards,
    int32_t keyless,
    int32_t* places,
    int64_t* ends,
    int32_t* order,
) noexcept nogil:
    """Sort the messages by shard. Returns False if a key's offsets leave the data."""
    cdef bint sound = place_messages(columns, shards, keyless, places)
    if sound:
        order_messages(places, columns.count, shards, ends, order)
    return sound


def split(Layout layout not None, int32_t shards, int32_t keyless) -> list:
    """Split a block by shard. Returns (shard, block) pairs; block is None if it is the whole one.

    The shard of a key is its XXH64 modulo `shards`. Messages without a key go round the shards
    from `keyless`, in runs of KEYLESS_RUN. Raises IndexError unless 0 <= keyless < shards.
    """
    cdef int64_t count = layout.columns.count, start = 0, number
    cdef int64_t* ends = NULL
    cdef int32_t* places = NULL
    cdef int32_t* order
    cdef bint sound
    cdef list found = []
    if not 0 <= keyless < shards:
        raise IndexError(f"keyless must be 0 to {shards - 1}, got {keyless}")
    layout.hold()
    try:
        # One run goes to one shard, and the block is used as it is.
        if layout.columns.keys.offsets is NULL and count <= RUN:
            return [(keyless, None)]
        ends = <int64_t*>PyMem_Malloc(shards * sizeof(int64_t))
        places = <int32_t*>PyMem_Malloc(2 * count * sizeof(int32_t))
        if ends is NULL or places is NULL:
            raise MemoryError
        order = places + count
        # Few keys hash faster than the GIL can be released and taken again.
        if count < FEW:
            sound = order_by_shard(&layout.columns, shards, keyless, places, ends, order)
        else:
            with nogil:
                sound = order_by_shard(&layout.columns, shards, keyless, places, ends, order)
        if not sound:
            raise BadBlock("changed while read")
        for number in range(shards):
            # All messages have the same shard: no copy is needed.
            if ends[number] == count and start == 0:
                return [(number, None)]
            if ends[number] > start:
                part = block_of_some(&layout.columns, order + start, ends[number] - start)
                found.append((number, part))
                start = ends[number]
        return found
    finally:
        layout.release()
        PyMem_Free(ends)
        PyMem_Free(places)
