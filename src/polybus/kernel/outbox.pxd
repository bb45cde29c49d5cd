from libc.stdint cimport uint32_t, uint64_t

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_lock(pthread_mutex_t* lock)
    int pthread_mutex_unlock(pthread_mutex_t* lock)

cdef extern from "<stdbool.h>" nogil:
    ctypedef bint bool

cdef extern from "<stdatomic.h>" nogil:
    ctypedef struct atomic_bool:
        pass
    bint atomic_load(atomic_bool* value)

cdef extern from "chunk.h" nogil:
    ctypedef struct pb_chunk:
        size_t capacity
        unsigned char* data
    pb_chunk* pb_chunk_new(size_t capacity) noexcept
    void pb_chunk_retain(pb_chunk* chunk) noexcept
    void pb_chunk_release(pb_chunk* chunk) noexcept

cdef extern from "outbox.h" nogil:
    enum:
        PB_FILLED
        PB_ROOM
        PB_OVERFLOW
        PB_BROKEN
        PB_STALLED
        PB_DRAINED
        PB_WRITE
        PB_RECEIVED
        PB_HUNG_UP
        PB_RELEASED
        PB_WORTH_A_WRITE
    ctypedef struct pb_entry:
        pb_chunk* chunk
        size_t offset
        size_t size
    ctypedef struct pb_outbox_list:
        pb_outbox** items
        size_t count
        size_t capacity
    ctypedef struct pb_turn:
        uint64_t id
        pb_outbox_list gathered
        pb_outbox_list changed
    ctypedef struct pb_outbox:
        pthread_mutex_t lock
        void* owner
        int descriptor
        int epoll
        uint32_t interest
        bint by_pipe
        bint stalled
        bint closed
        bint failed
        bint reports_stalls
        size_t count
        size_t first_sent
        size_t held
        size_t handed
        size_t high_water
        size_t low_water
        size_t max_bytes
        uint64_t pushed
        uint64_t messages
        uint64_t message_bytes
        uint64_t dropped
        uint64_t written_in
        uint32_t events
        atomic_bool full
    void pb_turn_init(pb_turn* turn, unsigned int thread)
    void pb_turn_free(pb_turn* turn)
    void pb_turn_end(pb_turn* turn)
    void pb_outbox_init(pb_outbox* box, void (*free_box)(pb_outbox*) noexcept nogil)
    void pb_outbox_destroy(pb_outbox* box)
    void pb_outbox_retain(pb_outbox* box)
    void pb_outbox_release(pb_outbox* box)
    pb_entry* pb_outbox_entry(pb_outbox* box, size_t at)
    void pb_outbox_push(
        pb_outbox* box, pb_turn* turn, pb_chunk* chunk, const unsigned char* data, size_t size, uint64_t messages
    )
    bint pb_outbox_write(pb_outbox* box, pb_turn* turn, const unsigned char* data, size_t size)
    void pb_outbox_on_writable(pb_outbox* box, pb_turn* turn)
    void pb_outbox_flush(pb_outbox* box, pb_turn* turn)
    void pb_outbox_close(pb_outbox* box, pb_turn* turn, bint keep_held)
    int pb_outbox_set_interest(pb_outbox* box, uint32_t interest)
    void pb_outbox_check_marks(pb_outbox* box, pb_turn* turn)
    void pb_outbox_check_room(pb_outbox* box, pb_turn* turn)
    void pb_outbox_drop_all(pb_outbox* box)


cdef int report_events(pb_outbox* box) except -1


cdef class LoopTurn:
    cdef pb_turn turn
    cdef readonly object call_soon
    cdef bint is_open  # its end is scheduled, or the pump ends it
    cdef int touch(self) except -1
    cdef int deliver(self) except -1


cdef class BoxOwner:
    """The Python object of a queue: it gets the queue's events."""

    cdef pb_outbox* box
    cdef int on_events(self, uint32_t events) except -1


cdef class SocketOutput(BoxOwner):
    """The queue before a socket that the pump writes. An outbox of the bus shares it."""

    cdef Outbox outbox


cdef class Outbox(BoxOwner):
    cdef LoopTurn turn
    cdef object pipe, owner
    cdef list handed  # the last write, if the pipe did not take all of it
    cdef public object connection
    cdef public object waiters  # blocked publishers, in order
    cdef public double window_start_s  # of the slow-consumer rule
    cdef public long long window_taken
    cdef int write_pipe(self) except -1
    cdef list take_held(self)
    cdef list collect_unsent(self, bint drop)
    cdef list copy_held(self)
    cdef bint begin_write(self, size_t size) noexcept
    cdef int written(self, list chunks) except -1
