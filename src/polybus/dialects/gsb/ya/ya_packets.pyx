"""Broadcasts for subscribers of the deployed framing, written without protobuf.

    frame    =  length u32 big-endian | payload
    payload  =  tag of the kind | length | the message's fields
"""
from libc.stdint cimport uint64_t

from polybus.dialects.gsb.gsb_packets cimport BROADCAST, GsbEncoding, Slice, count_broadcasts, put_field, put_varint, varint_size
from polybus.kernel.framing cimport Frame

cdef enum:
    LENGTH = 2  # protobuf's wire type
    LENGTH_SIZE = 4  # of a frame


cdef class YaEncoding(GsbEncoding):
    """Encodes broadcasts. The message has the same fields as GSB's own, with other numbers."""

    def __init__(self, int number):
        super().__init__(number, False)

    def count(self, bytes encoded not None, Py_ssize_t sent) -> int:
        """Count unsent broadcasts. Calls and replies have counters of their own."""
        return count_broadcasts(encoded, sent, 0, LENGTH_SIZE)

    cdef Py_ssize_t measure(self, const Frame* frame) noexcept nogil:
        cdef Py_ssize_t inner = self.inner(frame)
        return LENGTH_SIZE + 1 + varint_size(inner) + inner

    cdef unsigned char* write(self, const Frame* frame, unsigned char* out) noexcept nogil:
        cdef Py_ssize_t inner = self.inner(frame)
        cdef uint64_t length = 1 + varint_size(inner) + inner
        cdef Slice topic, data
        cdef int place
        for place in range(LENGTH_SIZE):
            out[place] = (length >> (8 * (LENGTH_SIZE - 1 - place))) & 0xFF
        out[LENGTH_SIZE] = BROADCAST << 3 | LENGTH
        out = put_varint(out + LENGTH_SIZE + 1, inner)
        topic.at, topic.size = frame.topic, frame.topic_size
        data.at, data.size = frame.body, frame.body_size
        return put_field(put_field(put_field(out, 1, self.written), 2, data), 3, topic)
