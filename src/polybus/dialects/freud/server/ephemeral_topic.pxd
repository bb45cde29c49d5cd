from libc.stdint cimport int64_t, uint64_t

from polybus.kernel.subscriber_table cimport SubscriberTable
from polybus.kernel.topic_index cimport Topic
from polybus.dialects.freud.server.unread_queue cimport Range, Unread, Writer

cdef class Tally:
    cdef public uint64_t received, received_bytes, delivered, delivered_bytes

cdef class Life:
    cdef readonly bytes name
    cdef readonly dict readers  # by subscriber id
    cdef readonly Writer writer
    cdef public list buffer

cdef class Lives:
    cdef readonly bytes name
    cdef public Life current
    cdef readonly list marked

cdef class ShortPath:
    cdef dict topics
    cdef dict readers
    cdef SubscriberTable registry
    cdef Tally tally
    cdef int64_t max_unread_messages
    cdef object wall_ns
    cdef bint produce(
        self, object source, bytes name, const unsigned char* body, Py_ssize_t size, uint64_t* message_id
    ) except -1
    cdef bint may_produce(self, object source, const Topic* topic) except -1
    cdef bint has_room(self, Unread reader, Py_ssize_t size) noexcept
    cdef Unread reader(self, object account, bytes reader_id)
    cdef int confirm(self, Unread reader, Range taken) except -1
