"""rqueue's wire seen from a client: many messages in, many messages out, one call each.

Coming in, `scan` walks the frames of a received buffer once and returns a
NotificationBatch: one copy of the bytes, and for each message where it lies in
them. No Python object is made per message until someone asks for it.

Going out, `encode_run` writes the PUBLISH frames of many messages into one
buffer.

Every length is checked against the end of the buffer before it is believed.
A scan stops at the first bad frame and names the reason; the messages before it
are in the batch. Offsets in a batch are 32 bits: an entry is 16 bytes, and a
region over 4 GiB is refused.
"""
cimport cython
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_Check, PyBytes_FromStringAndSize, PyBytes_GET_SIZE,
)
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memcmp, memcpy

cdef enum:
    HEADER = 5  # payload length 4, type 1
    PUBLISH_HEADER = 11  # PUBLISH's header, NOTIFICATION's header, the topic's length
    MESSAGE_ID = 16
    PART_HEADER = 20  # message id 16, index 2, count 2
    FIRST_CAPACITY = 32  # entries of a fresh table; it doubles as it fills
    MAX_TOPIC = 255

cdef extern from "Python.h":
    Py_ssize_t PY_SSIZE_T_MAX

cdef enum Type:
    PUBLISH = 0
    NOTIFICATION = 7
    PART = 8

cdef Py_ssize_t MAX_U32 = 0xFFFFFFFF

# Roughly what the objects of one batch weigh besides their tables.
cdef Py_ssize_t BATCH_OVERHEAD_BYTES = 256

# Names shared with the server's side (dialects/rqueue/server/rqueue_framing.pyx) where both can see the fault.
PAYLOAD_TOO_LARGE = "payload_too_large"
TOPIC_LENGTH = "topic_length"
PART_LENGTH = "part_length"
PART_INDEX = "part_index"

cdef struct Entry:
    uint32_t topic  # offset in the region
    uint32_t body  # offset in the region; of a whole message: its place in `wholes`
    uint32_t size
    uint8_t topic_size
    uint8_t is_whole  # put together from PARTs: the content is an object of its own

cdef struct PartEntry:
    Entry entry  # body and size are those of the chunk
    uint32_t before  # how many messages of the batch come before this part


cdef inline Py_ssize_t read_u32(const unsigned char* at) noexcept nogil:
    return (<Py_ssize_t>at[0] << 24) | (at[1] << 16) | (at[2] << 8) | at[3]


cdef inline int read_u16(const unsigned char* at) noexcept nogil:
    return (at[0] << 8) | at[1]


cdef inline void write_u32(unsigned char* out, Py_ssize_t value) noexcept nogil:
    out[0] = (value >> 24) & 0xFF
    out[1] = (value >> 16) & 0xFF
    out[2] = (value >> 8) & 0xFF
    out[3] = value & 0xFF


@cython.final
@cython.freelist(256)
cdef class Message:
    """One notification. A value: equal by its fields, hashable, not to be changed."""

    cdef readonly bytes topic
    cdef readonly bytes content

    __match_args__ = ("topic", "content")

    def __init__(self, bytes topic not None, bytes content not None):
        self.topic = topic
        self.content = content

    def __eq__(self, other):
        cdef Message that
        if not isinstance(other, Message):
            return NotImplemented
        that = other
        return self.topic == that.topic and self.content == that.content

    def __hash__(self):
        return hash((self.topic, self.content))

    def __repr__(self):
        return f"Message(topic={self.topic!r}, content={self.content!r})"


@cython.final
cdef class Part:
    """One piece of a larger message, as it came."""

    cdef readonly bytes topic
    cdef readonly bytes message_id
    cdef readonly int index
    cdef readonly int count
    cdef readonly bytes chunk

    def __init__(
        self,
        bytes topic not None,
        bytes message_id not None,
        int index,
        int count,
        bytes chunk not None,
    ):
        self.topic = topic
        self.message_id = message_id
        self.index = index
        self.count = count
        self.chunk = chunk

    def __repr__(self):
        return f"Part(topic={self.topic!r}, {self.index} of {self.count}, {len(self.chunk)} bytes)"


