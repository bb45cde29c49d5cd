# What the compiled batches of the stream clients share: a scanner of length-prefixed frames,
# growing tables, and an encoder of many requests. A dialect passes its format as parameters.
from cpython.mem cimport PyMem_Realloc
from libc.stdint cimport uint64_t

cdef struct FrameFormat:
    Py_ssize_t header  # bytes before the payload
    Py_ssize_t length_at  # offset of the payload's length in the header
    int length_size  # 4 or 8 bytes
    bint big_endian
    int mark  # the required first byte, or NO_MARK

cdef enum:
    NO_MARK = -1
    FIRST_CAPACITY = 32  # entries of a new table; it doubles as it fills

# Why a scan stopped. Dialects number their own reasons from DIALECT_REASON.
cdef enum StopReason:
    NO_REASON = 0
    TOO_LARGE = 1
    BAD_MARK = 2
    DIALECT_REASON = 3

cdef struct Scan:
    Py_ssize_t consumed  # bytes of complete frames
    int reason
    Py_ssize_t wanted  # size of the incomplete last frame with its header, 0 if unknown


cdef class FrameBatch:
    """The frames of one received buffer: one copy of its bytes, and tables of offsets."""

    cdef bytes region
    cdef Py_ssize_t count

    # Add one complete frame. `start` is the first byte of the region, `at` and `size` delimit
    # the payload. Returns 0, or a reason of the dialect to stop at this frame.
    cdef int add_frame(
        self, const unsigned char* start, Py_ssize_t at, Py_ssize_t size, const unsigned char* header
    ) except -1
    cdef Scan scan(
        self,
        const unsigned char[::1] buffer,
        Py_ssize_t start,
        Py_ssize_t end,
        const FrameFormat* format,
        uint64_t max_payload,
    ) except *
    cdef Py_ssize_t index(self, Py_ssize_t place) except -1


cdef inline void* grow(void* entries, Py_ssize_t* capacity, size_t entry_size) except NULL:
    """Return the table with twice its capacity."""
    cdef Py_ssize_t doubled = max(<Py_ssize_t>FIRST_CAPACITY, 2 * capacity[0])
    cdef void* grown = PyMem_Realloc(entries, doubled * entry_size)
    if grown is NULL:
        raise MemoryError()
    capacity[0] = doubled
    return grown


cdef struct LengthField:
    Py_ssize_t at  # offset in the prefix
    Py_ssize_t empty  # its value for an empty content
    bint big_endian

cdef tuple encode_run(
    bytes prefix,
    const LengthField* fields,
    int field_count,
    contents,
    Py_ssize_t first,
    Py_ssize_t max_content,
    Py_ssize_t max_bytes,
)
cdef bytes encode_all(
    bytes prefix, const LengthField* fields, int field_count, contents, Py_ssize_t max_content
)
