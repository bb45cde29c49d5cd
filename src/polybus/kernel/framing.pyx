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


cdef FrameKind next_bad(
    const pb_framing* self, const unsigned char* at, Py_ssize_t left, Frame* frame
) noexcept nogil:
    return pb_bad_frame(frame, 0)


cdef pb_framing NO_DIALECT
NO_DIALECT.next = next_bad


cdef class Framing:
    """How one dialect splits received bytes into frames. Without a scanner, every byte is bad."""

    def __cinit__(self, *args, **kwargs):
        self.scanner = &NO_DIALECT
