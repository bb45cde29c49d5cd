from libc.stdint cimport uint64_t

from polybus.kernel.framing cimport Encoding, Frame, FrameKind, Framing

cdef class RqueueEncoding(Encoding):
    cdef readonly Py_ssize_t max_payload
    cdef uint64_t random_state[2]
    cdef uint64_t random(self) noexcept nogil
    cdef Py_ssize_t chunk_size(self, const Frame* frame) noexcept nogil
    cdef unsigned char* write_parts(self, const Frame* frame, unsigned char* out) noexcept nogil

cdef class RqueueFraming(Framing):
    cdef readonly Py_ssize_t max_payload
    cdef FrameKind publish(self, const unsigned char* at, Py_ssize_t length, Frame* frame) noexcept nogil
    cdef FrameKind topic_alone(self, const unsigned char* at, Py_ssize_t length, Frame* frame) noexcept nogil
