from libc.stdint cimport uint64_t

from polybus.kernel.framing cimport Encoding, Frame, FrameKind, Framing, pb_framing

cdef extern from "rqueue_framing.h" nogil:
    enum:
        PB_RQUEUE_HEADER
        PB_RQUEUE_PART_HEADER
        PB_RQUEUE_NOTIFICATION
        PB_RQUEUE_PART

    ctypedef struct pb_rqueue_framing:
        pb_framing framing
        Py_ssize_t max_payload

    FrameKind pb_rqueue_next(
        const pb_framing* self, const unsigned char* at, Py_ssize_t left, Frame* frame
    ) noexcept

cdef class RqueueEncoding(Encoding):
    cdef readonly Py_ssize_t max_payload
    cdef uint64_t random_state[2]
    cdef uint64_t random(self) noexcept nogil
    cdef Py_ssize_t chunk_size(self, const Frame* frame) noexcept nogil
    cdef unsigned char* write_parts(self, const Frame* frame, unsigned char* out) noexcept nogil

cdef class RqueueFraming(Framing):
    cdef pb_rqueue_framing frames
