"""Packets of a GSB client: decodes many received packets per call, encodes calls and replies.

    frame    =  [ 0x01 over ipc ]  length u64 BE  |  Packet        (nng's SP framing)
    Packet   =  one protobuf field: its tag, its length, the message

`scan` reads a received buffer once and returns a tuple for each packet:

    (7, request_id, code, type, data)              a CallReply
    (16, request_id, data, caller, address)        a CallRequest
    (0, payload)                                   any other packet, for protobuf

Calls and replies are decoded without protobuf if they have the form that every protobuf library
writes (gsb_packets.pyx). Any other encoding that protobuf allows is left to the library, so both
always agree. Ids stay bytes because they are only compared and sent back.

`encode_call` and `encode_reply` return complete frames. With a size in place of the data they
return the frame up to its data, which is then sent separately.

Every length is checked against the end of the buffer before it is used.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint32_t, uint64_t

from polybus.dialects.gsb.gsb_packets cimport CALL_REPLY, CALL_REQUEST, SERVICE_CALL, Kind, Packet, Slice, field_size, frame_size, put_field, put_head, put_reply, reply_size, slice_of
from polybus.dialects.gsb.gsb_packets cimport read_packet as decode
from polybus.kernel.client_batch cimport (
    BAD_MARK, NO_MARK, TOO_LARGE, FrameFormat, Scan, next_frame, start_scan,
)

cdef enum:
    LENGTH = 8
    IPC_MARK = 1
    # Data of at least this size is returned as a view of a packet with its own buffer.
    LARGE = 65536

REPLY = CALL_REPLY
REQUEST = CALL_REQUEST
OTHER = 0


cdef object read(const unsigned char* payload, Py_ssize_t size, const unsigned char* base, object owner):
    """Return the tuple of a packet. `owner` is the buffer at `base` if it has this packet alone."""
    cdef Packet packet
    cdef Kind kind = decode(payload, size, &packet)
    cdef Py_ssize_t start
    if kind != CALL_REPLY and kind != CALL_REQUEST:
        return (OTHER, payload[:size])
    request_id = packet.request_id.at[:packet.request_id.size]
    if owner is not None and packet.data.size >= LARGE:
        start = packet.data.at - base
        data = memoryview(owner)[start : start + packet.data.size]
    else:
        data = packet.data.at[:packet.data.size]
    if kind == CALL_REPLY:
        return (REPLY, request_id, <int64_t>packet.code, <int64_t>packet.type, data)
    caller = packet.caller.at[:packet.caller.size].decode("ascii")
    address = packet.address.at[:packet.address.size].decode("ascii")
    return (REQUEST, request_id, data, caller, address)


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
        packets.append(read(data + scan.payload, scan.next - scan.payload, data, None))
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
    return read(&frame[header], frame.shape[0] - header, &frame[0], frame.base)


# --- encoding


cdef Slice data_slice(object data) except *:
    """Return the data of a packet, given as bytes, or as the size of separately sent data."""
    cdef Slice view
    if type(data) is bytes:
        return slice_of(<bytes> data)
    view.at, view.size = NULL, data
    if not 0 < view.size < (<int64_t> 1 << 40):
        raise ValueError("size")
    return view


cdef bytes new_frame(bint is_ipc, Py_ssize_t inner, Slice data):
    """Allocate the frame of a message of `inner` bytes, without separately sent data."""
    cdef Py_ssize_t size = frame_size(is_ipc, inner)
    return PyBytes_FromStringAndSize(NULL, size - data.size if data.at is NULL else size)


def encode_call(bint is_ipc, bytes address not None, bytes request_id not None, data not None):
    """Return a framed ServiceCallRequest. `data` is bytes, or the size of separate data."""
    cdef Slice body = data_slice(data), name = slice_of(address), number = slice_of(request_id)
    cdef Py_ssize_t inner = field_size(name) + field_size(number) + field_size(body)
    cdef bytes frame = new_frame(is_ipc, inner, body)
    cdef unsigned char* out = <unsigned char*> PyBytes_AS_STRING(frame)
    out = put_head(out, is_ipc, SERVICE_CALL, inner)
    put_field(put_field(put_field(out, 1, name), 2, number), 3, body)
    return frame


def encode_reply(bint is_ipc, bytes request_id not None, uint32_t code, bint partial, data not None):
    """Return a framed CallReply. `data` is bytes, or the size of separate data."""
    cdef Slice body = data_slice(data), number = slice_of(request_id)
    cdef Py_ssize_t inner = reply_size(number, code, partial, body)
    cdef bytes frame = new_frame(is_ipc, inner, body)
    cdef unsigned char* out = <unsigned char*> PyBytes_AS_STRING(frame)
    put_reply(out, is_ipc, inner, number, code, partial, body)
    return frame
