"""Writes of a connection: straight into its socket while the event loop has no queue for it.

The event loop's own write handles queues and errors, which for a small answer costs more
than the system call. So bytes go to the socket first. The rest, after a partial write or
any error, goes to the loop, which meets the same error by itself. While the loop has a
queue, everything goes there, or bytes would overtake it.
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
    """`descriptor` is the socket of the asyncio transport, valid until the transport closes."""

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
            # The GIL stays held because MSG_DONTWAIT never blocks.
            sent = send(self.descriptor, PyBytes_AS_STRING(data), size, MSG_DONTWAIT | MSG_NOSIGNAL)
        if sent < size:
            self.queue(memoryview(data)[sent:] if sent > 0 else data)
