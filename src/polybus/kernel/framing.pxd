# The interface between a dialect and the fan-out: a Framing finds messages in received
# bytes, an Encoding writes messages for the dialect's readers. The fan-out knows nothing
# else about any dialect.
from libc.stdint cimport uint8_t

cdef enum FrameKind:
    INCOMPLETE  # more bytes are needed
    MESSAGE  # a complete message for a topic
    FRAGMENT  # a part of a larger message: relayed unchanged, never collected
    CONTROL  # a frame that the session must act on, in order with the messages
    BAD  # not a frame of this dialect; the rest of the input cannot be parsed

cdef struct Frame:
    FrameKind kind
    int code  # CONTROL: the dialect's own type; BAD: index into the framing's REASONS
    Py_ssize_t size  # of the whole frame on the wire
    const unsigned char* topic
    Py_ssize_t topic_size
    const unsigned char* body
    Py_ssize_t body_size
    const unsigned char* raw  # the bytes that readers of the same dialect get
    Py_ssize_t raw_size

cdef class Encoding:
    cdef readonly int number
    cdef Py_ssize_t measure(self, const Frame* frame) noexcept nogil
    cdef unsigned char* write(self, const Frame* frame, unsigned char* out) noexcept nogil

cdef class Framing:
    cdef readonly Encoding own  # readers with this encoding get `raw`
    cdef FrameKind next(self, const unsigned char* at, Py_ssize_t left, Frame* frame) noexcept nogil
