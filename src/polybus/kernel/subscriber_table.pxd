from libc.stdint cimport uint8_t, uint32_t, uint64_t

from polybus.kernel.subscriber_set cimport SubscriberSetTable
from polybus.kernel.topic_index cimport Topic, TopicTable

cdef struct Subscriber:
    uint64_t messages  # sent so far
    uint64_t bytes
    size_t pending  # scratch of one routing: bytes and messages of its output
    uint64_t pending_messages
    unsigned char* cursor  # scratch of one routing: write position in its output
    uint8_t encoding
    uint8_t full
    uint8_t alive

cdef class SubscriberTable:
    cdef TopicTable table
    cdef SubscriberSetTable sets
    cdef Subscriber* subscribers
    cdef uint32_t capacity
    cdef uint32_t used
    cdef uint32_t full_count
    cdef uint64_t generation
    cdef bint routing
    cdef public bint has_produce_rules  # then messages without a reader are judged, too
    cdef list outboxes
    cdef list names
    cdef list free
    cdef set detached
    cdef list encodings
    cdef uint32_t allocate_number(self) except? 0xFFFFFFFF
    cdef Subscriber* require_subscriber(self, uint32_t number) except NULL
    cdef int link(self, uint32_t number, bytes topic, uint32_t encoding) except -1
    cdef int unlink(self, uint32_t number, bytes topic) except -1
    cdef int update_idle(self, Topic* topic, bint was_idle) except -1
    cdef int require_not_routing(self) except -1
    cdef Topic* entry(self, bytes topic) except NULL
