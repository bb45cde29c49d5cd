"""The scanner and the encoder that the stream clients' compiled batches share.

`FrameBatch.scan` walks the length-prefixed frames of a received buffer once. Every length is
checked against the end of the buffer before it is used, and against the limit before the
frame is complete, so that a client never waits for a frame that it would reject.

`encode_run` writes many requests with the same prefix into one buffer: a first pass measures
the contents, a second one copies them.
"""
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_Check, PyBytes_FromStringAndSize, PyBytes_GET_SIZE,
)
from libc.stdint cimport uint32_t, uint64_t

from polybus.kernel.byte_order cimport load_u32, load_u32_be, load_u64, load_u64_be, store_u32, store_u32_be

cdef extern from "bytes_inline.h":
    void copy "polybus_copy"(unsigned char* out, const unsigned char* source, size_t size) noexcept nogil

cdef extern from "Python.h":
    Py_ssize_t PY_SSIZE_T_MAX

# Offsets in a batch have 32 bits, which halves its tables.
cdef Py_ssize_t MAX_REGION = 0xFFFFFFFF


cdef inline uint64_t load_length(const FrameFormat* format, const unsigned char* at) noexcept nogil:
    if format.length_size == 4:
        return load_u32_be(at) if format.big_endian else load_u32(at)
    return load_u64_be(at) if format.big_endian else load_u64(at)


cdef class FrameBatch:
    def __cinit__(self):
        self.region = b""

    def __len__(self):
        return self.count

    cdef int add_frame(
        self, const unsigned char* start, Py_ssize_t at, Py_ssize_t size, const unsigned char* header
    ) except -1:
        return 0

    cdef Scan scan(
        self,
        const unsigned char[::1] buffer,
        Py_ssize_t start,
        Py_ssize_t end,
        const FrameFormat* format,
        uint64_t max_payload,
    ) except *:
        """Add the complete frames of buffer[start:end]; the region is copied by the dialect."""
        cdef Scan scan = Scan(0, NO_REASON, 0)
        cdef const unsigned char* at
        cdef Py_ssize_t left = end - start
        cdef uint64_t length
        if not 0 <= start <= end <= buffer.shape[0]:
            raise ValueError("start and end must lie within the buffer")
        if left > MAX_REGION:
            raise ValueError("a scanned region is at most 4 GiB")
        while left >= format.header:
            at = &buffer[start] + scan.consumed
            if format.mark != NO_MARK and at[0] != format.mark:
                scan.reason = BAD_MARK
                break
            length = load_length(format, at + format.length_at)
            if length > max_payload:
                scan.reason = TOO_LARGE
                break
            if length > <uint64_t>(left - format.header):
                scan.wanted = format.header + <Py_ssize_t>length
                break
            scan.reason = self.add_frame(
                &buffer[start], scan.consumed + format.header, <Py_ssize_t>length, at
            )
            if scan.reason != NO_REASON:
                break
            scan.consumed += format.header + <Py_ssize_t>length
            left -= format.header + <Py_ssize_t>length
        return scan

    cdef Py_ssize_t index(self, Py_ssize_t place) except -1:
        """Return a place that counts from the end, if negative, as one from the start."""
        if place < 0:
            place += self.count
        if not 0 <= place < self.count:
            raise IndexError("batch index out of range")
        return place


cdef tuple encode_run(
    bytes prefix,
    const LengthField* fields,
    int field_count,
    contents,
    Py_ssize_t first,
    Py_ssize_t max_content,
    Py_ssize_t max_bytes,
):
    """Return (a buffer with requests for contents[first:], the place after the last one).

    The run ends at the end of the list, before a content of more than `max_content` bytes, or
    before the buffer would exceed `max_bytes`. A single request may exceed that, so there is
    always progress.
    """
    cdef const unsigned char* head = <const unsigned char*>PyBytes_AS_STRING(prefix)
    cdef Py_ssize_t head_size = PyBytes_GET_SIZE(prefix)
    cdef Py_ssize_t total = 0, place = first, size
    cdef int number
    # Holds the contents for the second pass, also if the caller's list changes meanwhile.
    cdef list run = []
    if first < 0 or max_bytes < 0:
        raise ValueError("first and max_bytes are not negative")
    while place < len(contents):
        content = contents[place]
        if not PyBytes_Check(content):
            content = memoryview(content).tobytes()
        size = PyBytes_GET_SIZE(content)
        if size > max_content or (run and size > max_bytes - head_size - total):
            break
        run.append(content)
        total += head_size + size
        place += 1
    cdef bytes data = PyBytes_FromStringAndSize(NULL, total)
    cdef unsigned char* out = <unsigned char*>PyBytes_AS_STRING(data)
    for content in run:
        size = PyBytes_GET_SIZE(content)
        copy(out, head, head_size)
        for number in range(field_count):
            if fields[number].big_endian:
                store_u32_be(out + fields[number].at, <uint32_t>(fields[number].empty + size))
            else:
                store_u32(out + fields[number].at, <uint32_t>(fields[number].empty + size))
        copy(out + head_size, <const unsigned char*>PyBytes_AS_STRING(content), size)
        out += head_size + size
    return data, place


cdef bytes encode_all(
    bytes prefix, const LengthField* fields, int field_count, contents, Py_ssize_t max_content
):
    """Return one buffer with a request for each of `contents`. Raises OverflowError."""
    cdef list items = list(contents)
    data, after = encode_run(prefix, fields, field_count, items, 0, max_content, PY_SSIZE_T_MAX)
    if after != len(items):
        raise OverflowError(
            f"content {after} has {memoryview(items[after]).nbytes} bytes, at most"
            f" {max(0, max_content)} fit one frame"
        )
    return data
