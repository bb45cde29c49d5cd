"""The output of one reader: a bounded queue before its socket (see outbox.h for the rules).

Sockets that the pump serves are written in C. The queue of any other connection (TLS, or a
pipe inside the program) has the same marks, and `Outbox` writes it through the connection.

Events of queues reach their owners when the call that caused them is done, and never within
it: an owner may end the connection, or push again.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdlib cimport free, malloc

WORTH_A_WRITE_BYTES = PB_WORTH_A_WRITE


cdef void free_box(pb_outbox* box) noexcept nogil:
    pb_outbox_destroy(box)
    free(box)


cdef class LoopTurn:
    """One turn of the event loop, shared by all outboxes of a bus."""

    def __cinit__(self):
        pb_turn_init(&self.turn, 0)

    def __init__(self, call_soon):
        self.call_soon = call_soon

    def __dealloc__(self):
        pb_turn_free(&self.turn)

    def end(self):
        """Write the gathered output. Runs after all callbacks that are ready."""
        self.is_open = False
        pb_turn_end(&self.turn)
        self.deliver()

    cdef int touch(self) except -1:
        """Schedule the end of the turn, unless that is done."""
        if not self.is_open:
            self.is_open = True
            self.call_soon(self.end)
        return 0

    cdef int deliver(self) except -1:
        """Report all events to the owners of their queues; they may cause further events."""
        while self.turn.changed.count:
            self.turn.changed.count -= 1
            report_events(self.turn.changed.items[self.turn.changed.count])
        return 0


cdef int report_events(pb_outbox* box) except -1:
    """Pass the events of a queue to its owner, and drop the list's reference to the queue."""
    cdef uint32_t events
    cdef void* owner
    pthread_mutex_lock(&box.lock)
    events = box.events
    box.events = 0
    owner = box.owner
    pthread_mutex_unlock(&box.lock)
    try:
        if owner is not NULL:
            (<BoxOwner>owner).on_events(events)
    finally:
        pb_outbox_release(box)
    return 0


cdef class BoxOwner:
    def __dealloc__(self):
        if self.box is NULL:
            return
        if self.box.owner == <void*>self:
            self.box.owner = NULL
        pb_outbox_release(self.box)

    cdef int on_events(self, uint32_t events) except -1:
        return 0


cdef class SocketOutput(BoxOwner):
    pass


