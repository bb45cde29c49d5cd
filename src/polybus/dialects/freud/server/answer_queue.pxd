from libc.stdint cimport uint64_t

from polybus.dialects.freud.server.plain_delivery cimport MessageCounts
from polybus.dialects.freud.server.unread_queue cimport Range, UnreadQueue

cdef class AnswerQueue:
    cdef object pipe, readers
    cdef MessageCounts counts
    cdef list parts, unconfirmed
    cdef bint discarding
    cdef public bint stalled
    cdef readonly Py_ssize_t size
    cdef readonly uint64_t sent_messages, sent_bytes
    cpdef add(self, bytes answer)
    cdef Py_ssize_t add_messages(self, UnreadQueue reader, Range taken, bint records) except -1
    cpdef flush(self)
    cdef int return_unsent(self) except -1
    cdef int confirm_all(self) except -1
    cdef int confirm(self, UnreadQueue reader, Range taken) except -1
    cdef int confirm_until(self, Py_ssize_t sent) except -1
