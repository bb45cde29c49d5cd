from polybus.kernel.fanout cimport PlainRoute
from polybus.kernel.pump_thread cimport pb_stream

cdef class SharedBuffer:
    cdef readonly bytearray data
    cdef readonly object view  # of the whole buffer
    cdef readonly Py_ssize_t size
    cdef readonly long long reads  # of all connections
    cdef long long session_calls  # of all connections

cdef class ReceiveBuffer:
    cdef SharedBuffer shared
    cdef bytes tail  # unconsumed bytes, unless they are in `own`
    cdef bytearray own
    cdef Py_ssize_t own_filled
    cdef long long receives  # calls of `receive` that consumed bytes
    cdef public object receive
    cdef PlainRoute plain_route
    cdef pb_stream* stream  # of a connection that a thread of the pump reads, or NULL
    cdef bytes take_held(self)
    cdef int put_held(self, bytes held) except -1
    cdef Py_ssize_t offer(self, object buffer, const unsigned char* data, Py_ssize_t end) except -1
    cdef unsigned char* room(self, Py_ssize_t* size) except NULL
    cdef int add(self, Py_ssize_t count) except -1
    cdef int receive_own(self) except -1
    cdef int hold(self, rest) except -1
