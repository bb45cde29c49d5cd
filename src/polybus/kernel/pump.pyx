"""The pump: one epoll set for all plain TCP and Unix connections of an event loop.

The event loop watches the set itself (`add_reader`), so one callback serves all sockets that
are ready, in compiled code: receive, hand to the session, send. A `SocketTransport` has the
methods of an asyncio transport that `transports.stream_connection` uses, so a connection does
not know whether the pump or the loop serves its socket.

The set is level-triggered: each turn receives once from a readable socket, and a socket with
more to read is ready again in the next turn, after all others. One callback serves several
turns, which saves the way through the event loop, until its share is used up or a session has
run, whose callbacks must not wait.

A socket that was the only one with bytes for two callbacks is received from before the set is
asked: with one busy publisher that takes one system call off the way of each message.

With threads (`start_threads`) a connection that has a plain route belongs to one of them, which
receives, routes and sends without Python (pump_thread.h). The loop has such a connection from
the frame that its thread cannot handle until its session has consumed the received bytes.
"""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint32_t
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdlib cimport free

from polybus.kernel.fanout cimport Fanout, PlainRoute
from polybus.kernel.outbox cimport (
    PB_BROKEN,
    PB_DRAINED,
    PB_HUNG_UP,
    PB_RECEIVED,
    PB_RELEASED,
    PB_STALLED,
    LoopTurn,
    SocketOutput,
    pb_outbox,
    pb_outbox_flush,
    pb_outbox_list,
    pb_outbox_on_writable,
    pb_outbox_set_interest,
    pb_outbox_write,
    pthread_mutex_lock,
    pthread_mutex_unlock,
    report_events,
)
from polybus.kernel.pump_thread cimport (
    PB_ADOPT,
    PB_END,
    PB_HANDED_OVER,
    PB_RESUME,
    pb_delayed_ack_received,
    pb_mailbox,
    pb_mailbox_free,
    pb_mailbox_init,
    pb_mailbox_take,
    pb_stream,
    pb_stream_hold,
    pb_stream_new,
    pb_stream_request,
    pb_thread,
    pb_thread_start,
    pb_thread_stop,
)
from polybus.kernel.router cimport pb_router_changes_begin, pb_router_changes_end
from polybus.kernel.receive_buffer cimport ReceiveBuffer, SharedBuffer

import os
import socket

cdef extern from "<sys/epoll.h>" nogil:
    enum:
        EPOLLIN
        EPOLLOUT
        EPOLLERR
        EPOLLHUP
        EPOLL_CLOEXEC
    ctypedef union epoll_data_t:
        void* ptr
    struct epoll_event:
        uint32_t events
        epoll_data_t data
    int epoll_create1(int flags)
    int epoll_wait(int epoll, epoll_event* events, int size, int timeout_ms)

cdef extern from "<sys/socket.h>" nogil:
    enum:
        MSG_DONTWAIT
    Py_ssize_t recv(int descriptor, void* data, size_t size, int flags)

# The share of one callback of the event loop. A single turn may exceed the bytes, because each
# receive may fill the buffer.
cdef enum:
    CALLBACK_EVENTS = 128
    CALLBACK_BYTES = 64 * 1024
    MAX_THREADS = 63  # with the loop's own, as many as the router has workers