@cython.final
cdef class NotificationBatch:
    """The messages of one received buffer, in their order.

    `len`, indexing, slicing and iteration give messages; PARTs are kept apart
    until `with_wholes` puts what was assembled from them in their place. A
    batch never changes; whatever seems to change it returns another, which
    shares the received bytes.
    """

    cdef bytes region
    cdef list wholes
    cdef Entry* entries
    cdef Py_ssize_t count
    cdef Py_ssize_t capacity
    cdef PartEntry* part_entries
    cdef Py_ssize_t part_capacity
    cdef readonly Py_ssize_t part_count
    cdef readonly Py_ssize_t total_bytes
    cdef bytes last_topic

    def __cinit__(self):
        self.region = b""
        self.wholes = []

    def __dealloc__(self):
        PyMem_Free(self.entries)
        PyMem_Free(self.part_entries)

    # Filling: only inside this file, before anyone else sees the batch.

    cdef int add(self, const Entry* entry) except -1:
        cdef Entry* grown
        cdef Py_ssize_t capacity
        if self.count == self.capacity:
            capacity = max(<Py_ssize_t>FIRST_CAPACITY, 2 * self.capacity)
            grown = <Entry*>PyMem_Realloc(self.entries, capacity * sizeof(Entry))
            if grown == NULL:
                raise MemoryError()
            self.entries = grown
            self.capacity = capacity
        self.entries[self.count] = entry[0]
        self.count += 1
        self.total_bytes += entry.size
        return 0

    cdef int add_part(self, const Entry* entry) except -1:
        cdef PartEntry* grown
        cdef Py_ssize_t capacity
        if self.part_count == self.part_capacity:
            capacity = max(<Py_ssize_t>FIRST_CAPACITY, 2 * self.part_capacity)
            grown = <PartEntry*>PyMem_Realloc(self.part_entries, capacity * sizeof(PartEntry))
            if grown == NULL:
                raise MemoryError()
            self.part_entries = grown
            self.part_capacity = capacity
        self.part_entries[self.part_count].entry = entry[0]
        self.part_entries[self.part_count].before = <uint32_t>self.count
        self.part_count += 1
        return 0

    cdef NotificationBatch sibling(self):
        """An empty batch over the same bytes."""
        cdef NotificationBatch other = NotificationBatch.__new__(NotificationBatch)
        other.region = self.region
        other.wholes = self.wholes
        return other

    # Making objects, only when asked.

    cdef bytes topic_of(self, const Entry* entry):
        # Neighbours mostly share a topic: then they share its object too.
        cdef const char* at = PyBytes_AS_STRING(self.region) + entry.topic
        cdef bytes last = self.last_topic
        if (
            last is None
            or PyBytes_GET_SIZE(last) != entry.topic_size
            or memcmp(PyBytes_AS_STRING(last), at, entry.topic_size) != 0
        ):
            last = PyBytes_FromStringAndSize(at, entry.topic_size)
            self.last_topic = last
        return last

    cdef bytes content_of(self, const Entry* entry):
        if entry.is_whole:
            return <bytes>self.wholes[entry.body]
        return PyBytes_FromStringAndSize(PyBytes_AS_STRING(self.region) + entry.body, entry.size)

    cdef Message message(self, Py_ssize_t position):
        cdef Message message = Message.__new__(Message)
        message.topic = self.topic_of(&self.entries[position])
        message.content = self.content_of(&self.entries[position])
        return message

    cdef Part part(self, Py_ssize_t number):
        cdef const Entry* entry = &self.part_entries[number].entry
        cdef const char* head = PyBytes_AS_STRING(self.region) + entry.body - PART_HEADER
        cdef Part part = Part.__new__(Part)
        part.topic = self.topic_of(entry)
        part.message_id = PyBytes_FromStringAndSize(head, MESSAGE_ID)
        part.index = read_u16(<const unsigned char*>head + MESSAGE_ID)
        part.count = read_u16(<const unsigned char*>head + MESSAGE_ID + 2)
        part.chunk = self.content_of(entry)
        return part

    # The public face.

    def __len__(self):
        return self.count

    def __getitem__(self, key):
        cdef Py_ssize_t position
        if isinstance(key, slice):
            return self._slice(key)
        position = key
        if position < 0:
            position += self.count
        if not 0 <= position < self.count:
            raise IndexError("batch index out of range")
        return self.message(position)

    def _slice(self, key):
        cdef Py_ssize_t number, first, past, step
        cdef NotificationBatch other = self.sibling()
        first, past, step = key.indices(self.count)
        for number in range(len(range(first, past, step))):
            other.add(&self.entries[first + number * step])
        return other

    def __iter__(self):
        cdef Py_ssize_t position
        for position in range(self.count):
            yield self.message(position)

    def __repr__(self):
        return f"<NotificationBatch of {self.count} messages, {self.total_bytes} bytes>"

    @property
    def memory_bytes(self):
        """About how much memory the batch holds."""
        cdef Py_ssize_t total = BATCH_OVERHEAD_BYTES + PyBytes_GET_SIZE(self.region)
        total += self.capacity * <Py_ssize_t>sizeof(Entry)
        total += self.part_capacity * <Py_ssize_t>sizeof(PartEntry)
        return total + sum([len(whole) for whole in self.wholes])

    def contents(self):
        """The contents of all messages, as a list of bytes."""
        cdef Py_ssize_t position
        # Filled, not comprehended: a list that cannot grow for lack of memory frees an item twice.
        cdef list found = [None] * self.count
        for position in range(self.count):
            found[position] = self.content_of(&self.entries[position])
        return found

    def parts(self):
        """The PARTs that came among the messages, as a list."""
        cdef Py_ssize_t number
        cdef list found = [None] * self.part_count
        for number in range(self.part_count):
            found[number] = self.part(number)
        return found

    def without(self, bytes topic not None):
        """(a batch without the messages of `topic`, the contents of those taken out)."""
        cdef Py_ssize_t position, number, part = 0
        cdef NotificationBatch kept
        cdef list taken = []
        for position in range(self.count):
            if self.has_topic(&self.entries[position], topic):
                taken.append(self.content_of(&self.entries[position]))
        if not taken:
            return self, taken
        kept = self.sibling()
        for position in range(self.count + 1):
            while part < self.part_count and self.part_entries[part].before == position:
                kept.add_part(&self.part_entries[part].entry)
                part += 1
            if position < self.count and not self.has_topic(&self.entries[position], topic):
                kept.add(&self.entries[position])
        return kept, taken

    cdef inline bint has_topic(self, const Entry* entry, bytes topic) noexcept:
        return entry.topic_size == PyBytes_GET_SIZE(topic) and memcmp(
            PyBytes_AS_STRING(self.region) + entry.topic, PyBytes_AS_STRING(topic), entry.topic_size
        ) == 0

    def with_wholes(self, dict wholes not None):
        """The batch with its PARTs gone, and messages put together from them in their place.

        `wholes` maps the number of a part (its place in `parts()`) to the
        content that this part completed.
        """
        cdef NotificationBatch other = self.sibling()
        cdef Py_ssize_t position, part = 0
        other.wholes = list(self.wholes)
        for position in range(self.count + 1):
            while part < self.part_count and self.part_entries[part].before == position:
                if part in wholes:
                    other.add_whole(&self.part_entries[part].entry, wholes[part])
                part += 1
            if position < self.count:
                other.add(&self.entries[position])
        return other

    cdef int add_whole(self, const Entry* part, bytes content) except -1:
        cdef Entry entry = part[0]
        if content is None or PyBytes_GET_SIZE(content) > MAX_U32:
            raise ValueError("a whole message is bytes, and its length fits 32 bits")
        entry.body = <uint32_t>len(self.wholes)
        entry.size = <uint32_t>PyBytes_GET_SIZE(content)
        entry.is_whole = True
        self.wholes.append(content)
        return self.add(&entry)


