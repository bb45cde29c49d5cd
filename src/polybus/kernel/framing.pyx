"""The two seams between a dialect and the fan-out; see framing.pxd for the contract."""


cdef class Encoding:
    """How one dialect writes a message for its readers.

    `number` is the encoding's place in a subscriber set's bit mask, 0 to 31; it
    is given by the fan-out's owner and unique within one fan-out.
    """

    def __cinit__(self, int number, *args, **kwargs):
        if not 0 <= number < 32:
            raise ValueError("an encoding's number is 0 to 31")
        self.number = number

    def count(self, bytes encoded, Py_ssize_t sent) -> int:
        """How many messages in `encoded` were not sent whole, if `sent` bytes of it were."""
        return 0

    cdef Py_ssize_t measure(self, const Frame* frame) noexcept nogil:
        return 0

    cdef unsigned char* write(self, const Frame* frame, unsigned char* out) noexcept nogil:
        return out


cdef class Framing:
    """How one dialect's received bytes fall into frames."""

    cdef FrameKind next(self, const unsigned char* at, Py_ssize_t left, Frame* frame) noexcept nogil:
        frame.kind = BAD
        frame.code = 0
        return BAD
