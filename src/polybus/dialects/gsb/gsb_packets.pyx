"""GSB packets in SP frames: calls and replies, read and written without protobuf.

    frame    =  [01 over ipc] | length u64 big-endian | payload
    payload  =  tag of the kind | length | the message's fields

Most of the traffic is calls and replies, at the bus and at its clients. They are decoded here if
they have the form that every protobuf library writes: one kind, each field at most once, ids
and addresses in ASCII.
Every other encoding that protobuf allows (unknown fields, repeated kinds) is left to the
protobuf library.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint64_t
from libc.string cimport memcpy, memset

from polybus.kernel.framing cimport Encoding, Frame

cdef enum:
    VARINT = 0  # protobuf's wire types
    LENGTH = 2
    LENGTH_SIZE = 8  # of a frame
    FIELDS = 16  # a field's number is below it, so that its tag has one byte
    MAX_INT32 = 0x7FFFFFFF
    MAX_UINT32 = 0xFFFFFFFF


cdef inline const unsigned char* take_varint(
    const unsigned char* at, const unsigned char* end, uint64_t* value
) noexcept nogil:
    """Read a varint. Returns the position after it, or NULL if it is invalid."""
    cdef uint64_t result = 0
    cdef int shift = 0
    while at < end and shift < 70:
        if shift == 63 and at[0] > 1:
            return NULL
        result |= <uint64_t>(at[0] & 0x7F) << shift
        if at[0] < 0x80:
            value[0] = result
            return at + 1
        at += 1
        shift += 7
    return NULL


cdef inline bint is_ascii(Slice text) noexcept nogil:
    """Return True if a text is ASCII, and so needs no check for valid UTF-8."""
    cdef Py_ssize_t at
    for at in range(text.size):
        if text.at[at] >= 0x80:
            return False
    return True


cdef struct Form:
    # 1 + the offset in `Packet`, by field number; 0 for a number that the kind does not have.
    Py_ssize_t texts[FIELDS]
    Py_ssize_t numbers[FIELDS]


cdef Form SERVICE_CALL_FORM, CALL_REPLY_FORM, CALL_REQUEST_FORM, RELAY_CALL_FORM


cdef void define_forms() noexcept:
    """Fill the forms, by the field numbers of gsb.proto."""
    cdef Packet packet
    cdef char* start = <char*>&packet
    SERVICE_CALL_FORM.texts[1] = 1 + (<char*>&packet.address - start)
    SERVICE_CALL_FORM.texts[2] = 1 + (<char*>&packet.request_id - start)
    SERVICE_CALL_FORM.texts[3] = 1 + (<char*>&packet.data - start)
    CALL_REPLY_FORM.texts[1] = 1 + (<char*>&packet.request_id - start)
    CALL_REPLY_FORM.numbers[2] = 1 + (<char*>&packet.code - start)
    CALL_REPLY_FORM.numbers[3] = 1 + (<char*>&packet.type - start)
    CALL_REPLY_FORM.texts[4] = 1 + (<char*>&packet.data - start)
    CALL_REQUEST_FORM.texts[1] = 1 + (<char*>&packet.request_id - start)
    CALL_REQUEST_FORM.texts[2] = 1 + (<char*>&packet.data - start)
    CALL_REQUEST_FORM.texts[3] = 1 + (<char*>&packet.caller - start)
    CALL_REQUEST_FORM.texts[4] = 1 + (<char*>&packet.address - start)
    RELAY_CALL_FORM.texts[1] = 1 + (<char*>&packet.request_id - start)
    RELAY_CALL_FORM.texts[2] = 1 + (<char*>&packet.data - start)
    RELAY_CALL_FORM.texts[4] = 1 + (<char*>&packet.address - start)
    RELAY_CALL_FORM.texts[5] = 1 + (<char*>&packet.origin - start)
    RELAY_CALL_FORM.texts[6] = 1 + (<char*>&packet.target - start)
    RELAY_CALL_FORM.numbers[7] = 1 + (<char*>&packet.hops - start)
    RELAY_CALL_FORM.numbers[8] = 1 + (<char*>&packet.deadline_ms - start)
    RELAY_CALL_FORM.numbers[9] = 1 + (<char*>&packet.counter - start)
    RELAY_CALL_FORM.texts[10] = 1 + (<char*>&packet.mac - start)
    RELAY_CALL_FORM.numbers[11] = 1 + (<char*>&packet.free_partials - start)
    RELAY_CALL_FORM.numbers[12] = 1 + (<char*>&packet.free_bytes - start)
    RELAY_CALL_FORM.numbers[13] = 1 + (<char*>&packet.instance - start)
    RELAY_CALL_FORM.numbers[14] = 1 + (<char*>&packet.target_instance - start)


define_forms()


cdef bint read_fields(
    const unsigned char* at, const unsigned char* end, const Form* form, Packet* packet
) noexcept nogil:
    """Decode the fields of a message. Returns False if they have not the usual form."""
    cdef uint64_t value
    cdef Slice* text
    cdef int number, wire, seen = 0
    while at < end:
        number, wire = at[0] >> 3, at[0] & 7
        if number >= FIELDS or seen & (1 << number):
            return False
        seen |= 1 << number
        at = take_varint(at + 1, end, &value)
        if at is NULL:
            return False
        if wire == LENGTH and form.texts[number]:
            if value > <uint64_t>(end - at):
                return False
            text = <Slice*>(<char*>packet + form.texts[number] - 1)
            text.at = at
            text.size = <Py_ssize_t>value
            at += value
        elif wire == VARINT and form.numbers[number]:
            (<uint64_t*>(<char*>packet + form.numbers[number] - 1))[0] = value
        else:
            return False
    return True


cdef inline Kind decode(const unsigned char* at, Py_ssize_t size, Packet* packet) noexcept nogil:
    """Decode a call or reply; its texts and numbers are not checked."""
    cdef const unsigned char* end = at + size
    cdef uint64_t tag, length
    cdef Kind kind
    cdef const Form* form
    memset(packet, 0, sizeof(Packet))
    # A tag has one or two bytes, so no kind is read that protobuf would refuse.
    at = take_varint(at, at + 2 if size > 2 else end, &tag)
    if at is NULL:
        return NOT_HOT
    if tag == (CALL_REPLY << 3 | LENGTH):
        kind, form = CALL_REPLY, &CALL_REPLY_FORM
    elif tag == (SERVICE_CALL << 3 | LENGTH):
        kind, form = SERVICE_CALL, &SERVICE_CALL_FORM
    elif tag == (CALL_REQUEST << 3 | LENGTH):
        kind, form = CALL_REQUEST, &CALL_REQUEST_FORM
    elif tag == (RELAY_CALL << 3 | LENGTH):
        kind, form = RELAY_CALL, &RELAY_CALL_FORM
    else:
        return NOT_HOT
    at = take_varint(at, end, &length)
    if at is NULL or length != <uint64_t>(end - at) or not read_fields(at, end, form, packet):
        return NOT_HOT
    return kind


cdef Kind read_packet(const unsigned char* at, Py_ssize_t size, Packet* packet) noexcept nogil:
    """Decode a call or reply in its usual form. Returns NOT_HOT for any other packet."""
    cdef Kind kind = decode(at, size, packet)
    # Negative numbers, and numbers that protobuf would cut to 32 bits.
    if kind == CALL_REPLY and (packet.code > MAX_INT32 or packet.type > MAX_INT32):
        return NOT_HOT
    if kind == RELAY_CALL and (
        packet.hops > MAX_UINT32 or packet.deadline_ms > MAX_UINT32
        or packet.free_partials > MAX_UINT32 or packet.free_bytes > MAX_UINT32
    ):
        return NOT_HOT
    # ASCII needs no check for valid UTF-8, which protobuf demands of a text.
    if not (is_ascii(packet.address) and is_ascii(packet.request_id) and is_ascii(packet.caller)):
        return NOT_HOT
    return kind


cdef Kind read_canonical(const unsigned char* at, Py_ssize_t size, Packet* packet) noexcept nogil:
    """Decode a call or reply that protobuf has checked, and written again."""
    return decode(at, size, packet)


# --- writing: `…_size` returns the size, `put_…` writes and returns the position after it


cdef Py_ssize_t varint_size(uint64_t value) noexcept nogil:
    cdef Py_ssize_t size = 1
    while value >= 0x80:
        value >>= 7
        size += 1
    return size


cdef unsigned char* put_varint(unsigned char* out, uint64_t value) noexcept nogil:
    while value >= 0x80:
        out[0] = (value & 0x7F) | 0x80
        value >>= 7
        out += 1
    out[0] = <unsigned char>value
    return out + 1


cdef Py_ssize_t field_size(Slice field) noexcept nogil:
    """Return the size of a text or bytes field with a number below 16; 0 if it is empty."""
    return 1 + varint_size(field.size) + field.size if field.size else 0


cdef unsigned char* put_field(unsigned char* out, int number, Slice field) noexcept nogil:
    """Write a text or bytes field. If `field.at` is NULL its bytes are sent separately."""
    if not field.size:
        return out
    out[0] = number << 3 | LENGTH
    out = put_varint(out + 1, field.size)
    if field.at is NULL:
        return out
    memcpy(out, field.at, field.size)
    return out + field.size


cdef inline Py_ssize_t number_size(uint64_t value) noexcept nogil:
    return 1 + varint_size(value) if value else 0


cdef inline unsigned char* put_number(unsigned char* out, int number, uint64_t value) noexcept nogil:
    if not value:
        return out
    out[0] = number << 3 | VARINT
    return put_varint(out + 1, value)


cdef Py_ssize_t tag_size(int kind) noexcept nogil:
    return 1 if kind < 16 else 2


cdef Py_ssize_t frame_size(bint ipc, Py_ssize_t inner) noexcept nogil:
    """Return the size of a frame whose message has `inner` bytes; kinds >= 16 take one more."""
    return ipc + LENGTH_SIZE + 1 + varint_size(inner) + inner


cdef unsigned char* put_head(unsigned char* out, bint ipc, int kind, Py_ssize_t inner) noexcept nogil:
    """Write everything before the message's fields."""
    cdef uint64_t length = tag_size(kind) + varint_size(inner) + inner
    cdef int at
    if ipc:
        out[0] = 1
        out += 1
    for at in range(LENGTH_SIZE):
        out[at] = (length >> (8 * (LENGTH_SIZE - 1 - at))) & 0xFF
    out = put_varint(out + LENGTH_SIZE, <uint64_t>kind << 3 | LENGTH)
    return put_varint(out, inner)


