from libc.stdint cimport int64_t, uint64_t

from polybus.dialects.freud.server.request_scanner cimport ProduceRun
from polybus.dialects.freud.server.unread_queue cimport ChunkWriter, UnreadQueue
from polybus.kernel.fanout cimport Source
from polybus.kernel.router cimport pb_topic
from polybus.kernel.subscriber_table cimport SubscriberTable

cdef class MessageCounts:
    cdef public uint64_t received, received_bytes, delivered, delivered_bytes
    cpdef add_received(self, uint64_t messages, uint64_t size)

cdef class IncarnationBase:
    cdef readonly bytes name
    cdef readonly dict readers  # by subscriber id
    cdef readonly ChunkWriter writer
    cdef public list buffer

cdef class TopicBase:
    cdef readonly bytes name
    cdef public int state
    cdef public IncarnationBase current
    cdef readonly list marked
    cdef public bint is_restricted  # not everyone may produce, even if there are no rules

cdef class PlainDelivery:
    cdef dict topics
    cdef dict readers
    cdef SubscriberTable subscribers
    cdef MessageCounts counts
    cdef int64_t max_unread_messages
    cdef object wall_ns
    cpdef UnreadQueue find_reader(self, object account, bytes reader_id)
    cdef Py_ssize_t produce(self, Source source, ProduceRun run, uint64_t* first_id) except -1
    cdef bint may_produce(self, Source source, TopicBase topic, const pb_topic* entry) except -1
    cpdef str charge(self, IncarnationBase current, int64_t size, int64_t count)
    cpdef release(self, IncarnationBase current, int64_t size)
    cpdef deliver(self, IncarnationBase current, uint64_t first_id, ProduceRun run)
    cdef int store(self, IncarnationBase current, pb_topic* entry, uint64_t first_id, ProduceRun run) except -1
