# The key of the calls between this node and another one.
from libc.stdint cimport uint64_t

from polybus.dialects.gsb.gsb_packets cimport Packet, Slice

cdef enum:
    WINDOW_WORDS = 64

cdef class CallKey:
    cdef readonly bytes own, node
    cdef readonly uint64_t own_instance, instance
    cdef object outgoing, incoming
    cdef uint64_t counter, newest
    cdef uint64_t[WINDOW_WORDS] seen

    cdef bytes sign_call(self, Packet* call)
    cdef bint is_for(self, const Packet* call) noexcept
    cdef bint check_call(self, const Packet* call) except -1
    cdef bytes mac(self, start, uint64_t counter, Slice address, Slice data)
    cpdef bint accept(self, uint64_t counter) noexcept