cdef Slice slice_of(bytes text) noexcept:
    cdef Slice view
    view.at = <const unsigned char*>PyBytes_AS_STRING(text)
    view.size = PyBytes_GET_SIZE(text)
    return view


# --- for Python: one packet at a time


def frame(bint ipc, bytes payload not None) -> bytes:
    """Return a payload in its frame."""
    cdef Py_ssize_t size = PyBytes_GET_SIZE(payload)
    cdef bytes encoded = PyBytes_FromStringAndSize(NULL, ipc + LENGTH_SIZE + size)
    cdef unsigned char* out = <unsigned char*>PyBytes_AS_STRING(encoded)
    cdef int at
    if ipc:
        out[0] = 1
        out += 1
    for at in range(LENGTH_SIZE):
        out[at] = (<uint64_t>size >> (8 * (LENGTH_SIZE - 1 - at))) & 0xFF
    memcpy(out + LENGTH_SIZE, PyBytes_AS_STRING(payload), size)
    return encoded


cdef Py_ssize_t reply_size(Slice request_id, uint64_t code, uint64_t type, Slice data) noexcept nogil:
    return field_size(request_id) + number_size(code) + number_size(type) + field_size(data)


cdef unsigned char* put_reply(
    unsigned char* out, bint ipc, Py_ssize_t inner, Slice request_id, uint64_t code, uint64_t type, Slice data
) noexcept nogil:
    out = put_head(out, ipc, CALL_REPLY, inner)
    out = put_field(out, 1, request_id)
    out = put_number(put_number(out, 2, code), 3, type)
    return put_field(out, 4, data)


