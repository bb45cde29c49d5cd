# The interface between a dialect and the fan-out: a Framing finds messages in received
# bytes, an Encoding writes messages for the dialect's readers. The fan-out knows nothing
# else about any dialect.

cdef extern from "framing.h" nogil:
    ctypedef enum FrameKind "pb_frame_kind":
        INCOMPLETE "PB_INCOMPLETE"
        MESSAGE "PB_MESSAGE"
        FRAGMENT "PB_FRAGMENT"
        CONTROL "PB_CONTROL"
        BAD "PB_BAD"

    ctypedef struct Frame "pb_frame":
        FrameKind kind
        int code
        Py_ssize_t size
        const unsigned char* topic
        Py_ssize_t topic_size
        const unsigned char* body
        Py_ssize_t body_size
        const unsigned char* raw
        Py_ssize_t raw_size

    ctypedef struct pb_framing:
        FrameKind (*next)(
            const pb_framing* self, const unsigned char* at, Py_ssize_t left, Frame* frame
        ) noexcept nogil

    FrameKind pb_bad_frame(Frame* frame, int reason) noexcept

cdef class Encoding:
    cdef readonly int number
    cdef Py_ssize_t measure(self, const Frame* frame) noexcept nogil
    cdef unsigned char* write(self, const Frame* frame, unsigned char* out) noexcept nogil

cdef class Framing:
    cdef readonly Encoding own  # readers with this encoding get `raw`
    # The scanner: a structure of the subclass that begins with pb_framing, and lives as long.
    cdef const pb_framing* scanner