cdef class Outbox(BoxOwner):
    """The bus's side of a queue: pushes, marks, and the publishers that wait for room.

    `pipe.output` is the queue of its socket, or None: then the pipe's own methods write. The
    owner is called when the outbox is full, has room again, or exceeds its bound.
    """

    def __init__(self, pipe, LoopTurn turn not None, owner, size_t high_water, size_t max_bytes, low_water=None):
        cdef SocketOutput output = pipe.output
        if output is not None:
            self.box = output.box
            pb_outbox_retain(self.box)
            output.outbox = self
        else:
            self.box = <pb_outbox*>malloc(sizeof(pb_outbox))
            if self.box is NULL:
                raise MemoryError
            pb_outbox_init(self.box, free_box)
            self.box.by_pipe = True
            self.box.owner = <void*>self
        self.box.high_water = high_water
        self.box.low_water = high_water // 2 if low_water is None else low_water
        self.box.max_bytes = max_bytes
        self.turn = turn
        self.pipe = pipe
        self.owner = owner
        self.handed = []
        self.waiters = {}

    @property
    def full(self):
        return atomic_load(&self.box.full)

    def push(self, bytes data not None):
        """Queue bytes for the reader; the first of a turn are written at once."""
        cdef pb_turn* turn = &self.turn.turn
        cdef pb_outbox* box = self.box
        self.turn.touch()
        if box.by_pipe and self.begin_write(PyBytes_GET_SIZE(data)):
            # Without a copy: the pipe takes the object as it is.
            self.pipe.write(data)
            self.written([data])
        else:
            pb_outbox_push(
                box, turn, NULL, <const unsigned char*>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), 0
            )
        if turn.changed.count:
            self.turn.deliver()

    cdef bint begin_write(self, size_t size) noexcept:
        """Count bytes that the pipe may take at once. Returns False if they must be queued."""
        cdef pb_outbox* box = self.box
        pthread_mutex_lock(&box.lock)
        is_free = not box.closed and not box.stalled and not box.count and box.written_in != self.turn.turn.id
        if is_free:
            box.pushed += size
            box.written_in = self.turn.turn.id
        pthread_mutex_unlock(&box.lock)
        return is_free

    def close(self, *, bint send_held):
        """Accept no more bytes. Held bytes are sent if `send_held`, else dropped.

        Returns the chunks that were dropped, as `unsent` does.
        """
        cdef list chunks, dropped = []
        if not send_held:
            dropped = self.collect_unsent(drop=True)
            self.handed = []
        elif self.box.by_pipe:
            chunks = self.take_held()
            if chunks:
                self.handed = self.handed + chunks
                self.pipe.write_many(chunks)
        pb_outbox_close(self.box, &self.turn.turn, send_held)
        self.turn.deliver()
        return dropped

    def take_dropped(self):
        """Return how many messages came after the queue was closed or had failed, since the last call.

        A thread may push until the subscriber is removed from the fan-out.
        """
        pthread_mutex_lock(&self.box.lock)
        dropped = self.box.dropped
        self.box.dropped = 0
        pthread_mutex_unlock(&self.box.lock)
        return dropped

    def on_stalled(self):
        """Handle a full socket. The pump knows the state of its own sockets."""
        if self.box.by_pipe:
            pthread_mutex_lock(&self.box.lock)
            self.box.stalled = True
            pthread_mutex_unlock(&self.box.lock)

    def on_writable(self):
        """Handle a socket that has accepted all output."""
        if not self.box.by_pipe:
            return
        pthread_mutex_lock(&self.box.lock)
        self.box.stalled = False
        self.box.handed = 0
        pthread_mutex_unlock(&self.box.lock)
        self.handed = []
        self.turn.touch()
        self.write_pipe()
        pthread_mutex_lock(&self.box.lock)
        pb_outbox_check_room(self.box, &self.turn.turn)
        pthread_mutex_unlock(&self.box.lock)
        self.turn.deliver()

    def backlog(self):
        """Return the bytes that the reader has not taken yet."""
        if self.box.by_pipe and self.box.stalled:
            return self.box.held + self.pipe.backlog_bytes()
        return self.box.held

    def taken(self):
        """Return the total of bytes that have reached the reader's host.

        Bytes in the kernel's send queue are not counted: the queue may hold megabytes, and
        while a slow reader drains it the socket accepts no more.
        """
        cdef long long sent
        pthread_mutex_lock(&self.box.lock)  # both counts of one moment: threads push meanwhile
        sent = <long long>self.box.pushed - <long long>self.box.held
        pthread_mutex_unlock(&self.box.lock)
        if self.box.by_pipe and self.box.stalled:
            sent -= self.pipe.backlog_bytes()
        return sent - self.pipe.unconfirmed_bytes()

    def is_idle(self):
        return not self.box.stalled and not self.box.held

    def unsent(self):
        """Return the chunks that are not sent yet, each with the number of its sent bytes."""
        return self.collect_unsent(drop=False)

    cdef list collect_unsent(self, bint drop):
        cdef list parts = [], held
        cdef size_t sent
        left = self.pipe.backlog_bytes() if self.box.by_pipe and self.box.stalled else 0
        for chunk in reversed(self.handed):
            if left <= 0:
                break
            parts.append((chunk, max(0, len(chunk) - left)))
            left -= len(chunk)
        parts.reverse()
        pthread_mutex_lock(&self.box.lock)
        try:
            sent = self.box.first_sent
            held = self.copy_held()
            if drop:  # under the same lock, so that a thread sends none of them meanwhile
                self.box.closed = True
                pb_outbox_drop_all(self.box)
        finally:
            pthread_mutex_unlock(&self.box.lock)
        for chunk in held:
            parts.append((chunk, sent))
            sent = 0
        return parts

    cdef list copy_held(self):
        """Return the held chunks. With the lock held: only bytes are allocated, which never starts the collector."""
        cdef list chunks = []
        cdef size_t at
        cdef pb_entry* entry
        for at in range(self.box.count):
            entry = pb_outbox_entry(self.box, at)
            chunks.append(PyBytes_FromStringAndSize(<char*>entry.chunk.data + entry.offset, entry.size))
        return chunks

    cdef int on_events(self, uint32_t events) except -1:
        if events & PB_WRITE:
            self.write_pipe()
        if events & PB_OVERFLOW:
            self.owner.on_overflow(self)
        if events & PB_FILLED and not self.box.closed:
            self.owner.on_filled(self)
        # The mark may have been reached again meanwhile.
        if events & PB_ROOM and not atomic_load(&self.box.full) and not self.box.closed:
            self.owner.on_room(self)
        return 0

    cdef int write_pipe(self) except -1:
        """Write all held bytes to the pipe in one call."""
        cdef list chunks
        if self.box.stalled or not self.box.count:
            return 0
        chunks = self.take_held()
        self.box.written_in = self.turn.turn.id
        self.pipe.write_many(chunks)
        return self.written(chunks)

    cdef list take_held(self):
        pthread_mutex_lock(&self.box.lock)
        try:
            chunks = self.copy_held()
            pb_outbox_drop_all(self.box)
        finally:
            pthread_mutex_unlock(&self.box.lock)
        return chunks

    cdef int written(self, list chunks) except -1:
        """Keep the written chunks if the pipe did not accept all of them."""
        if not self.box.stalled:
            return 0
        self.handed = chunks
        pthread_mutex_lock(&self.box.lock)
        self.box.handed = self.pipe.backlog_bytes()
        pb_outbox_check_marks(self.box, &self.turn.turn)
        pthread_mutex_unlock(&self.box.lock)
        return 0
