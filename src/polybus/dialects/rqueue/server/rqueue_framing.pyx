"""rqueue's wire for the fan-out: what a server reads and what its readers get.

rqueue_framing.h finds the frames of clients; the encoding writes the frames of the server.
"""
from libc.string cimport memcpy

from polybus.kernel.byte_order cimport load_u16_be, load_u32_be, store_u16_be, store_u32_be
from polybus.kernel.framing cimport Encoding, Frame, Framing

import os

cdef enum:
    HEADER = PB_RQUEUE_HEADER
    PART_HEADER = PB_RQUEUE_PART_HEADER
    NOTIFICATION = PB_RQUEUE_NOTIFICATION
    PART = PB_RQUEUE_PART
    MAX_PARTS = 65535

# The stable names of the reasons, in the order of pb_rqueue_reason: logs and counters use them.
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


cdef class RqueueFraming(Framing):
    """Frames that a client sends to the server."""

    def __init__(self, RqueueEncoding own not None):
        self.own = own
        self.frames.framing.next = pb_rqueue_next
        self.frames.max_payload = own.max_payload
        self.scanner = &self.frames.framing

    @property
    def max_payload(self) -> int:
        return self.frames.max_payload


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
