"""Packets of a GSB client: decodes many received packets per call, encodes calls and replies.

    frame    =  [ 0x01 over ipc ]  length u64 BE  |  Packet        (nng's SP framing)
    Packet   =  one protobuf field: its tag, its length, the message

`scan` reads a received buffer once and returns a tuple for each packet:

    (7, request_id, code, type, data)              a CallReply
    (16, request_id, data, caller, address)        a CallRequest
    (0, payload)                                   any other packet, for protobuf

Calls and replies are decoded here if they have the form that every protobuf library writes:
known fields, each at most once, of the right types. Any other encoding that protobuf allows is
left to the library, so both always agree. Ids stay bytes because they are only compared and
sent back.

`encode_call` and `encode_reply` return complete frames. With a size in place of the data they
return the frame up to its data, which is then sent separately.

Every length is checked against the end of the buffer before it is used.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from polybus.kernel.byte_order cimport store_u64_be
from polybus.kernel.client_batch cimport (
    BAD_MARK, NO_MARK, TOO_LARGE, FrameFormat, Scan, next_frame, start_scan,
)

cdef enum:
    LENGTH = 8
    IPC_MARK = 1
    MAX_VARINT = 10
    # Packet's fields, as their tags stand in the bytes.
    CALL_TAG = 0x32  # service_call_request = 6
    REPLY_TAG = 0x3A  # call_reply = 7
    # call_request = 16 has a tag of two bytes.
    REQUEST_TAG_LOW = 0x82
    REQUEST_TAG_HIGH = 0x01

REPLY = 7
REQUEST = 16
OTHER = 0

# Data of at least this size is returned as a view of a packet with its own buffer.
cdef Py_ssize_t LARGE = 65536


cdef struct Slice:
    Py_ssize_t start
    Py_ssize_t size


cdef inline int read_varint(
    const unsigned char* data, Py_ssize_t* at, Py_ssize_t end, uint64_t* value
) noexcept nogil:
    """Read a varint and advance `at`. Returns 0 if it is invalid."""
    cdef uint64_t found = 0
    cdef int shift = 0
    cdef unsigned char byte
    while at[0] < end and shift < 63:
        byte = data[at[0]]
        at[0] += 1
        found |= <uint64_t> (byte & 0x7F) << shift
        if not byte & 0x80:
            value[0] = found
            return 1
        shift += 7
    return 0


cdef inline int read_slice(
    const unsigned char* data, Py_ssize_t* at, Py_ssize_t end, Slice* found
) noexcept nogil:
    cdef uint64_t size = 0
    if not read_varint(data, at, end, &size) or size > <uint64_t> (end - at[0]):
        return 0
    found.start = at[0]
    found.size = <Py_ssize_t> size
    at[0] += found.size
    return 1


cdef object read_reply(const unsigned char* data, Py_ssize_t at, Py_ssize_t end, object owner):
    """Return the tuple of a CallReply, or None if protobuf must decode it."""
    cdef Slice request_id = Slice(0, 0), body = Slice(0, 0)
    cdef uint64_t code = 0, kind = 0
    cdef unsigned int seen = 0, bit
    cdef unsigned char tag
    while at < end:
        tag = data[at]
        at += 1
        bit = 1u << (tag >> 3) if tag < 0x28 else 0
        if seen & bit:
            return None
        seen |= bit
        if tag == 0x0A:
            if not read_slice(data, &at, end, &request_id):
                return None
        elif tag == 0x10:
            if not read_varint(data, &at, end, &code):
                return None
        elif tag == 0x18:
            if not read_varint(data, &at, end, &kind):
                return None
        elif tag == 0x22:
            if not read_slice(data, &at, end, &body):
                return None
        else:
            return None
    if code > 0x7FFFFFFF or kind > 0x7FFFFFFF or not is_ascii(data, request_id):
        return None
    return (REPLY, part(data, request_id), <int64_t> code, <int64_t> kind, taken(data, body, owner))


cdef object read_request(const unsigned char* data, Py_ssize_t at, Py_ssize_t end, object owner):
    """Return the tuple of a CallRequest, or None if protobuf must decode it."""
    cdef Slice found[5]
    cdef unsigned int seen = 0, field
    cdef unsigned char tag
    for field in range(5):
        found[field] = Slice(0, 0)
    while at < end:
        tag = data[at]
        at += 1
        field = tag >> 3
        if tag & 7 != 2 or not 1 <= field <= 4 or seen & (1u << field):
            return None
        seen |= 1u << field
        if not read_slice(data, &at, end, &found[field]):
            return None
    if not is_ascii(data, found[1]):
        return None
    try:
        caller, address = text(data, found[3]), text(data, found[4])
    except UnicodeDecodeError:
        return None
    return (REQUEST, part(data, found[1]), taken(data, found[2], owner), caller, address)


cdef inline bint is_ascii(const unsigned char* data, Slice of) noexcept nogil:
    """Return True if a text is ASCII, and so needs no check for valid UTF-8."""
    cdef Py_ssize_t at
    for at in range(of.start, of.start + of.size):
        if data[at] & 0x80:
            return False
    return True


cdef inline bytes part(const unsigned char* data, Slice of):
    return PyBytes_FromStringAndSize(<const char*> data + of.start, of.size)


cdef inline str text(const unsigned char* data, Slice of):
    return PyUnicode_DecodeUTF8(<const char*> data + of.start, of.size, NULL)


cdef inline object taken(const unsigned char* data, Slice of, object owner):
    if owner is not None and of.size >= LARGE:
        return memoryview(owner)[of.start : of.start + of.size]
    return part(data, of)


cdef object read(const unsigned char* data, Py_ssize_t start, Py_ssize_t end, object owner):
    cdef Py_ssize_t at = start
    cdef Slice message
    cdef object found = None
    if end - at >= 2 and data[at] == REPLY_TAG:
        at += 1
        if read_slice(data, &at, end, &message) and at == end:
            found = read_reply(data, message.start, end, owner)
    elif end - at >= 3 and data[at] == REQUEST_TAG_LOW and data[at + 1] == REQUEST_TAG_HIGH:
        at += 2
        if read_slice(data, &at, end, &message) and at == end:
            found = read_request(data, message.start, end, owner)
    if found is None:
        return (OTHER, PyBytes_FromStringAndSize(<const char*> data + start, end - start))
    return found


def scan(const unsigned char[::1] buffer not None, Py_ssize_t start, Py_ssize_t end, bint is_ipc,
         uint64_t max_packet_bytes):
    """Return (consumed bytes, packets, wanted).

    `wanted` is the size of the incomplete last frame with its header, or 0 if it is unknown.
    Raises ValueError with the reason if the bytes are not frames; earlier packets are lost.
    """
    cdef list packets = []
    cdef Scan scan = start_scan(buffer.shape[0], start, end)
    cdef FrameFormat format = FrameFormat(
        LENGTH + is_ipc, is_ipc, LENGTH, True, IPC_MARK if is_ipc else NO_MARK
    )
    cdef const unsigned char* data = &buffer[start] if scan.size else NULL
    while next_frame(&scan, data, &format, max_packet_bytes):
        packets.append(read(data, scan.payload, scan.next, None))
    if scan.reason == BAD_MARK:
        raise ValueError("ipc_mark")
    if scan.reason == TOO_LARGE:
        raise ValueError("packet_too_large")
    return scan.consumed, packets, scan.wanted


def read_packet(const unsigned char[::1] frame not None, bint is_ipc):
    """Return the packet of one complete frame. Large data is a view of `frame`."""
    cdef Py_ssize_t header = LENGTH + is_ipc
    if frame.shape[0] <= header:
        raise ValueError("region")
    return read(&frame[0], header, frame.shape[0], frame.base)


# --- encoding


cdef inline Py_ssize_t varint_size(uint64_t value) noexcept nogil:
    cdef Py_ssize_t size = 1
    while value >= 0x80:
        value >>= 7
        size += 1
    return size


cdef inline unsigned char* write_varint(unsigned char* out, uint64_t value) noexcept nogil:
    while value >= 0x80:
        out[0] = (value & 0x7F) | 0x80
        out += 1
        value >>= 7
    out[0] = <unsigned char> value
    return out + 1


cdef inline Py_ssize_t field_size(Py_ssize_t size) noexcept nogil:
    """Return the size of a field with `size` bytes; 0 if it is empty."""
    return 1 + varint_size(size) + size if size else 0


cdef inline unsigned char* write_field(unsigned char* out, unsigned char tag, bytes value):
    cdef Py_ssize_t size = PyBytes_GET_SIZE(value)
    if not size:
        return out
    out[0] = tag
    out = write_varint(out + 1, size)
    memcpy(out, PyBytes_AS_STRING(value), size)
    return out + size


cdef inline unsigned char* write_head(
    unsigned char* out, bint is_ipc, unsigned char tag, Py_ssize_t message
) noexcept nogil:
    if is_ipc:
        out[0] = IPC_MARK
        out += 1
    store_u64_be(out, 1 + varint_size(message) + message)
    out[LENGTH] = tag
    return write_varint(out + LENGTH + 1, message)


cdef inline Py_ssize_t size_of(object data) except -1:
    """Return the size of the data, given as bytes or as a size."""
    cdef Py_ssize_t size
    if type(data) is bytes:
        return PyBytes_GET_SIZE(<bytes> data)
    size = data
    if not 0 < size < (<int64_t> 1 << 40):
        raise ValueError("size")
    return size


cdef inline unsigned char* write_data(unsigned char* out, unsigned char tag, object data):
    if type(data) is bytes:
        return write_field(out, tag, <bytes> data)
    out[0] = tag
    return write_varint(out + 1, <Py_ssize_t> data)


cdef inline bytes room(bint is_ipc, Py_ssize_t message, object data):
    """Allocate a frame whose message has this size, without separately sent data."""
    cdef Py_ssize_t size = is_ipc + LENGTH + 1 + varint_size(message) + message
    return PyBytes_FromStringAndSize(NULL, size if type(data) is bytes else size - size_of(data))


def encode_call(bint is_ipc, bytes address not None, bytes request_id not None, data not None):
    """Return a framed ServiceCallRequest. `data` is bytes, or the size of separate data."""
    cdef Py_ssize_t message = (
        field_size(PyBytes_GET_SIZE(address)) + field_size(PyBytes_GET_SIZE(request_id))
        + field_size(size_of(data))
    )
    cdef bytes frame = room(is_ipc, message, data)
    cdef unsigned char* out = <unsigned char*> PyBytes_AS_STRING(frame)
    out = write_head(out, is_ipc, CALL_TAG, message)
    out = write_field(out, 0x0A, address)
    out = write_field(out, 0x12, request_id)
    write_data(out, 0x1A, data)
    return frame


def encode_reply(bint is_ipc, bytes request_id not None, uint32_t code, bint partial, data not None):
    """Return a framed CallReply. `data` is bytes, or the size of separate data."""
    cdef Py_ssize_t message = (
        field_size(PyBytes_GET_SIZE(request_id)) + (1 + varint_size(code) if code else 0)
        + 2 * partial + field_size(size_of(data))
    )
    cdef bytes frame = room(is_ipc, message, data)
    cdef unsigned char* out = <unsigned char*> PyBytes_AS_STRING(frame)
    out = write_head(out, is_ipc, REPLY_TAG, message)
    out = write_field(out, 0x0A, request_id)
    if code:
        out[0] = 0x10
        out = write_varint(out + 1, code)
    if partial:
        out[0] = 0x18
        out[1] = 1
        out += 2
    write_data(out, 0x22, data)
    return frame