cdef Py_ssize_t relay_size(const Packet* call) noexcept nogil:
    return (
        field_size(call.request_id) + field_size(call.data) + field_size(call.address)
        + field_size(call.origin) + field_size(call.target) + number_size(call.hops)
        + number_size(call.deadline_ms) + number_size(call.counter) + field_size(call.mac)
        + number_size(call.free_partials) + number_size(call.free_bytes)
        + number_size(call.instance) + number_size(call.target_instance)
    )


cdef unsigned char* put_relay(
    unsigned char* out, bint ipc, Py_ssize_t inner, const Packet* call
) noexcept nogil:
    out = put_head(out, ipc, RELAY_CALL, inner)
    out = put_field(put_field(out, 1, call.request_id), 2, call.data)
    out = put_field(out, 4, call.address)
    out = put_field(put_field(out, 5, call.origin), 6, call.target)
    out = put_number(put_number(out, 7, call.hops), 8, call.deadline_ms)
    out = put_field(put_number(out, 9, call.counter), 10, call.mac)
    out = put_number(put_number(out, 11, call.free_partials), 12, call.free_bytes)
    return put_number(put_number(out, 13, call.instance), 14, call.target_instance)


def read(buffer, Py_ssize_t start, Py_ssize_t end):
    """Decode the payload in buffer[start:end].

    Returns (6, address, request id, data) for a call, (7, request id, code, type, data) for a
    reply, or None if the protobuf library must decode it.
    """
    cdef Py_buffer view
    cdef Packet packet
    cdef Kind kind
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        if not 0 <= start <= end <= view.len:
            raise ValueError("start and end must lie within the buffer")
        kind = read_packet(<const unsigned char*>view.buf + start, end - start, &packet)
        if kind == SERVICE_CALL:
            return (
                6,
                packet.address.at[:packet.address.size],
                packet.request_id.at[:packet.request_id.size],
                packet.data.at[:packet.data.size],
            )
        if kind == CALL_REPLY:
            return (
                7,
                packet.request_id.at[:packet.request_id.size],
                packet.code,
                packet.type,
                packet.data.at[:packet.data.size],
            )
        return None
    finally:
        PyBuffer_Release(&view)


