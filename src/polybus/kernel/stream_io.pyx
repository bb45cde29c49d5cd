"""The two ends of a stream connection: received bytes, and writes to its socket.

The event loop reads one connection at a time and passes the bytes on before it reads the
next, so all connections share one buffer, which stays in the CPU cache. Bytes that a
session does not consume (an incomplete frame, or all bytes behind a full reader) are kept
per connection and put in front of the next read. Ten thousand idle connections cost nothing.

A frame larger than the shared buffer gets a buffer of its own, which doubles as the bytes
arrive, so a header that only announces a large frame costs nothing either. The session
rejects frames over its limit, which bounds this buffer.

The loop calls `get_buffer` and `buffer_updated` for each read (asyncio's BufferedProtocol).
They and `write` are compiled because a client that sends one request at a time pays for
every call; `transports.stream_connection` inherits them, so no call stands in between.
"""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE

cdef extern from "<sys/socket.h>" nogil:
    enum:
        MSG_DONTWAIT
        MSG_NOSIGNAL
    Py_ssize_t send(int descriptor, const void* data, size_t size, int flags)

# Measured: throughput falls below 128 KiB and does not rise above 256 KiB.
SHARED_BYTES = 256 * 1024


@cython.final
cdef class SharedBuffer:
    cdef readonly bytearray data
    cdef readonly object view  # of the whole buffer
    cdef readonly Py_ssize_t size
    cdef readonly long long reads  # of all connections

    def __init__(self, Py_ssize_t size=SHARED_BYTES):
        self.data = bytearray(size)
        self.view = memoryview(self.data)
        self.size = size


cdef class ReceiveBuffer:
    """The receive side of one connection.

    `receive(buffer, start, end)` is the session's and returns the consumed bytes. While it is
    None, received bytes are discarded.
    """

    cdef SharedBuffer shared
    cdef bytes tail  # unconsumed bytes, unless they are in `own`
    cdef bytearray own
    cdef Py_ssize_t own_filled
    cdef readonly long long takes  # calls of `receive` that consumed bytes
    cdef public object receive

    def __init__(self, SharedBuffer shared not None):
        self.shared = shared
        self.tail = b""

    @property
    def held_bytes(self):
        """Return the number of bytes that were received and not consumed."""
        return len(self.tail) if self.own is None else self.own_filled

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
        cdef Py_ssize_t consumed, end
        self.shared.reads += 1
        # Before the session exists, and after it has ended, bytes are discarded.
        if self.receive is None:
            return
        if self.own is not None:
            self.own_filled += nbytes
            self.receive_own()
            return
        end = len(self.tail) + nbytes
        consumed = self.receive(self.shared.data, 0, end)
        self.takes += consumed > 0
        if consumed == end:
            self.tail = b""
        else:
            self.hold(self.shared.view[consumed:end])

    def redeliver_held(self):
        """Pass the held bytes to the session again."""
        cdef Py_ssize_t consumed
        if self.own is not None:
            self.receive_own()
        elif self.tail:
            consumed = self.receive(self.tail, 0, len(self.tail))
            self.takes += consumed > 0
            self.tail = self.tail[consumed:]

    cdef int receive_own(self) except -1:
        cdef bytearray own = self.own
        cdef Py_ssize_t consumed = self.receive(own, 0, self.own_filled)
        self.takes += consumed > 0
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


cdef class StreamIO(ReceiveBuffer):
    """A receive buffer, and writes that go straight into the socket.

    The event loop's own write handles queues and errors, which for a small answer costs more
    than the system call. So bytes go to the socket first. The rest, after a partial write or
    any error, goes to the loop, which meets the same error by itself.
    """

    cdef int descriptor
    cdef readonly object has_failed  # the transport's is_closing
    cdef object queued_bytes, queue

    def attach(self, int descriptor, transport):
        """Write to this asyncio transport; its descriptor is valid until it closes."""
        self.descriptor = descriptor
        # Bound once: `write` calls them for every answer.
        self.has_failed = transport.is_closing
        self.queued_bytes = transport.get_write_buffer_size
        self.queue = transport.write

    def write(self, bytes data not None):
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
        cdef Py_ssize_t sent = 0
        # While the loop has a queue, everything goes there, or bytes would overtake it. The
        # descriptor of a closing transport may already be that of another connection.
        if not self.has_failed() and not self.queued_bytes():
            # The GIL stays held because MSG_DONTWAIT never blocks.
            sent = send(self.descriptor, PyBytes_AS_STRING(data), size, MSG_DONTWAIT | MSG_NOSIGNAL)
        if sent < size:
            self.queue(memoryview(data)[sent:] if sent > 0 else data)
