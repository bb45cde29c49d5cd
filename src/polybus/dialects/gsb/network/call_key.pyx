"""The key of the calls between this node and another one, for one run of both.

Origin and target of a call share a secret (node_key.py), so a node between them can neither make
nor change a call of another node. A MAC is a hundred times faster than a signature, and there is
one for each call.

    mac  =  blake2b( origin | target | instance u64 | target_instance u64
                     | counter u64 | size of address u16 | address | data ),  keyed, 16 bytes

The target takes each counter once. Calls take different paths, so a counter may be overtaken by
up to `WINDOW` later ones. A process that starts has a new instance, so calls of an earlier run,
and calls for one, are worth nothing.
"""
import hashlib
import time

from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.stdint cimport uint64_t
from libc.string cimport memset

from polybus.dialects.gsb.gsb_packets cimport Packet, Slice, slice_of

cdef enum:
    MAC_SIZE = 16
    HEAD_SIZE = 10  # counter and size of the address
    WORD_BITS = 64

cdef extern from "Python.h":
    int PyBUF_READ

WINDOW = WINDOW_WORDS * WORD_BITS


cdef class CallKey:
    """Signs calls to one run of another node, and checks calls from it."""

    def __init__(
        self, bytes secret not None, bytes own not None, own_instance, bytes node not None, instance
    ):
        """`own` and `node` are node ids of 20 bytes."""
        self.own, self.own_instance = own, own_instance
        self.node, self.instance = node, instance
        # Both MACs have read the fields that are the same for all calls of their direction.
        mine, theirs = own_instance.to_bytes(8, "big"), instance.to_bytes(8, "big")
        self.outgoing = new_mac(secret, own + node + mine + theirs)
        self.incoming = new_mac(secret, node + own + theirs + mine)
        # Above those of a key that was dropped to make room, if there was one for these runs.
        self.counter = time.time_ns() >> 10

    cpdef bint accept(self, uint64_t counter) noexcept:
        """Return whether a counter of the node is new, and remember it."""
        if counter > self.newest:
            if counter - self.newest >= WINDOW_WORDS * WORD_BITS:
                memset(self.seen, 0, sizeof(self.seen))
                self.newest = counter
            while self.newest < counter:
                self.newest += 1
                self.seen[self.newest // WORD_BITS % WINDOW_WORDS] &= ~bit_of(self.newest)
        elif self.newest - counter >= WINDOW_WORDS * WORD_BITS:
            return False
        if self.seen[counter // WORD_BITS % WINDOW_WORDS] & bit_of(counter):
            return False
        self.seen[counter // WORD_BITS % WINDOW_WORDS] |= bit_of(counter)
        return True

    cdef bytes sign_call(self, Packet* call):
        """Complete a call to the node. Returns its MAC, which the packet refers to."""
        cdef bytes mac
        self.counter += 1
        call.origin, call.target = slice_of(self.own), slice_of(self.node)
        call.instance, call.target_instance = self.own_instance, self.instance
        call.counter = self.counter
        mac = self.mac(self.outgoing, call.counter, call.address, call.data)
        call.mac = slice_of(mac)
        return mac

    cdef bint is_for(self, const Packet* call) noexcept:
        """Return whether a call is one between the two runs of this key."""
        return call.instance == self.instance and call.target_instance == self.own_instance

    cdef bint check_call(self, const Packet* call) except -1:
        """Return whether the node made this call for this one, and it is no repetition."""
        cdef bytes mac = self.mac(self.incoming, call.counter, call.address, call.data)
        return is_equal(slice_of(mac), call.mac) and self.accept(call.counter)

    cdef bytes mac(self, start, uint64_t counter, Slice address, Slice data):
        cdef unsigned char[HEAD_SIZE] head
        cdef int at
        for at in range(8):
            head[at] = counter >> (8 * (7 - at)) & 0xFF
        head[8], head[9] = address.size >> 8 & 0xFF, address.size & 0xFF
        digest = start.copy()
        digest.update(head[:HEAD_SIZE])
        if address.size:
            digest.update(PyMemoryView_FromMemory(<char*>address.at, address.size, PyBUF_READ))
        if data.size:
            digest.update(PyMemoryView_FromMemory(<char*>data.at, data.size, PyBUF_READ))
        return digest.digest()


cdef inline uint64_t bit_of(uint64_t counter) noexcept:
    return <uint64_t>1 << counter % WORD_BITS


cdef bint is_equal(Slice one, Slice other) noexcept:
    """Compare two MACs in a time that does not depend on their bytes."""
    cdef unsigned char different = 0
    cdef int at
    if one.size != MAC_SIZE or other.size != MAC_SIZE:
        return False
    for at in range(MAC_SIZE):
        different |= one.at[at] ^ other.at[at]
    return not different


def new_mac(bytes secret not None, bytes start not None):
    return hashlib.blake2b(start, key=secret, digest_size=MAC_SIZE, person=b"polybus call")
