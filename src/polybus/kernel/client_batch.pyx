"""The scanner and the encoder that the stream clients' compiled batches share.

A scan walks the length-prefixed frames of a received buffer once (`next_frame` in the .pxd).
Every length is checked against the end of the buffer before it is used.

`encode_run` writes many requests with the same prefix into one buffer: a first pass measures
the contents, a second one copies them.
"""
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_Check, PyBytes_FromStringAndSize, PyBytes_GET_SIZE,
)
from libc.stdint cimport uint32_t

from polybus.kernel.byte_order cimport store_u32, store_u32_be

cdef extern from "bytes_inline.h":
    void copy "polybus_copy"(unsigned char* out, const unsigned char* source, size_t size) noexcept nogil

cdef extern from "Python.h":
    Py_ssize_t PY_SSIZE_T_MAX

# Offsets in a batch have 32 bits, which halves its tables.
cdef Py_ssize_t MAX_REGION = 0xFFFFFFFF


cdef class FrameBatch:
    """The frames of one received buffer: one copy of its bytes, and tables of offsets."""

    def __cinit__(self):
        self.region = b""

    def __len__(self):
        return self.count

    cdef Py_ssize_t index(self, Py_ssize_t place) except -1:
        """Return a place that counts from the end, if negative, as one from the start."""
        if place < 0:
            place += self.count
        if not 0 <= place < self.count:
            raise IndexError("batch index out of range")
        return place


cdef Scan start_scan(Py_ssize_t buffer_size, Py_ssize_t start, Py_ssize_t end) except *:
    """Return the state of a scan of buffer[start:end]."""
    if not 0 <= start <= end <= buffer_size:
        raise ValueError("start and end must lie within the buffer")
    if end - start > MAX_REGION:
        raise ValueError("a scanned region is at most 4 GiB")
    return Scan(end - start, 0, 0, 0, 0, 0, NO_REASON)


cdef tuple encode_run(
    const RequestPrefix* prefix,
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
    cdef Py_ssize_t total = 0, place = first, size
    cdef const LengthField* field
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
        if size > max_content or (run and size > max_bytes - prefix.size - total):
            break
        run.append(content)
        total += prefix.size + size
        place += 1
    cdef bytes data = PyBytes_FromStringAndSize(NULL, total)
    cdef unsigned char* out = <unsigned char*>PyBytes_AS_STRING(data)
    for content in run:
        size = PyBytes_GET_SIZE(content)
        copy(out, &prefix.data[0], prefix.size)
        for number in range(prefix.length_count):
            field = &prefix.lengths[number]
            if field.big_endian:
                store_u32_be(out + field.at, <uint32_t>(field.empty + size))
            else:
                store_u32(out + field.at, <uint32_t>(field.empty + size))
        copy(out + prefix.size, <const unsigned char*>PyBytes_AS_STRING(content), size)
        out += prefix.size + size
    return data, place


cdef bytes encode_all(const RequestPrefix* prefix, contents, Py_ssize_t max_content):
    """Return one buffer with a request for each of `contents`. Raises OverflowError."""
    cdef list items = list(contents)
    data, after = encode_run(prefix, items, 0, max_content, PY_SSIZE_T_MAX)
    if after != len(items):
        raise OverflowError(
            f"content {after} has {memoryview(items[after]).nbytes} bytes, at most"
            f" {max(0, max_content)} fit one frame"
        )
    return data
