"""rqueue's wire for the fan-out: what a server reads and what its readers get.

A frame is `payload_length u32 | type u8 | payload`, big-endian. PUBLISH holds
one whole NOTIFICATION or PART frame, which is what subscribers get, byte for
byte: so `raw` is the payload of PUBLISH, and relaying is one copy.

Judging stops at the first bad byte that is certain: the length and the type
are judged from the header alone, before the payload has come and before
anything is allocated for it.
"""
from libc.string cimport memcpy

from polybus.kernel.byte_order cimport load_u16_be, load_u32_be, store_u16_be, store_u32_be
from polybus.kernel.framing cimport BAD, CONTROL, FRAGMENT, INCOMPLETE, MESSAGE, Encoding, Frame, FrameKind, Framing

import os

cdef enum:
    HEADER = 5
    PART_HEADER = 20  # message id 16, index 2, count 2
    MAX_PARTS = 65535

cdef enum Type:
    PUBLISH = 0
    SUBSCRIBE = 1
    REMOVE = 2
    DEREGISTER = 5
    NOTIFICATION = 7
    PART = 8

cdef enum Reason:
    PAYLOAD_TOO_LARGE
    UNKNOWN_TYPE
    NOT_FOR_SERVER
    INNER_LENGTH
    INNER_TYPE
    TOPIC_LENGTH
    TRAILING_BYTES
    DEREGISTER_NOT_EMPTY
    PART_LENGTH
    PART_INDEX

# The stable names of the reasons, in the order of the enum above: logs and counters use them.
REASONS = (
    "payload_too_large",
    "unknown_type",
    "not_for_server",
    "inner_length",
    "inner_type",
    "topic_length",
    "trailing_bytes",
    "deregister_not_empty",
    "part_length",
    "part_index",
)


cdef inline unsigned char* write_head(
    unsigned char* out, Py_ssize_t length, int kind, const Frame* frame
) noexcept nogil:
    out = store_u32_be(out, length)
    out[0] = kind
    out[1] = frame.topic_size
    memcpy(out + 2, frame.topic, frame.topic_size)
    return out + 2 + frame.topic_size


cdef inline FrameKind bad(Frame* frame, Reason reason) noexcept nogil:
    frame.kind = BAD
    frame.code = reason
    return BAD


cdef class RqueueFraming(Framing):
    """Frames that a client sends to the server."""

    def __init__(self, RqueueEncoding own not None):
        self.own = own
        self.max_payload = own.max_payload

    cdef FrameKind next(self, const unsigned char* at, Py_ssize_t left, Frame* frame) noexcept nogil:
        cdef Py_ssize_t length
        cdef int kind
        frame.kind = INCOMPLETE
        if left < HEADER:
            return INCOMPLETE
        length = <Py_ssize_t>load_u32_be(at)
        kind = at[4]
        if length > self.max_payload:
            return bad(frame, PAYLOAD_TOO_LARGE)
        if kind > PART or kind == 3 or kind == 4 or kind == 6:
            return bad(frame, UNKNOWN_TYPE)
        if kind >= NOTIFICATION:
            return bad(frame, NOT_FOR_SERVER)
        # The original's list numbers DEREGISTER 5, its table 2. A REMOVE is never empty.
        if kind == REMOVE and length == 0:
            kind = DEREGISTER
        if kind == DEREGISTER and length != 0:
            return bad(frame, DEREGISTER_NOT_EMPTY)
        if left < HEADER + length:
            return INCOMPLETE
        frame.size = HEADER + length
        if kind == PUBLISH:
            return self.publish(at + HEADER, length, frame)
        frame.kind = CONTROL
        frame.code = kind
        frame.topic_size = 0
        if kind == DEREGISTER:
            return CONTROL
        return self.topic_alone(at + HEADER, length, frame)

    cdef FrameKind topic_alone(self, const unsigned char* at, Py_ssize_t length, Frame* frame) noexcept nogil:
        if length < 2 or at[0] == 0 or at[0] > length - 1:
            return bad(frame, TOPIC_LENGTH)
        if at[0] != length - 1:
            return bad(frame, TRAILING_BYTES)
        frame.topic = at + 1
        frame.topic_size = at[0]
        return CONTROL

    cdef FrameKind publish(self, const unsigned char* at, Py_ssize_t length, Frame* frame) noexcept nogil:
        cdef Py_ssize_t inner = length - HEADER
        cdef Py_ssize_t topic_size
        if inner < 0 or <Py_ssize_t>load_u32_be(at) != inner:
            return bad(frame, INNER_LENGTH)
        if at[4] != NOTIFICATION and at[4] != PART:
            return bad(frame, INNER_TYPE)
        if inner < 2:
            return bad(frame, TOPIC_LENGTH)
        topic_size = at[5]
        if topic_size == 0 or topic_size > inner - 1:
            return bad(frame, TOPIC_LENGTH)
        frame.kind = MESSAGE
        frame.raw = at
        frame.raw_size = length
        frame.topic = at + 6
        frame.topic_size = topic_size
        frame.body = at + 6 + topic_size
        frame.body_size = inner - 1 - topic_size
        if at[4] == NOTIFICATION:
            return MESSAGE
        frame.kind = FRAGMENT
        if frame.body_size < PART_HEADER:
            return bad(frame, PART_LENGTH)
        if load_u16_be(frame.body + 16) >= load_u16_be(frame.body + 18):
            return bad(frame, PART_INDEX)
        return FRAGMENT