def scan(
    const unsigned char[::1] buffer not None,
    Py_ssize_t start,
    Py_ssize_t end,
    Py_ssize_t max_payload,
):
    """Read the whole frames in buffer[start:end], as a client sees them.

    Returns (bytes consumed, NotificationBatch, None or the reason why the next
    frame is bad). An unfinished frame at the end is left unconsumed. Frames of
    other types are skipped by their length.
    """
    cdef NotificationBatch batch = NotificationBatch.__new__(NotificationBatch)
    cdef const unsigned char* at
    cdef Py_ssize_t size, consumed = 0
    if not 0 <= start <= end <= buffer.shape[0]:
        raise ValueError("start and end do not lie in the buffer")
    size = end - start
    if size > MAX_U32:
        raise ValueError("a scanned region is at most 4 GiB")
    if size == 0:
        return 0, batch, None
    at = &buffer[start]
    reason = walk(batch, at, size, max_payload, &consumed)
    if batch.count or batch.part_count:
        batch.region = PyBytes_FromStringAndSize(<const char*>at, consumed)
    return consumed, batch, reason


cdef object walk(
    NotificationBatch batch,
    const unsigned char* start,
    Py_ssize_t size,
    Py_ssize_t max_payload,
    Py_ssize_t* consumed,
):
    cdef Py_ssize_t at = 0
    cdef Py_ssize_t length
    while size - at >= HEADER:
        length = read_u32(start + at)
        if length > max_payload:
            return PAYLOAD_TOO_LARGE
        if size - at - HEADER < length:
            break
        reason = take(batch, start, at + HEADER, length, start[at + 4])
        if reason is not None:
            return reason
        at += HEADER + length
        consumed[0] = at
    return None


