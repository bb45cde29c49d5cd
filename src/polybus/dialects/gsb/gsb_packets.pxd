# GSB's packets in SP's frames: the few that are hot, found in received bytes and written.
from libc.stdint cimport uint64_t

from polybus.kernel.framing cimport Encoding, Frame

cdef enum Kind:
    NOT_HOT = 0  # some other packet, or one in an unusual form: for protobuf itself
    SERVICE_CALL = 6
    CALL_REPLY = 7
    BROADCAST = 12  # of the fan-out: never found, but written
    CALL_REQUEST = 16

cdef struct Slice:
    const unsigned char* at
    Py_ssize_t size

cdef struct Packet:
    Slice address
    Slice request_id
    Slice data
    Slice caller
    uint64_t code
    uint64_t type

cdef Kind read_packet(const unsigned char* at, Py_ssize_t size, Packet* packet) noexcept nogil
cdef Slice slice_of(bytes text) noexcept
cdef Py_ssize_t varint_size(uint64_t value) noexcept nogil
cdef unsigned char* put_varint(unsigned char* out, uint64_t value) noexcept nogil
cdef unsigned char* put_field(unsigned char* out, int number, Slice field) noexcept nogil
cdef Py_ssize_t field_size(Slice field) noexcept nogil
cdef unsigned char* put_head(unsigned char* out, bint ipc, int kind, Py_ssize_t inner) noexcept nogil
cdef Py_ssize_t frame_size(bint ipc, Py_ssize_t inner) noexcept nogil
cdef Py_ssize_t reply_size(Slice request_id, uint64_t code, uint64_t type, Slice data) noexcept nogil
cdef unsigned char* put_reply(
    unsigned char* out, bint ipc, Py_ssize_t inner, Slice request_id, uint64_t code, uint64_t type, Slice data
) noexcept nogil
cdef Py_ssize_t count_broadcasts(
    bytes encoded, Py_ssize_t sent, Py_ssize_t mark, Py_ssize_t head
) noexcept

cdef class GsbEncoding(Encoding):
    cdef readonly bint ipc
    cdef bytes sender
    cdef Slice written  # `sender` for code without the GIL
    cdef Py_ssize_t inner(self, const Frame* frame) noexcept nogil
