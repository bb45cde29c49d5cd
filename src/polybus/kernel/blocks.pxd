# Columns of messages in memory, and slices of them that are written one after the other.
# All code that builds or reads blocks uses these structures.
from libc.stdint cimport int32_t, int64_t, uint64_t

cdef extern from "column_loops.h" nogil:
    int32_t get_i32 "polybus_i32"(const unsigned char* column, int64_t place)
    void set_i32 "polybus_set_i32"(unsigned char* column, int64_t place, int32_t value)
    int64_t get_i64 "polybus_i64"(const unsigned char* column, int64_t place)
    bint is_ordered "polybus_ordered"(const unsigned char* offsets, int64_t count)
    bint nulls_are_empty "polybus_nulls_are_empty"(
        const unsigned char* offsets, const unsigned char* bits, int64_t first_bit, int64_t count
    )
    void rebase "polybus_rebase"(
        unsigned char* out, const unsigned char* offsets, int64_t count, int32_t shift
    )
    void repeat_i32 "polybus_repeat_i32"(unsigned char* out, int64_t count, int32_t value)
    void repeat_i64 "polybus_repeat_i64"(unsigned char* out, int64_t count, int64_t value)
    void count_i64 "polybus_count_i64"(unsigned char* out, int64_t count, int64_t first)
    int64_t bits_set "polybus_bits_set"(const unsigned char* bits, int64_t first, int64_t count)
    void copy_bits "polybus_copy_bits"(
        unsigned char* out, int64_t out_bit, const unsigned char* bits, int64_t bit, int64_t count
    )
    bint is_utf8 "polybus_is_utf8"(
        const unsigned char* data,
        int64_t start,
        int64_t end,
        const unsigned char* offsets,
        int64_t count,
    )

cdef extern from "xxh64.h" nogil:
    uint64_t hash_of "polybus_xxh64"(const unsigned char* at, size_t size, uint64_t seed)
    uint64_t hash_copying "polybus_xxh64_copying"(
        const unsigned char* at, size_t size, uint64_t seed, size_t start, size_t end,
        unsigned char* out,
    )


cdef struct Strings:
    const unsigned char* offsets  # NULL: there is no such column
    const unsigned char* data
    int64_t size  # of the data; every offset is at most this

cdef struct Columns:
    int64_t count
    const unsigned char* insertion  # NULL: `insertion_ms` for all
    int64_t insertion_ms
    Strings bodies
    Strings keys
    const unsigned char* key_bits  # NULL: every message has a key
    int64_t key_bit  # index of the bit of message 0
    const unsigned char* header_offsets  # into the entries. NULL: no headers
    const unsigned char* header_bits
    int64_t header_bit
    int64_t entries  # every header offset is at most this
    Strings names
    Strings values
    const unsigned char* owed  # the block while its checksum is not verified, else NULL
    int64_t owed_size
    bint is_damaged  # the checksum was verified and does not match

cdef struct Stretch:  # data[start:end], read once so that the written size is the measured one
    int64_t start
    int64_t end

cdef struct Slice:  # messages `start` to `end` of a set of columns
    const Columns* columns
    int64_t start
    int64_t end
    Stretch bodies
    Stretch keys
    Stretch entries
    Stretch names
    Stretch values

cdef struct Sizes:  # sums over slices
    int64_t count
    int64_t bodies
    int64_t with_key
    int64_t keys
    int64_t with_headers
    int64_t entries
    int64_t names
    int64_t values

cdef struct Target:  # where columns are written. NULL: there is no such column
    unsigned char* insertion
    unsigned char* body_offsets
    unsigned char* bodies
    unsigned char* key_bits
    unsigned char* key_offsets
    unsigned char* keys
    unsigned char* header_bits
    unsigned char* header_offsets
    unsigned char* name_offsets
    unsigned char* names
    unsigned char* value_offsets
    unsigned char* values

cdef bint measure(Slice* slices, int64_t slice_count, Sizes* sizes) noexcept nogil
cdef bint measure_one(Slice* slice, Sizes* sizes) noexcept nogil
cdef void write_columns(const Slice* slices, int64_t slice_count, Target* target) noexcept nogil


cdef class Layout:
    cdef Py_buffer view
    cdef Columns columns
    cdef readonly Py_ssize_t size_bytes
    cdef int users  # calls that are reading it without the GIL
    cdef bint is_open
    cdef int hold(self, bint compares=*) except -1
    cdef void release(self) noexcept
