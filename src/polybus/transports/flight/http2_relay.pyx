# distutils: language = c++
"""Relays connections of clients to gRPC and bounds how fast they reset calls (http2_relay.h).

The relay has a thread of its own, which never takes the interpreter's lock.
"""

from libc.stdint cimport int64_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport unique_ptr
from libcpp.vector cimport vector

cdef extern from "http2_relay.h" namespace "polybus" nogil:
    enum class RelayEnd:
        kClosed
        kResets
        kNotHttp2

    cdef struct EndedRelay:
        uint64_t id
        RelayEnd reason

    cdef cppclass CRelay "polybus::Http2Relay":
        CRelay(int max_resets_per_s, double all_resets_per_s, int max_threads) except +OSError
        void Add(uint64_t id, int client, int server)
        cbool Cut(uint64_t id)
        int64_t ConfirmedBytes(uint64_t id)
        int ended_event()
        vector[EndedRelay] TakeEnded()
        void Stop()

CLOSED, RESETS, NOT_HTTP2 = <int>RelayEnd.kClosed, <int>RelayEnd.kResets, <int>RelayEnd.kNotHttp2


cdef class Http2Relay:
    cdef unique_ptr[CRelay] relay

    def __cinit__(self, int max_resets_per_s, double all_resets_per_s, int max_threads):
        """Cut a connection that resets more than `max_resets_per_s`.

        All connections together pass on `all_resets_per_s`, and none while the process has
        `max_threads` more than before the resets.
        """
        self.relay.reset(new CRelay(max_resets_per_s, all_resets_per_s, max_threads))

    def add(self, uint64_t number, int client, int server):
        """Relay between two descriptors that do not block; the relay closes them."""
        with nogil:
            self.relay.get().Add(number, client, server)

    def cut(self, uint64_t number):
        """End a connection. Returns False if it has ended already."""
        cdef cbool was_open
        with nogil:
            was_open = self.relay.get().Cut(number)
        return was_open

    def confirmed_bytes(self, uint64_t number):
        """Return the bytes that a client has acknowledged, None if it is not connected."""
        cdef int64_t confirmed
        with nogil:
            confirmed = self.relay.get().ConfirmedBytes(number)
        return None if confirmed < 0 else confirmed

    @property
    def ended_event(self):
        """A descriptor that is readable while `take_ended` returns connections."""
        return self.relay.get().ended_event()

    def take_ended(self):
        """Return the connections that have ended since the last call, as (number, reason).

        The reason is `CLOSED`, `RESETS` or `NOT_HTTP2`.
        """
        cdef vector[EndedRelay] ended
        with nogil:
            ended = self.relay.get().TakeEnded()
        return [(one.id, <int>one.reason) for one in ended]

    def stop(self):
        """End all connections and the thread."""
        with nogil:
            self.relay.get().Stop()
