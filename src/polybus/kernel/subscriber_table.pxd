from libc.stdint cimport uint32_t

from polybus.kernel.outbox cimport LoopTurn
from polybus.kernel.router cimport pb_router, pb_subscriber, pb_topic, pb_worker

cdef class SubscriberTable:
    cdef pb_router router
    cdef pb_worker* worker  # worker 0, which routes for Python
    cdef bint routing
    cdef LoopTurn turn  # of the outboxes in C
    cdef list outboxes
    cdef list names
    cdef set detached
    cdef list encodings
    cdef pb_topic* find(self, bytes topic) except? NULL
    cdef pb_subscriber* require_subscriber(self, uint32_t number) except NULL
    cdef int require_not_routing(self) except -1
    cdef int set_flag(self, bytes topic, int flag, bint value) except -1
    cdef int link(self, uint32_t number, bytes topic) except -1
    cdef int unlink(self, uint32_t number, bytes topic) except -1