cdef object take(
    NotificationBatch batch,
    const unsigned char* start,
    Py_ssize_t at,
    Py_ssize_t length,
    int kind,
):
    """Add one frame's payload, start[at:at + length], to the batch, or say why not."""
    cdef Entry entry
    if kind != NOTIFICATION and kind != PART:
        return None
    if length < 2 or start[at] == 0 or start[at] > length - 1:
        return TOPIC_LENGTH
    entry.topic = <uint32_t>(at + 1)
    entry.topic_size = start[at]
    entry.body = <uint32_t>(at + 1 + entry.topic_size)
    entry.size = <uint32_t>(length - 1 - entry.topic_size)
    entry.is_whole = False
    if kind == NOTIFICATION:
        batch.add(&entry)
        return None
    if entry.size < PART_HEADER:
        return PART_LENGTH
    if read_u16(start + entry.body + MESSAGE_ID) >= read_u16(start + entry.body + MESSAGE_ID + 2):
        return PART_INDEX
    entry.body += PART_HEADER
    entry.size -= PART_HEADER
    batch.add_part(&entry)
    return None


def encode_publishes(bytes topic not None, contents, Py_ssize_t max_payload):
    """One buffer with a PUBLISH frame for each of `contents` (any bytes-like objects).

    OverflowError names the first that is too large for one frame.
    """
    cdef list items = list(contents)
    data, after = encode_run(topic, items, 0, max_payload, PY_SSIZE_T_MAX)
    if after != len(items):
        raise OverflowError(
            f"content {after} has {memoryview(items[after]).nbytes} bytes, at most"
            f" {max(0, max_payload - (PUBLISH_HEADER - HEADER) - len(topic))} fit one frame"
        )
    return data


def encode_run(
    bytes topic not None,
    contents not None,
    Py_ssize_t first,
    Py_ssize_t max_payload,
    Py_ssize_t max_bytes,
):
    """PUBLISH frames for a run of contents[first:]: (the buffer, the place after the run).

    The run ends at the end of the list, before a content that is too large for
    one frame, or before the buffer would grow past `max_bytes`; a single frame
    may pass that mark, so there is always progress.
    """
    cdef Py_ssize_t head = PUBLISH_HEADER + len(topic)
    cdef Py_ssize_t room = max_payload - (head - HEADER)
    cdef Py_ssize_t total = 0
    cdef Py_ssize_t size
    cdef Py_ssize_t place = first
    # Holds what the second pass reads, whatever becomes of the caller's list meanwhile.
    cdef list run = []
    if not 1 <= len(topic) <= MAX_TOPIC:
        raise ValueError(f"a topic has 1 to {MAX_TOPIC} bytes, not {len(topic)}")
    if not 0 <= max_payload <= MAX_U32:
        raise ValueError("max_payload must fit 32 bits")
    if first < 0 or max_bytes < 0:
        raise ValueError("first and max_bytes are not negative")
    while place < len(contents):
        content = contents[place]
        if not PyBytes_Check(content):
            content = memoryview(content).tobytes()
        size = PyBytes_GET_SIZE(content)
        if size > room or (run and size > max_bytes - head - total):
            break
        run.append(content)
        total += head + size
        place += 1
    return write_run(topic, run, total), place


cdef bytes write_run(bytes topic, list run, Py_ssize_t total):
    cdef bytes data = PyBytes_FromStringAndSize(NULL, total)
    cdef unsigned char* out = <unsigned char*>PyBytes_AS_STRING(data)
    cdef unsigned char[PUBLISH_HEADER + MAX_TOPIC] prefix
    cdef Py_ssize_t topic_size = PyBytes_GET_SIZE(topic)
    cdef Py_ssize_t head = PUBLISH_HEADER + topic_size
    cdef Py_ssize_t size
    prefix[4] = PUBLISH
    prefix[9] = NOTIFICATION
    prefix[10] = <unsigned char>topic_size
    memcpy(&prefix[PUBLISH_HEADER], PyBytes_AS_STRING(topic), topic_size)
    for content in run:
        size = PyBytes_GET_SIZE(content)
        write_u32(&prefix[0], head - HEADER + size)
        write_u32(&prefix[5], head - 2 * HEADER + size)
        memcpy(out, &prefix[0], head)
        memcpy(out + head, PyBytes_AS_STRING(content), size)
        out += head + size
    return data
