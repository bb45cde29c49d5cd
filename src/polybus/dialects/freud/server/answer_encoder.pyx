"""Encodes Freud's answers: one buffer for the answers to one group of requests.

    answer  =  code u32 | length u32 | payload                      (little-endian)

Messages come from stored batches, with the columns of request_scanner's ProduceRun:
`offsets` (int32, native order, one more than messages) and `bodies`. The requested part
of a batch is checked before it is read.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from polybus.kernel.byte_order cimport load_length, store_u32, store_u64

cdef extern from "bytes_inline.h":
    void copy "polybus_copy"(unsigned char* out, const unsigned char* source, size_t size) noexcept nogil

cdef extern from "Python.h":
    Py_ssize_t PY_SSIZE_T_MAX

cdef enum:
    HEADER = 8  # code 4, length 4
    OK = 0
    MESSAGE_ID = 8
    RECORD_HEADER = 20  # message id 8, timestamp 8, flags 4

cdef int64_t MAX_U32 = 0xFFFFFFFF


def encode_answers(uint32_t code, Py_ssize_t count, bytes payload not None=b""):
    """Encode `count` equal answers."""
    cdef Py_ssize_t size = HEADER + PyBytes_GET_SIZE(payload)
    cdef Py_ssize_t number
    cdef bytes data
    cdef unsigned char* out
    if <int64_t>PyBytes_GET_SIZE(payload) > MAX_U32:
        raise OverflowError("payload must be at most 4 GiB")
    data = room_for(count, size)
    out = <unsigned char*>PyBytes_AS_STRING(data)
    for number in range(count):
        out = store_u32(store_u32(out, code), <uint32_t>(size - HEADER))
        copy(out, <const unsigned char*>PyBytes_AS_STRING(payload), size - HEADER)
        out += size - HEADER
    return data


cpdef bytes encode_produced(uint64_t first_id, Py_ssize_t count):
    """Encode `count` Ok answers to Produce, with consecutive ids."""
    cdef bytes data = room_for(count, HEADER + MESSAGE_ID)
    cdef unsigned char* out = <unsigned char*>PyBytes_AS_STRING(data)
    cdef Py_ssize_t number
    for number in range(count):
        out = store_u64(store_u32(store_u32(out, OK), MESSAGE_ID), first_id + <uint64_t>number)
    return data


cdef bytes room_for(Py_ssize_t count, Py_ssize_t size):
    if count < 0:
        raise ValueError("count must be >= 0")
    if count > PY_SSIZE_T_MAX // size:
        raise OverflowError("too many answers for one buffer")
    return PyBytes_FromStringAndSize(NULL, count * size)


def encode_messages(offsets, bodies, Py_ssize_t start, Py_ssize_t count):
    """Encode Ok answers to Get Message: messages `start` to `start + count` of a stored batch."""
    cdef Py_buffer index, view
    PyObject_GetBuffer(offsets, &index, PyBUF_SIMPLE)
    try:
        PyObject_GetBuffer(bodies, &view, PyBUF_SIMPLE)
        try:
            return write(&index, &view, NULL, 0, 0, start, count)
        finally:
            PyBuffer_Release(&view)
    finally:
        PyBuffer_Release(&index)


def encode_records(
    uint64_t first_id,
    times_ns,
    uint32_t flags,
    offsets,
    bodies,
    Py_ssize_t start,
    Py_ssize_t count,
):
    """Encode Ok answers to Get Record: messages `start` to `start + count` of a stored batch.

    `first_id` is the id of the batch's message 0, not of `start`. `times_ns` is a column
    of uint64 in native order, one per message.
    """
    cdef Py_buffer index, view, times
    PyObject_GetBuffer(offsets, &index, PyBUF_SIMPLE)
    try:
        PyObject_GetBuffer(bodies, &view, PyBUF_SIMPLE)
        try:
            PyObject_GetBuffer(times_ns, &times, PyBUF_SIMPLE)
            try:
                return write(&index, &view, &times, first_id, flags, start, count)
            finally:
                PyBuffer_Release(&times)
        finally:
            PyBuffer_Release(&view)
    finally:
        PyBuffer_Release(&index)


cdef bytes write(
    const Py_buffer* index,
    const Py_buffer* view,
    const Py_buffer* times,  # NULL: messages, not records
    uint64_t first_id,
    uint32_t flags,
    Py_ssize_t start,
    Py_ssize_t count,
):
    check_columns(index, view.len, start, count)
    if times is not NULL and times.len // 8 < start + count:
        raise ValueError("every record needs its time")
    return encode_columns(
        <const unsigned char*>index.buf,
        <const unsigned char*>view.buf,
        NULL if times is NULL else <unsigned char*>times.buf,
        first_id,
        flags,
        start,
        count,
    )


cdef bytes encode_columns(
    const unsigned char* offsets,
    const unsigned char* bodies,
    const unsigned char* times,  # NULL: messages, not records
    uint64_t first_id,
    uint32_t flags,
    Py_ssize_t start,
    Py_ssize_t count,
):
    """Encode messages of a batch whose columns were checked."""
    cdef Py_ssize_t extra = 0 if times is NULL else RECORD_HEADER
    cdef Py_ssize_t size = offset(offsets, start + count) - offset(offsets, start)
    cdef bytes data = PyBytes_FromStringAndSize(NULL, size + count * (HEADER + extra))
    cdef unsigned char* out = <unsigned char*>PyBytes_AS_STRING(data)
    cdef Py_ssize_t place
    for place in range(start, start + count):
        size = offset(offsets, place + 1) - offset(offsets, place)
        out = store_u32(store_u32(out, OK), <uint32_t>(extra + size))
        if times is not NULL:
            out = store_u64(out, first_id + <uint64_t>place)
            out = store_u64(out, timestamp(times, place))
            out = store_u32(out, flags)
        copy(out, bodies + offset(offsets, place), size)
        out += size
    return data


cdef inline Py_ssize_t offset(const unsigned char* offsets, Py_ssize_t place) noexcept nogil:
    # Copied out: a column may lie at any address.
    cdef int32_t value
    memcpy(&value, offsets + place * <Py_ssize_t>sizeof(int32_t), sizeof(int32_t))
    return value


cdef inline uint64_t timestamp(const unsigned char* times, Py_ssize_t place) noexcept nogil:
    cdef uint64_t value
    memcpy(&value, times + place * 8, 8)
    return value


cdef int check_places(const Py_buffer* index, Py_ssize_t start, Py_ssize_t count) except -1:
    cdef Py_ssize_t last = index.len // <Py_ssize_t>sizeof(int32_t) - 1
    if start < 0 or count < 0 or start > last or count > last - start:
        raise ValueError("start and count reach outside the offsets")
    return 0


cdef int check_columns(
    const Py_buffer* index, Py_ssize_t limit, Py_ssize_t start, Py_ssize_t count
) except -1:
    """The asked part of the columns lies within them and never goes back."""
    cdef const unsigned char* at = <const unsigned char*>index.buf
    cdef Py_ssize_t place
    check_places(index, start, count)
    if offset(at, start) < 0 or offset(at, start + count) > limit:
        raise ValueError("offsets reach outside the bodies")
    for place in range(start, start + count):
        if offset(at, place + 1) < offset(at, place):
            raise ValueError("offsets must not go back")
    return 0


def fitting(offsets, Py_ssize_t start, Py_ssize_t count, Py_ssize_t max_bytes, bint records=False):
    """Return how many messages fit into answers of `max_bytes`; at least one, if any."""
    cdef Py_ssize_t head = HEADER + (RECORD_HEADER if records else 0)
    cdef Py_ssize_t low = 0
    cdef Py_ssize_t high, middle
    cdef const unsigned char* at
    cdef Py_buffer index
    PyObject_GetBuffer(offsets, &index, PyBUF_SIMPLE)
    try:
        check_places(&index, start, count)
        at = <const unsigned char*>index.buf
        high = count
        while low < high:
            middle = (low + high + 1) // 2
            if offset(at, start + middle) - offset(at, start) + middle * head <= max_bytes:
                low = middle
            else:
                high = middle - 1
    finally:
        PyBuffer_Release(&index)
    return max(low, min(count, 1))


def whole_answers(bytes written not None, Py_ssize_t sent):
    """Return how many answers lie wholly within the first `sent` bytes of `written`."""
    cdef const unsigned char* start = <const unsigned char*>PyBytes_AS_STRING(written)
    cdef Py_ssize_t size = min(sent, PyBytes_GET_SIZE(written))
    cdef Py_ssize_t at = 0
    cdef Py_ssize_t whole = 0
    cdef int64_t length
    while size - at >= HEADER:
        length = load_length(start + at + 4)
        if length > size - at - HEADER:
            break
        at += HEADER + <Py_ssize_t>length
        whole += 1
    return whole
