# What the compiled batches of the stream clients share: a scanner of length-prefixed frames,
# growing tables, and an encoder of many requests. A dialect passes its format as parameters.
# The scanner is inline, so that a constant format costs nothing per frame.
from cpython.mem cimport PyMem_Realloc
from libc.stdint cimport uint64_t

from polybus.kernel.byte_order cimport load_u32, load_u32_be, load_u64, load_u64_be

cdef struct FrameFormat:
    Py_ssize_t header  # bytes before the payload
    Py_ssize_t length_at  # offset of the payload's length in the header
    int length_size  # 4 or 8 bytes
    bint big_endian
    int mark  # the required first byte, or NO_MARK

cdef enum:
    NO_MARK = -1
    FIRST_CAPACITY = 32  # entries of a new table; it doubles as it fills
    MAX_PREFIX = 288  # a request's header with the longest topic name

# Why a scan stopped before the end. Dialects number their own reasons from DIALECT_REASON.
cdef enum StopReason:
    NO_REASON = 0
    TOO_LARGE = 1
    BAD_MARK = 2
    DIALECT_REASON = 3

cdef struct Scan:
    Py_ssize_t size  # of the scanned region
    Py_ssize_t consumed  # bytes of the frames before the current one
    Py_ssize_t payload  # offset of the current frame's payload
    Py_ssize_t length  # of it
    Py_ssize_t next  # offset of the next frame
    Py_ssize_t wanted  # size of the incomplete last frame with its header, 0 if unknown
    int reason


cdef inline bint next_frame(
    Scan* scan, const unsigned char* data, const FrameFormat* format, uint64_t max_payload
) noexcept nogil:
    """Advance to the next complete frame. Returns False at the end or at a bad frame."""
    cdef const unsigned char* at = data + scan.next
    cdef Py_ssize_t left = scan.size - scan.next
    cdef uint64_t length
    scan.consumed = scan.next
    if left < format.header:
        return False
    if format.mark != NO_MARK and at[0] != format.mark:
        scan.reason = BAD_MARK
        return False
    if format.length_size == 4:
        length = load_u32_be(at + format.length_at) if format.big_endian else load_u32(at + format.length_at)
    else:
        length = load_u64_be(at + format.length_at) if format.big_endian else load_u64(at + format.length_at)
    # Before the frame is complete: a client must not wait for a frame that it would reject.
    if length > max_payload:
        scan.reason = TOO_LARGE
        return False
    if length > <uint64_t>(left - format.header):
        scan.wanted = format.header + <Py_ssize_t>length
        return False
    scan.payload = scan.next + format.header
    scan.length = <Py_ssize_t>length
    scan.next = scan.payload + scan.length
    return True


cdef inline void* grow(void* entries, Py_ssize_t* capacity, size_t entry_size) except NULL:
    """Return the table with twice its capacity."""
    cdef Py_ssize_t doubled = max(<Py_ssize_t>FIRST_CAPACITY, 2 * capacity[0])
    cdef void* grown = PyMem_Realloc(entries, doubled * entry_size)
    if grown is NULL:
        raise MemoryError()
    capacity[0] = doubled
    return grown


cdef class FrameBatch:
    cdef bytes region
    cdef Py_ssize_t count

    cdef Py_ssize_t index(self, Py_ssize_t place) except -1


cdef struct LengthField:
    Py_ssize_t at  # offset in the prefix
    Py_ssize_t empty  # its value for an empty content
    bint big_endian

cdef struct RequestPrefix:
    unsigned char[MAX_PREFIX] data
    Py_ssize_t size
    LengthField[2] lengths
    int length_count

cdef Scan start_scan(Py_ssize_t buffer_size, Py_ssize_t start, Py_ssize_t end) except *
cdef tuple encode_run(
    const RequestPrefix* prefix,
    contents,
    Py_ssize_t first,
    Py_ssize_t max_content,
    Py_ssize_t max_bytes,
)
cdef bytes encode_all(const RequestPrefix* prefix, contents, Py_ssize_t max_content)
