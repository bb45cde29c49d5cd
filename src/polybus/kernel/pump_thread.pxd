# Threads that receive, route and send without Python: pump_thread.h has the contracts.
from libc.stdint cimport uint32_t, uint64_t

from polybus.kernel.framing cimport pb_framing
from polybus.kernel.outbox cimport pb_outbox, pb_outbox_list
from polybus.kernel.router cimport pb_router, pb_source

cdef extern from "pump_thread.h" nogil:
    enum:
        PB_ADOPT
        PB_RESUME
        PB_END
        PB_HANDED_OVER
    ctypedef struct pb_delayed_ack:
        pass
    ctypedef struct pb_mailbox:
        int event
    ctypedef struct pb_thread:
        int epoll
        unsigned int streams
    ctypedef struct pb_stream:
        pb_outbox out
        pb_thread* thread
        pb_source* source
        const pb_framing* framing
        uint32_t encoding
        bint is_parked
        unsigned char* held
        size_t held_size
        uint64_t takes
        pb_delayed_ack ack
    void pb_delayed_ack_received(pb_delayed_ack* ack, int descriptor)
    bint pb_mailbox_init(pb_mailbox* mailbox)
    void pb_mailbox_free(pb_mailbox* mailbox)
    void pb_mailbox_take(pb_mailbox* mailbox, pb_outbox_list* taken)
    pb_stream* pb_stream_new(int descriptor, int epoll)
    bint pb_stream_hold(pb_stream* stream, const unsigned char* data, size_t size)
    bint pb_stream_request(pb_stream* stream, uint32_t request)
    pb_thread* pb_thread_start(pb_router* router, pb_mailbox* mailbox)
    void pb_thread_stop(pb_thread* thread)
