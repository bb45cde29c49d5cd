"""The two interfaces between a dialect and the fan-out; framing.pxd has the contract."""


cdef class Encoding:
    """How one dialect encodes a message for its readers.

    `number` (0 to 31) is the encoding's bit in the mask of a subscriber set. The owner of
    the fan-out assigns it; it must be unique within one fan-out.
    """

    def __cinit__(self, int number, *args, **kwargs):
        if not 0 <= number < 32:
            raise ValueError(f"encoding number must be 0 to 31, got {number}")
        self.number = number

    def count(self, bytes encoded, Py_ssize_t sent) -> int:
        """Return the number of messages in `encoded` that lie beyond the first `sent` bytes."""
        return 0

    cdef Py_ssize_t measure(self, const Frame* frame) noexcept nogil:
        return 0

    cdef unsigned char* write(self, const Frame* frame, unsigned char* out) noexcept nogil:
        return out


cdef class Framing:
    """How one dialect splits received bytes into frames."""

    cdef FrameKind next(self, const unsigned char* at, Py_ssize_t left, Frame* frame) noexcept nogil:
        frame.kind = BAD
        frame.code = 0
        return BAD