cdef Py_ssize_t count_broadcasts(
    bytes encoded, Py_ssize_t sent, Py_ssize_t mark, Py_ssize_t head
) noexcept:
    """Count the broadcasts beyond `sent` bytes. A frame's length ends at `head`."""
    cdef const unsigned char* start = <const unsigned char*>PyBytes_AS_STRING(encoded)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(encoded)
    cdef Py_ssize_t at = 0, messages = 0, begin, place
    cdef uint64_t length
    while size - at > head:
        length = 0
        for place in range(mark, head):
            length = length << 8 | start[at + place]
        begin = at + head
        if length > <uint64_t>(size - begin):
            break
        at = begin + <Py_ssize_t>length
        messages += at > sent and start[begin] == (BROADCAST << 3 | LENGTH)
    return messages


cdef class GsbEncoding(Encoding):
    """Encodes broadcasts for subscribers on TCP or on ipc.

    `caller` is the name of the sender of the messages being written. It is set around a
    broadcast of GSB, and empty for messages of other dialects.
    """

    def __init__(self, int number, bint ipc):
        self.ipc = ipc
        self.caller = b""

    @property
    def caller(self):
        return self.sender

    @caller.setter
    def caller(self, bytes value not None):
        self.sender = value
        self.written = slice_of(value)

    def count(self, bytes encoded not None, Py_ssize_t sent) -> int:
        """Count unsent broadcasts. Calls and replies have counters of their own."""
        return count_broadcasts(encoded, sent, self.ipc, self.ipc + LENGTH_SIZE)

    cdef Py_ssize_t inner(self, const Frame* frame) noexcept nogil:
        cdef Slice topic, data
        topic.at, topic.size = frame.topic, frame.topic_size
        data.at, data.size = frame.body, frame.body_size
        return field_size(topic) + field_size(data) + field_size(self.written)

    cdef Py_ssize_t measure(self, const Frame* frame) noexcept nogil:
        return frame_size(self.ipc, self.inner(frame))

    cdef unsigned char* write(self, const Frame* frame, unsigned char* out) noexcept nogil:
        cdef Slice topic, data
        topic.at, topic.size = frame.topic, frame.topic_size
        data.at, data.size = frame.body, frame.body_size
        out = put_head(out, self.ipc, BROADCAST, self.inner(frame))
        return put_field(put_field(put_field(out, 1, topic), 2, data), 3, self.written)
