"""The bytes that a connection has received and its session has not consumed.

The event loop reads one connection at a time and passes the bytes on before it reads the
next, so all connections share one buffer, which stays in the CPU cache. Bytes that a
session does not consume (an incomplete frame, or all bytes behind a full reader) are kept
per connection and put in front of the next read. Ten thousand idle connections cost nothing.

A frame larger than the shared buffer gets a buffer of its own, which doubles as the bytes
arrive, so a header that only announces a large frame costs nothing either. The session
rejects frames over its limit, which bounds this buffer.

The pump reads into `room` and calls `add`; a transport of the event loop (TLS) calls
`get_buffer` and `buffer_updated` (asyncio's BufferedProtocol).
"""
cimport cython
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.string cimport memcpy

# Measured: throughput falls below 128 KiB and does not rise above 256 KiB.
SHARED_BYTES = 256 * 1024


@cython.final
cdef class SharedBuffer:
    def __init__(self, Py_ssize_t size=SHARED_BYTES):
        self.data = bytearray(size)
        self.view = memoryview(self.data)
        self.size = size


cdef class ReceiveBuffer:
    """The receive side of one connection.

    `receive(buffer, start, end)` is the session's and returns the consumed bytes. While it is
    None, received bytes are discarded.
    """

    def __init__(self, SharedBuffer shared not None):
        self.shared = shared
        self.tail = b""

    @property
    def held_bytes(self):
        """Return the number of bytes that were received and not consumed."""
        if self.stream is not NULL and self.stream.held_size:
            return self.stream.held_size
        return len(self.tail) if self.own is None else self.own_filled

    @property
    def takes(self):
        """Return how often received bytes were consumed."""
        return self.receives + (self.stream.takes if self.stream is not NULL else 0)

    def held_head(self, Py_ssize_t size):
        """Return up to `size` of the first bytes that were received and not consumed."""
        return self.tail[:size] if self.own is None else bytes(self.own[: min(size, self.own_filled)])

    def get_buffer(self, sizehint=-1):
        """Return the buffer for the next read, as large as possible; the hint is ignored."""
        if self.own is not None:
            return memoryview(self.own)[self.own_filled :]
        if not self.tail:
            return self.shared.view
        # Copied on every read: a tail is at most half the buffer and usually part of one frame.
        self.shared.data[: len(self.tail)] = self.tail
        return self.shared.view[len(self.tail) :]

    def buffer_updated(self, Py_ssize_t nbytes):
        """Pass `nbytes` new bytes to the session, after the held ones."""
        self.add(nbytes)

    cdef unsigned char* room(self, Py_ssize_t* size) except NULL:
        """Return the place of the next read, as `get_buffer` does, and its size."""
        cdef unsigned char* data
        cdef Py_ssize_t used = self.own_filled
        if self.own is not None:
            data = <unsigned char*>PyByteArray_AS_STRING(self.own)
            size[0] = PyByteArray_GET_SIZE(self.own) - used
            return data + used
        used = PyBytes_GET_SIZE(self.tail)
        data = <unsigned char*>PyByteArray_AS_STRING(self.shared.data)
        memcpy(data, PyBytes_AS_STRING(self.tail), used)
        size[0] = self.shared.size - used
        return data + used

    cdef int add(self, Py_ssize_t nbytes) except -1:
        cdef Py_ssize_t consumed, end
        self.shared.reads += 1
        # Before the session exists, and after it has ended, bytes are discarded.
        if self.receive is None:
            return 0
        if self.own is not None:
            self.own_filled += nbytes
            return self.receive_own()
        end = len(self.tail) + nbytes
        consumed = self.offer(self.shared.data, <unsigned char*>PyByteArray_AS_STRING(self.shared.data), end)
        self.receives += consumed > 0
        if consumed == end:
            self.tail = b""
        else:
            self.hold(self.shared.view[consumed:end])
        return 0

    def use_plain_route(self, PlainRoute route not None):
        """Route plain publishes at once; the session gets the bytes from another frame on."""
        self.plain_route = route

    cdef Py_ssize_t offer(self, object buffer, const unsigned char* data, Py_ssize_t end) except -1:
        cdef Py_ssize_t consumed = 0
        if self.plain_route is not None:
            consumed = self.plain_route.route(data, end)
            if not self.plain_route.needs_session:
                return consumed
        self.shared.session_calls += 1
        return consumed + self.receive(buffer, consumed, end)

    def redeliver_held(self):
        """Pass the held bytes to the session again."""
        cdef Py_ssize_t consumed
        if self.own is not None:
            self.receive_own()
        elif self.tail:
            consumed = self.receive(self.tail, 0, len(self.tail))
            self.receives += consumed > 0
            self.tail = self.tail[consumed:]

    cdef bytes take_held(self):
        """Remove the held bytes, for a thread that receives from here on. Returns them."""
        held = self.held_head(self.own_filled if self.own is not None else len(self.tail))
        self.tail = b""
        self.own = None
        return held

    cdef int put_held(self, bytes held) except -1:
        """Hold bytes that a thread has received and not consumed. There must be no others."""
        return self.hold(held)

    cdef int receive_own(self) except -1:
        cdef bytearray own = self.own
        cdef Py_ssize_t consumed = self.offer(own, <unsigned char*>PyByteArray_AS_STRING(own), self.own_filled)
        self.receives += consumed > 0
        # A full buffer must be replaced by a larger one even if nothing was consumed.
        if consumed or self.own_filled == len(own):
            self.own = None
            self.hold(memoryview(own)[consumed : self.own_filled])
        return 0

    cdef int hold(self, rest) except -1:
        # A rest of more than half the shared buffer would be copied again on every read.
        if len(rest) <= self.shared.size // 2:
            self.tail = bytes(rest)
            return 0
        self.tail = b""
        self.own = bytearray(2 * len(rest))
        self.own[: len(rest)] = rest
        self.own_filled = len(rest)
        return 0