@cython.final
cdef class Pump:
    """Serves the sockets of one event loop, in the loop's thread."""

    cdef int epoll
    cdef LoopTurn turn
    cdef SharedBuffer shared
    cdef object loop
    cdef set transports
    cdef epoll_event[CALLBACK_EVENTS] ready
    cdef SocketTransport latest  # the last that bytes were received from
    cdef SocketTransport expected  # probably the next
    cdef Py_ssize_t received_bytes  # in this callback
    cdef int changes  # of `latest`, in this callback
    cdef pb_mailbox mailbox  # of the threads
    cdef pb_thread* threads[MAX_THREADS]
    cdef int thread_count
    cdef Fanout fanout  # its tables are those of the threads

    def __cinit__(self):
        self.epoll = -1

    def __init__(self, loop, LoopTurn turn not None, SharedBuffer shared not None):
        """`shared` must be the buffer of all connections that are added."""
        self.loop = loop
        self.turn = turn
        self.shared = shared
        self.transports = set()
        self.epoll = epoll_create1(EPOLL_CLOEXEC)
        if self.epoll < 0:
            raise OSError(errno, os.strerror(errno))
        loop.add_reader(self.epoll, self.run)

    def __dealloc__(self):
        if self.epoll >= 0:
            os.close(self.epoll)

    def start_threads(self, int count, Fanout fanout not None):
        """Start threads for connections with a plain route. Must be called before the first one.

        Raises OSError if a thread cannot be started; those that run stay until `close`.
        """
        cdef pb_thread* thread
        if self.fanout is not None or not 0 < count <= MAX_THREADS:
            raise ValueError(f"count must be 1 to {MAX_THREADS}, once, got {count}")
        if not pb_mailbox_init(&self.mailbox):
            raise OSError(errno, os.strerror(errno))
        self.fanout = fanout
        self.loop.add_reader(self.mailbox.event, self.read_mailbox)
        for _ in range(count):
            thread = pb_thread_start(&fanout.router, &self.mailbox)
            if thread is NULL:
                raise OSError(errno, os.strerror(errno))
            self.threads[self.thread_count] = thread
            self.thread_count += 1

    def add(self, sock, ReceiveBuffer protocol not None):
        """Serve a connected socket for a `StreamConnection`. Returns its transport.

        Raises OSError if the socket cannot be watched; it is the caller's then.
        """
        cdef SocketTransport transport
        if self.epoll < 0:
            raise RuntimeError("the pump must be open")
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport = SocketTransport.__new__(SocketTransport)
        transport.open(self, sock, protocol)
        self.transports.add(transport)
        try:
            protocol.connection_made(transport)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            transport.fail(error)
        return transport

    def close(self):
        """Stop serving. All connections must have ended."""
        while self.thread_count:
            self.thread_count -= 1
            pb_thread_stop(self.threads[self.thread_count])
        if self.fanout is not None:
            self.loop.remove_reader(self.mailbox.event)
            pb_mailbox_free(&self.mailbox)
            self.fanout = None
        if self.epoll >= 0:
            self.loop.remove_reader(self.epoll)
            os.close(self.epoll)
            self.epoll = -1

    def run(self):
        """Serve the sockets that are ready, turn by turn, up to the share of one callback."""
        cdef long long session_calls = self.shared.session_calls
        cdef int left = CALLBACK_EVENTS
        cdef int count
        self.received_bytes = self.changes = 0
        if self.expected is not None:
            self.turn.is_open = True
            try:
                serve(self.expected, EPOLLIN)
            finally:
                self.turn.end()
        while True:
            count = epoll_wait(self.epoll, self.ready, left, 0)
            if count <= 0:
                break
            self.serve_turn(count)
            left -= count
            if not left or self.received_bytes >= CALLBACK_BYTES or self.shared.session_calls != session_calls:
                break
        self.expected = self.latest if self.received_bytes and not self.changes else None

    cdef int serve_turn(self, int count) except -1:
        cdef int at
        # A connection that ends in this callback is forgotten after it, so no pointer dangles.
        self.turn.is_open = True
        try:
            for at in range(count):
                serve(<SocketTransport>(<pb_outbox*>self.ready[at].data.ptr).owner, self.ready[at].events)
        finally:
            self.turn.end()
        return 0

    cdef void on_received(self, SocketTransport transport, Py_ssize_t count) noexcept:
        self.received_bytes += count
        if self.latest is not transport:
            self.latest = transport
            self.changes += 1

    cdef void forget(self, SocketTransport transport) noexcept:
        if self.latest is transport:
            self.latest = None
        if self.expected is transport:
            self.expected = None

    def read_mailbox(self):
        """Handle everything that the threads have reported."""
        cdef pb_outbox_list reports
        cdef size_t at
        reports.items = NULL
        reports.count = reports.capacity = 0
        pb_mailbox_take(&self.mailbox, &reports)
        self.turn.is_open = True
        try:
            for at in range(reports.count):
                report(self.loop, reports.items[at])
        finally:
            free(reports.items)
            self.turn.end()

    cdef pb_thread* least_loaded_thread(self) noexcept:
        cdef pb_thread* least = self.threads[0]
        cdef int at
        for at in range(1, self.thread_count):
            if self.threads[at].streams < least.streams:
                least = self.threads[at]
        return least


cdef int report(loop, pb_outbox* box) except -1:
    try:
        report_events(box)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        # An error on one connection must not keep the others from being served.
        loop.call_exception_handler({"message": "a report of the pump failed", "exception": error})
    return 0


