"""The way out of a connection: straight into its socket, as long as nothing is in the way.

An event loop's own write keeps a queue, and takes care of all that can go wrong; for
a small answer that costs more than the system call. So bytes are offered to the socket
first. What it does not take, for whatever reason, goes to the loop, which finds out
that reason by itself; and while the loop has a queue, everything goes there.
"""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE

cdef extern from "<sys/socket.h>" nogil:
    enum:
        MSG_DONTWAIT
        MSG_NOSIGNAL
    Py_ssize_t send(int descriptor, const void* data, size_t size, int flags)


@cython.final
cdef class SocketWriter:
    """`transport` is asyncio's. The descriptor is its socket's, and valid until it is closing."""

    cdef int descriptor
    cdef object is_closing, queued_bytes, queue

    def __init__(self, int descriptor, transport):
        self.descriptor = descriptor
        self.is_closing = transport.is_closing
        self.queued_bytes = transport.get_write_buffer_size
        self.queue = transport.write

    def write(self, bytes data not None):
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
        cdef Py_ssize_t sent = 0
        if not self.is_closing() and not self.queued_bytes():
            # The interpreter's lock is kept: this never waits.
            sent = send(self.descriptor, PyBytes_AS_STRING(data), size, MSG_DONTWAIT | MSG_NOSIGNAL)
        if sent < size:
            self.queue(memoryview(data)[sent:] if sent > 0 else data)
