# GSB's packets in SP's frames: the few that are hot, found in received bytes and written.
from libc.stdint cimport uint64_t

from polybus.kernel.framing cimport Encoding, Frame

cdef enum Kind:
    NOT_HOT = 0  # some other packet, or one in an unusual form: for protobuf itself
    SERVICE_CALL = 6
    CALL_REPLY = 7
    BROADCAST = 12  # of the fan-out: never found, but written
    CALL_REQUEST = 16
    RELAY_CALL = 23

# Bounds of a call between nodes (`RelayCall`).
cpdef enum:
    ID_BYTES = 20  # of a node
    MAX_HOPS = 8
    MAX_ADDRESS = 300  # a valid address is shorter
    MAX_FREE_PARTIALS = 0x10000
    MAX_FREE_BYTES = 0x1000000
    RELAY_BYTES = 512  # besides the data; more than the longest address and ids

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
    # Of a call between nodes:
    Slice origin
    Slice target
    Slice mac
    uint64_t hops
    uint64_t deadline_ms
    uint64_t counter
    uint64_t free_partials
    uint64_t free_bytes
    uint64_t instance
    uint64_t target_instance

cdef Kind read_packet(const unsigned char* at, Py_ssize_t size, Packet* packet) noexcept nogil
cdef Kind read_canonical(const unsigned char* at, Py_ssize_t size, Packet* packet) noexcept nogil
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
cdef Py_ssize_t relay_size(const Packet* call) noexcept nogil
cdef unsigned char* put_relay(
    unsigned char* out, bint ipc, Py_ssize_t inner, const Packet* call
) noexcept nogil
cdef Py_ssize_t count_broadcasts(
    bytes encoded, Py_ssize_t sent, Py_ssize_t mark, Py_ssize_t head
) noexcept

cdef class GsbEncoding(Encoding):
    cdef readonly bint ipc
    cdef bytes sender
    cdef Slice written  # `sender` for code without the GIL
    cdef Py_ssize_t inner(self, const Frame* frame) noexcept nogil