cdef int serve(SocketTransport transport, uint32_t events) except -1:
    try:
        transport.on_ready(events)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        # An error on one connection must not end the others.
        transport.fail(error)
    return 0


@cython.final
cdef class SocketTransport(SocketOutput):
    """A socket that a pump serves, with the methods of an asyncio transport."""

    cdef Pump pump
    cdef pb_stream* stream  # its queue is `box`
    cdef object sock
    cdef object connection  # the protocol, for its methods in Python
    cdef ReceiveBuffer received  # the same object
    cdef PlainRoute route  # of a connection that belongs to a thread
    cdef bint on_thread  # the thread receives; else the loop does
    cdef bint is_closing_, is_reading, has_ended
    cdef object error  # the reason of the end

    cdef int open(self, Pump pump, sock, ReceiveBuffer protocol) except -1:
        self.stream = pb_stream_new(sock.fileno(), pump.epoll)
        if self.stream is NULL:
            raise MemoryError
        self.box = &self.stream.out
        self.box.owner = <void*>self
        self.box.reports_stalls = True
        self.pump = pump
        self.sock = sock
        self.connection = self.received = protocol
        self.is_reading = True
        failed = self.change_interest(EPOLLIN, 0)
        if failed:
            raise OSError(failed, os.strerror(failed))
        return 0

    cdef int change_interest(self, uint32_t more, uint32_t less) noexcept:
        """Change the events that epoll reports. Returns 0 or an error number."""
        pthread_mutex_lock(&self.box.lock)
        failed = pb_outbox_set_interest(self.box, self.box.interest & ~less | more)
        pthread_mutex_unlock(&self.box.lock)
        return failed

    # --- the loop reads the socket

    cdef int on_ready(self, uint32_t events) except -1:
        if events & EPOLLOUT:
            pb_outbox_on_writable(self.box, &self.pump.turn.turn)
            self.pump.turn.deliver()
        # A socket that is not read and has failed is found by its next write.
        if events & (EPOLLIN | EPOLLHUP | EPOLLERR) and self.is_reading and self.route is None:
            self.receive()
        return 0

    cdef int receive(self) except -1:
        cdef Py_ssize_t size = 0
        cdef unsigned char* room = self.received.room(&size)
        cdef Py_ssize_t count = recv(self.box.descriptor, room, size, MSG_DONTWAIT)
        if count > 0:
            pb_delayed_ack_received(&self.stream.ack, self.box.descriptor)
            self.pump.on_received(self, count)
            return self.received.add(count)
        if count == 0:
            self.on_eof()
        elif errno != EAGAIN and errno != EINTR:
            self.end(OSError(errno, os.strerror(errno)))
        return 0

    cdef int on_eof(self) except -1:
        self.pause_reading()
        if not self.connection.eof_received():
            self.close()
        return 0

    # --- a thread reads the socket

    def use_plain_route(self, PlainRoute route not None):
        """Let a thread of the pump serve the socket, if there are threads."""
        if not self.pump.thread_count or self.is_closing_:
            return
        self.change_interest(0, EPOLLIN)
        self.route = route
        self.received.stream = self.stream
        self.stream.thread = self.pump.least_loaded_thread()
        self.stream.thread.streams += 1
        self.stream.source = &route.source.publisher
        self.stream.framing = route.framing.scanner
        self.stream.encoding = route.framing.own.number
        self.stream.is_parked = True
        self.box.epoll = self.stream.thread.epoll
        self.box.reports_stalls = False
        self.on_thread = True
        self.request(PB_ADOPT)

    cdef int request(self, uint32_t what) except -1:
        if not pb_stream_request(self.stream, what):
            raise MemoryError
        return 0

    cdef int on_parked(self) except -1:
        """Let the session handle the bytes that its thread cannot, then give the socket back."""
        if self.is_closing_:
            return 0
        self.pump.shared.reads += 1  # its session keeps the loop busy, as a read does
        # One stop of the threads for many subscriptions: each waits for the longest route.
        pb_router_changes_begin(&self.pump.fanout.router)
        try:
            self.received.redeliver_held()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            return self.fail(error)
        finally:
            pb_router_changes_end(&self.pump.fanout.router)
        return self.give_back()

    cdef int take_back(self) except -1:
        self.on_thread = False
        self.received.put_held(PyBytes_FromStringAndSize(<char*>self.stream.held, self.stream.held_size))
        pb_stream_hold(self.stream, NULL, 0)
        return 0

    cdef int give_back(self) except -1:
        cdef bytes held
        if self.on_thread or not self.is_reading or self.is_closing_:
            return 0
        held = self.received.take_held()
        if not pb_stream_hold(self.stream, <const unsigned char*>PyBytes_AS_STRING(held), len(held)):
            raise MemoryError
        self.on_thread = True
        return self.request(PB_RESUME)

    # --- events

    cdef int on_events(self, uint32_t events) except -1:
        if events & PB_HANDED_OVER and self.on_thread:
            self.take_back()
        if events & PB_RELEASED:
            self._lose(self.error)
            return 0
        if events & PB_BROKEN:
            self.end(BrokenPipeError())
        if events & PB_STALLED and not self.has_ended:
            self.connection.pause_writing()
        if events & PB_DRAINED and not self.box.stalled:
            if self.is_closing_:
                self.end(None)
            else:
                self.connection.resume_writing()
        if self.outbox is not None:
            self.outbox.on_events(events)
        if events & PB_RECEIVED:
            self.on_parked()
        if events & PB_HUNG_UP and not self.is_closing_:
            self.on_eof()
        return 0

    cdef int end(self, error) except -1:
        """End the connection: now for the socket, later for the protocol."""
        if self.has_ended:
            return 0
        self.has_ended = self.is_closing_ = True
        self.is_reading = False
        self.error = error
        if self.route is not None:
            return self.request(PB_END)  # the thread answers with PB_RELEASED
        pthread_mutex_lock(&self.box.lock)
        pb_outbox_set_interest(self.box, 0)
        self.box.failed = True  # nothing is written any more
        pthread_mutex_unlock(&self.box.lock)
        self.pump.loop.call_soon(self._lose, error)
        return 0

    def _lose(self, error):
        connection, self.connection = self.connection, None
        if self.route is not None:
            self.stream.thread.streams -= 1
        try:
            connection.connection_lost(error)
        finally:
            self.received.stream = NULL
            self.received = None
            self.pump.transports.discard(self)
            self.pump.forget(self)
            self.outbox = None
            self.box.owner = NULL
            self.sock.close()

    cdef int fail(self, error) except -1:
        self.pump.loop.call_exception_handler(
            {"message": "a connection failed", "exception": error, "transport": self}
        )
        return self.end(error)

    # --- the methods of an asyncio transport

    def write(self, bytes data not None):
        """Write to the socket now; bytes that it does not accept are queued."""
        cdef LoopTurn turn = self.pump.turn
        if self.is_closing_:
            return
        if not pb_outbox_write(
            self.box, &turn.turn, <const unsigned char*>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data)
        ):
            raise MemoryError
        if turn.turn.changed.count:
            turn.deliver()

    def writelines(self, list chunks not None):
        self.write(b"".join(chunks))

    def get_write_buffer_size(self):
        return self.box.held

    def set_write_buffer_limits(self, high=None, low=None):
        """Do nothing: every write that the socket does not accept whole is reported."""

    def pause_reading(self):
        if self.is_reading:
            self.is_reading = False
            if self.route is None:
                self.change_interest(0, EPOLLIN)

    def resume_reading(self):
        if self.is_reading or self.is_closing_:
            return
        self.is_reading = True
        if self.route is not None:
            self.give_back()
            return
        failed = self.change_interest(EPOLLIN, 0)
        if failed:
            self.end(OSError(failed, os.strerror(failed)))

    def is_closing(self):
        return self.is_closing_

    def close(self):
        """End the connection when the socket has accepted all output."""
        if self.is_closing_:
            return
        self.pause_reading()
        self.is_closing_ = True
        pb_outbox_flush(self.box, &self.pump.turn.turn)
        pthread_mutex_lock(&self.box.lock)
        self.box.reports_stalls = True  # the connection ends with PB_DRAINED
        is_sent = not self.box.held
        pthread_mutex_unlock(&self.box.lock)
        self.pump.turn.deliver()
        if is_sent:
            self.end(None)

    def abort(self):
        """End the connection at once."""
        self.end(None)

    def get_extra_info(self, name, default=None):
        return self.sock if name == "socket" else default