cdef bint is_early_part(const unsigned char* frame, Py_ssize_t size) noexcept nogil:
    """A PART that is not its message's last one."""
    cdef Py_ssize_t at
    if frame[4] != PART or size <= HEADER:
        return False
    at = HEADER + 1 + frame[HEADER]
    return at + PART_HEADER <= size and load_u16_be(frame + at + 16) + 1 < load_u16_be(frame + at + 18)


cdef class RqueueEncoding(Encoding):
    """NOTIFICATION frames, or PARTs where a body is over the cap.

    A body too large for 65535 PARTs measures as nothing, and the fan-out counts
    it. A message in PARTs is where its last one is. Message ids need only be unique among the
    parts in flight, so they come from a generator seeded once by the system.
    """

    def __init__(self, int number, Py_ssize_t max_payload):
        # A PART of one byte under the longest topic must fit into PUBLISH's payload.
        if max_payload < HEADER + 1 + 255 + PART_HEADER + 1:
            raise ValueError("max_payload must be at least 282 bytes")
        if max_payload > 0xFFFFFFFF:
            raise ValueError("max_payload must fit 32 bits")
        self.max_payload = max_payload
        seed = os.urandom(16)
        memcpy(self.random_state, <const unsigned char*>seed, 16)

    def count(self, bytes encoded not None, Py_ssize_t sent) -> int:
        cdef const unsigned char* start = encoded
        cdef Py_ssize_t size = len(encoded)
        cdef Py_ssize_t at = 0
        cdef Py_ssize_t end
        cdef Py_ssize_t messages = 0
        while size - at >= HEADER:
            end = at + HEADER + <Py_ssize_t>load_u32_be(start + at)
            if end > size:
                break
            messages += end > sent and not is_early_part(start + at, end - at)
            at = end
        return messages

    cdef uint64_t random(self) noexcept nogil:
        # xorshift128+
        cdef uint64_t a = self.random_state[0]
        cdef uint64_t b = self.random_state[1]
        self.random_state[0] = b
        a ^= a << 23
        self.random_state[1] = a ^ b ^ (a >> 18) ^ (b >> 5)
        return self.random_state[1] + b

    cdef Py_ssize_t chunk_size(self, const Frame* frame) noexcept nogil:
        # The cap holds for PUBLISH's own payload too, so that a reader may publish on what it got.
        return self.max_payload - HEADER - 1 - frame.topic_size - PART_HEADER

    cdef Py_ssize_t measure(self, const Frame* frame) noexcept nogil:
        cdef Py_ssize_t head = HEADER + 1 + frame.topic_size
        cdef Py_ssize_t parts
        if head + frame.body_size <= self.max_payload:
            return head + frame.body_size
        parts = 1 + (frame.body_size - 1) // self.chunk_size(frame)
        if parts > MAX_PARTS:
            return 0
        return parts * (head + PART_HEADER) + frame.body_size

    cdef unsigned char* write(self, const Frame* frame, unsigned char* out) noexcept nogil:
        if HEADER + 1 + frame.topic_size + frame.body_size > self.max_payload:
            return self.write_parts(frame, out)
        out = write_head(out, 1 + frame.topic_size + frame.body_size, NOTIFICATION, frame)
        memcpy(out, frame.body, frame.body_size)
        return out + frame.body_size

    cdef unsigned char* write_parts(self, const Frame* frame, unsigned char* out) noexcept nogil:
        cdef Py_ssize_t chunk = self.chunk_size(frame)
        cdef Py_ssize_t parts = 1 + (frame.body_size - 1) // chunk
        cdef Py_ssize_t index, size
        cdef uint64_t[2] message_id
        if parts > MAX_PARTS:
            return out
        message_id[0] = self.random()
        message_id[1] = self.random()
        for index in range(parts):
            size = min(chunk, frame.body_size - index * chunk)
            out = write_head(out, 1 + frame.topic_size + PART_HEADER + size, PART, frame)
            memcpy(out, message_id, 16)
            out = store_u16_be(store_u16_be(out + 16, index), parts)
            memcpy(out, frame.body + index * chunk, size)
            out += size
        return out
