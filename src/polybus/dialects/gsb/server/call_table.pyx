"""The state of open calls, and the fast path that moves calls and replies between connections.

A call is in two tables while it is open: its caller's, by the id that the caller chose, and its
service's, by an id of the bus.

Most packets are calls and replies that need no decision. The fast path reads them from the
received bytes, looks them up and writes them for the other connection, many per write.
Everything else goes to `receive_slow_path` in dialects/gsb/server/session.py: other packets,
refusals, full connections, and calls that must set a timer. Both paths change the same tables
by the same rules; the tests run every conversation on both.

A packet that is larger than one read is assembled here, in a buffer of its own size, so that
it is copied once and not with every read.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_DelItem, PyDict_GetItem, PyDict_SetItem, PyDict_Size
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from polybus.dialects.gsb.gsb_packets cimport CALL_REPLY, CALL_REQUEST, ID_BYTES, MAX_ADDRESS, MAX_FREE_BYTES, MAX_FREE_PARTIALS, MAX_HOPS, RELAY_BYTES, RELAY_CALL, SERVICE_CALL, Kind, Packet, Slice, field_size, frame_size, put_field, put_head, put_relay, put_reply, read_packet, relay_size, reply_size, slice_of
from polybus.dialects.gsb.network.call_key cimport CallKey

cdef enum:
    LENGTH_SIZE = 8
    IPC_MARK = 1
    MAX_ID = 255
    PARTIAL = 1
    FAILURE = 500
    # A frame of this size is pushed on its own. Gathered output is flushed when it reaches it.
    GATHER_BYTES = 64 * 1024
    # Shorter packets stay in the transport's buffer until they are complete.
    LARGE_BYTES = 64 * 1024
    HEX_DIGITS = 16
    MAX_UINT32 = 0xFFFFFFFF
    # Slow-path packets per read before the connection yields: a few milliseconds of the loop.
    MAX_SLOW = 128

# A call whose clock is stopped is never overdue: its due time is at least this far ahead.
cdef double STANDING_S = 0.01


@cython.final
cdef class CallTable:
    """Settings and counters shared by all GSB connections of a bus."""

    cdef public uint64_t generation  # of names and rules; routes of an older generation are void
    cdef public uint64_t opened  # calls so far; the newest call id
    cdef public uint64_t answered, failed  # calls that the fast path ended with code 0 and 500
    cdef public double next_due_s  # when the deadline timer fires; a later deadline needs no new timer
    cdef public bint fast_path_enabled  # the tests turn it off to run the slow path alone
    # Ended calls for the call log: (call, code, now_s). None if calls are not logged.
    cdef public list log
    cdef readonly Py_ssize_t max_packet_bytes, max_open_calls, free_partials, free_bytes
    cdef readonly Py_ssize_t window_bytes, min_window, max_window
    # The network: the id of this node, and the nodes that call it, by their ids (20 bytes).
    cdef public bytes node
    cdef readonly dict calling_nodes
    cdef object clock, grant
    cdef list touched  # endpoints with unflushed output of this `receive`

    def __init__(
        self, clock, grant, *, Py_ssize_t max_packet_bytes, Py_ssize_t max_open_calls,
        Py_ssize_t free_partials, Py_ssize_t free_bytes, Py_ssize_t window_bytes,
        Py_ssize_t min_window, Py_ssize_t max_window,
    ):
        """`grant(call)` must send new credit to the call's service."""
        self.clock = clock
        self.grant = grant
        self.max_packet_bytes = max_packet_bytes
        self.max_open_calls = max_open_calls
        self.free_partials = free_partials
        self.free_bytes = free_bytes
        self.window_bytes = window_bytes
        self.min_window = min_window
        self.max_window = max_window
        self.generation = 1
        self.fast_path_enabled = True
        self.node = b""
        self.calling_nodes = {}
        self.touched = []

    cdef int flush(self) except -1:
        """Push the gathered output of every endpoint."""
        cdef CallEndpoint endpoint
        cdef list touched
        while self.touched:
            touched = self.touched
            self.touched = []
            for endpoint in touched:
                endpoint.flush()
        return 0


cdef class Service:
    """One registered name."""

    cdef readonly str id
    cdef readonly CallEndpoint endpoint
    cdef readonly object since_ms
    cdef public Py_ssize_t calls, pending

    def __init__(self, str name not None, CallEndpoint endpoint not None, since_ms):
        self.id = name
        self.endpoint = endpoint
        self.since_ms = since_ms


@cython.final
cdef class NodeService(Service):
    """Another node, as the service of the calls that go to it over a link."""

    cdef readonly CallKey key

    def __init__(self, str node not None, CallEndpoint link not None, CallKey key not None):
        Service.__init__(self, node, link, 0)
        self.key = key


@cython.final
cdef class Route:
    """A resolved address that one caller is allowed to call."""

    cdef readonly Service service
    cdef readonly bytes address  # without the node id

    def __init__(self, Service service not None, bytes address not None):
        self.service = service
        self.address = address


@cython.final
cdef class NodeAccount:
    """The ended calls of another node, and their bytes."""

    cdef readonly Py_ssize_t calls, failures, request_bytes, reply_bytes

    cpdef void add(self, Py_ssize_t request_bytes, Py_ssize_t reply_bytes, bint has_failed):
        self.calls += 1
        self.failures += has_failed
        self.request_bytes += request_bytes
        self.reply_bytes += reply_bytes


@cython.final
cdef class CallingNode:
    """A node that calls services of this one."""

    cdef readonly bytes name  # its id, as services see it
    cdef readonly object identity
    cdef readonly NodeAccount account
    # The key of its announced run. None until a call has come since paths have changed.
    cdef public CallKey key

    def __init__(self, identity not None):
        self.identity = identity
        self.name = identity.node.encode()
        self.account = NodeAccount()


@cython.final
@cython.freelist(256)
cdef class OpenCall:
    """One open call."""

    cdef readonly CallEndpoint caller
    cdef readonly Service service
    cdef readonly CallEndpoint endpoint  # the service's; the name may have a new owner
    cdef readonly bytes request_id, id
    cdef public bytes address
    cdef readonly double begun_s
    cdef readonly Py_ssize_t request_bytes
    cdef public Py_ssize_t partials, reply_bytes
    cdef public Py_ssize_t credit  # granted and unused
    # The deadline's clock: when it started, and how long the service had been unread by then.
    # While `is_out_of_credit` the clock is stopped, after it had run for `ran_s`.
    cdef double last_s, unread_before_s, ran_s
    cdef readonly bint is_out_of_credit
    cdef public double deadline_s
    cdef public Py_ssize_t free_partials, free_bytes  # of PARTIALs without credit
    # Of a call from another node: its identity, and its account. None for a call of this node.
    cdef public object origin
    cdef public NodeAccount account

    def __init__(
        self, CallEndpoint caller not None, Route route not None, bytes request_id not None,
        bytes call_id not None, Py_ssize_t request_bytes, double now_s,
    ):
        self.begin(caller, route, request_id, call_id, request_bytes, now_s)

    cdef void begin(
        self, CallEndpoint caller, Route route, bytes request_id, bytes call_id, Py_ssize_t request_bytes,
        double now_s,
    ):
        self.caller = caller
        self.service = route.service
        self.endpoint = route.service.endpoint
        self.request_id = request_id
        self.id = call_id
        self.address = route.address
        self.request_bytes = request_bytes
        self.begun_s = now_s
        self.deadline_s = caller.deadline_s
        self.free_partials = caller.table.free_partials
        self.free_bytes = caller.table.free_bytes
        self.restart_clock(now_s)

    cpdef void restart_clock(self, double now_s):
        """Start the deadline again. Called for each reply."""
        self.last_s = now_s
        self.unread_before_s = self.endpoint.unread_by(now_s)
        self.ran_s = 0

    cpdef void stop_clock(self, double now_s):
        """Stop the clock: the service has no credit and its caller is full."""
        if not self.is_out_of_credit:
            self.ran_s = now_s - self.last_s - self.endpoint.unread_by(now_s) + self.unread_before_s
            self.is_out_of_credit = True

    cpdef void resume_clock(self, double now_s):
        """Resume the clock: the service has credit again."""
        if self.is_out_of_credit:
            self.last_s = now_s - self.ran_s
            self.unread_before_s = self.endpoint.unread_by(now_s)
            self.is_out_of_credit = False

    cpdef double due(self, double now_s):
        """Return when the call is overdue.

        While the clock is stopped, returns the earliest possible time, as if the clock resumed
        now. A check at that time is therefore never too late.
        """
        cdef double unread_s = self.endpoint.unread_by(now_s) - self.unread_before_s
        cdef double due_s = self.last_s + self.deadline_s + unread_s
        if self.is_out_of_credit:
            due_s = now_s + self.deadline_s - self.ran_s
        if self.is_out_of_credit or self.endpoint.halted:
            return max(due_s, now_s + STANDING_S)
        return due_s

    cpdef Py_ssize_t free_left(self):
        """Return the number of PARTIALs that still need no credit."""
        if self.reply_bytes >= self.free_bytes or self.partials >= self.free_partials:
            return 0
        return self.free_partials - self.partials

    cpdef Py_ssize_t window(self, CallTable table):
        """Return how many PARTIALs may be in flight: about as many as fill an outbox."""
        cdef Py_ssize_t average = self.reply_bytes // max(1, self.partials)
        cdef Py_ssize_t fitting = table.window_bytes // max(1, average)
        return min(table.max_window, max(table.min_window, fitting))


cdef class CallEndpoint:
    """The call state of one connection, which calls, serves, or both.

    `full`: the outbox is over its high-water mark, so streams to it stop. `full_calls`: number
    of served calls with a full caller. A service without credits is not read while it is > 0.
    """

    cdef readonly dict calls  # made by it, by request id
    cdef readonly dict serving  # served by it, by the bus's call id
    cdef readonly dict services  # registered by it, by name
    cdef readonly dict routes  # resolved and allowed addresses
    cdef readonly dict awaiting_credit  # its calls whose service waits for credit
    cdef readonly dict waiters  # endpoints that are halted until this one has room
    cdef public uint64_t generation  # of `routes`
    cdef public bint full, credits, gone, halted, draining, pinged
    cdef public bint is_open  # greeted, and not skipping an oversized packet
    cdef public bint is_first  # no packet received yet: a hello is allowed
    cdef public bint is_link  # to another bus: its calls and replies have rules of their own
    cdef public bint is_link_up  # its handshake is done
    cdef public bint ipc
    # False: its packets are not those of gsb.proto, so the slow path reads and writes them.
    cdef readonly bint has_fast_path
    cdef Py_ssize_t head_size  # of a frame: the mark of ipc, and the length
    cdef public Py_ssize_t full_calls
    cdef public double deadline_s, unread_s, halted_since_s, heard_s
    cdef public bytes caller_name
    cdef CallTable table
    cdef object push  # the outbox's
    # Gathered output for the peer.
    cdef unsigned char* out
    cdef Py_ssize_t out_size, out_capacity
    # A large packet that is being assembled, and how many bytes of it were received.
    cdef bytes large
    cdef Py_ssize_t large_filled

    def __cinit__(self, *args, **kwargs):
        self.calls = {}
        self.serving = {}
        self.services = {}
        self.routes = {}
        self.awaiting_credit = {}
        self.waiters = {}
        self.is_first = True

    def __dealloc__(self):
        PyMem_Free(self.out)

    def attach_fast_path(
        self, CallTable table not None, push, bint ipc, Py_ssize_t length_size=LENGTH_SIZE
    ):
        """Set the shared table and the outbox. Must be called before `receive`.

        Frames whose length has another size than SP's hold packets of another protocol.
        """
        if not 0 < length_size <= LENGTH_SIZE:
            raise ValueError("length_size must be 1 to 8")
        self.table = table
        self.push = push
        self.ipc = ipc
        self.head_size = ipc + length_size
        self.has_fast_path = length_size == LENGTH_SIZE

    cdef double unread_by(self, double now_s) noexcept:
        """Return the total time for which the connection was halted."""
        return self.unread_s + (now_s - self.halted_since_s if self.halted else 0)

    # --- receiving

    def receive(self, buffer, Py_ssize_t start, Py_ssize_t end):
        """Handle received bytes (see transports/stream_session.py). Returns the bytes used."""
        cdef Py_buffer view
        cdef Py_ssize_t at
        cdef int slow = 0
        cdef double now_s = self.table.clock()
        self.heard_s = now_s
        self.pinged = False
        PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
        try:
            if not 0 <= start <= end <= view.len:
                raise ValueError("start and end must lie within the buffer")
            at = start
            while True:
                at += self.take(<const unsigned char*>view.buf + at, end - at, now_s)
                if self.halted or self.gone or not self.needs_more(
                    <const unsigned char*>view.buf + at, end - at
                ):
                    break
                # A session that ends cannot continue later.
                if slow >= MAX_SLOW and not self.draining:
                    self.yield_turn()
                    break
                slow += 1
                taken = self.receive_slow_path(buffer, at, end)
                if not taken:
                    break
                at += taken
        finally:
            PyBuffer_Release(&view)
        return end - start if self.gone else at - start

    def finish_large(self):
        """Offer a waiting large packet again. Returns False if it still has to wait."""
        if self.large is None or self.large_filled < PyBytes_GET_SIZE(self.large):
            return True
        return self.large_done(self.table.clock())

    cdef bint needs_more(self, const unsigned char* at, Py_ssize_t size) noexcept:
        """Return True if a complete frame is left for the slow path."""
        cdef uint64_t length
        if not size or self.large is not None:
            return False
        if not self.is_open or not self.head(at, size, &length):
            return not self.is_open or (self.ipc and at[0] != IPC_MARK)
        return length > <uint64_t>self.table.max_packet_bytes or (
            length <= <uint64_t>(size - self.head_size)
        )

    cdef bint head(self, const unsigned char* at, Py_ssize_t size, uint64_t* length) noexcept:
        """Read the length of a frame. Returns False if its head is incomplete or invalid."""
        cdef Py_ssize_t place
        if size < self.head_size or (self.ipc and at[0] != IPC_MARK):
            return False
        length[0] = 0
        for place in range(self.ipc, self.head_size):
            length[0] = length[0] << 8 | at[place]
        return True

    cdef Py_ssize_t take(self, const unsigned char* start, Py_ssize_t size, double now_s) except -1:
        """Handle frames while they are complete and the fast path takes them."""
        cdef const unsigned char* at = start
        cdef const unsigned char* end = start + size
        cdef Py_ssize_t head = self.head_size
        cdef uint64_t length
        if self.large is not None:
            if self.halted:
                return 0
            at += self.fill(at, size)
            if self.large_filled < PyBytes_GET_SIZE(self.large) or not self.large_done(now_s):
                return at - start
        while self.is_open and not self.halted and not self.gone:
            if not self.head(at, end - at, &length):
                break
            if length > <uint64_t>self.table.max_packet_bytes:
                break  # the slow path skips it
            if length > <uint64_t>(end - at - head):
                if length >= LARGE_BYTES:
                    at += head
                    self.large = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>length)
                    self.large_filled = 0
                    at += self.fill(at, end - at)
                break
            if not self.packet(at + head, <Py_ssize_t>length, now_s):
                break
            at += head + length
        # Once per read, so that many packets for a peer share one write.
        self.table.flush()
        return at - start

    cdef Py_ssize_t fill(self, const unsigned char* at, Py_ssize_t size) noexcept:
        cdef Py_ssize_t room = PyBytes_GET_SIZE(self.large) - self.large_filled
        if size > room:
            size = room
        memcpy(PyBytes_AS_STRING(self.large) + self.large_filled, at, size)
        self.large_filled += size
        return size

    cdef bint large_done(self, double now_s) except -1:
        """Handle a complete large packet. Returns False if it has to wait."""
        cdef bytes payload = self.large
        cdef bint done = self.packet(
            <const unsigned char*>PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload), now_s
        )
        self.table.flush()
        if not done:
            done = self.packet_slow_path(payload, 0, PyBytes_GET_SIZE(payload))
        if done or self.gone:
            self.large = None
        return done and not self.halted and not self.gone

    cdef bint packet(self, const unsigned char* at, Py_ssize_t size, double now_s) except -1:
        """Handle a packet. Returns False, with nothing changed, if it needs the slow path."""
        cdef Packet packet
        cdef Kind kind
        cdef bint done
        if not (self.has_fast_path and self.table.fast_path_enabled):
            return False
        kind = read_packet(at, size, &packet)
        if kind == SERVICE_CALL:
            done = self.service_call(&packet, now_s)
        elif kind == RELAY_CALL:
            done = self.relay_call(&packet, now_s)
        elif kind == CALL_REPLY:
            done = self.call_reply(&packet, now_s)
        else:
            return False
        if done:
            self.is_first = False
        return done

    cdef bint service_call(self, const Packet* packet, double now_s) except -1:
        cdef bytes address
        cdef void* entry
        cdef OpenCall call
        if self.is_link or not self.may_open(packet, now_s + self.deadline_s):
            return False
        address = packet.address.at[:packet.address.size]
        entry = <void*>PyDict_GetItem(self.routes, address)
        if entry is NULL or not self.may_use(<Route>entry, packet):
            return False
        # The slow path refuses a call that would be too large for its link.
        if (<Route>entry).service.endpoint.is_link and (
            packet.data.size + RELAY_BYTES > self.table.max_packet_bytes
        ):
            return False
        call = self.open_call(<Route>entry, packet, now_s)
        if call.endpoint.is_link:
            call.endpoint.write_signed(call, packet.data)
        else:
            call.endpoint.write_call(call, packet.data, self.caller_name)
        return True

    cdef bint relay_call(self, const Packet* packet, double now_s) except -1:
        """Take a call of another node, for a service of this one or for the next link."""
        if not self.is_link_up or not has_usual_form(packet):
            return False
        if not self.may_open(packet, now_s + packet.deadline_ms / 1000.0):
            return False
        if packet.target.at[:ID_BYTES] == self.table.node:
            return self.take_relayed(packet, now_s)
        return self.pass_on(packet, now_s)

    cdef bint take_relayed(self, const Packet* packet, double now_s) except -1:
        cdef CallingNode origin
        cdef Route route
        cdef OpenCall call
        cdef void* entry
        cdef bytes address = packet.address.at[:packet.address.size]
        entry = <void*>PyDict_GetItem(self.table.calling_nodes, packet.origin.at[:ID_BYTES])
        if entry is NULL or (<CallingNode>entry).key is None:
            return False
        origin = <CallingNode>entry
        entry = <void*>PyDict_GetItem(self.routes, origin.name + address)
        if entry is NULL or not self.may_use(<Route>entry, packet):
            return False
        route = <Route>entry
        # Last, because a counter is accepted once: the slow path could not take the call again.
        if not origin.key.check_call(packet):
            return False
        call = self.open_call(route, packet, now_s)
        set_terms(call, packet)
        call.origin, call.account = origin.identity, origin.account
        call.endpoint.write_call(call, packet.data, origin.name)
        return True

    cdef bint pass_on(self, const Packet* packet, double now_s) except -1:
        cdef OpenCall call
        cdef Packet onward
        cdef void* entry = <void*>PyDict_GetItem(self.routes, packet.target.at[:ID_BYTES])
        # The slow path finds the way, and answers calls that have none.
        if entry is NULL or packet.hops >= MAX_HOPS or not self.may_use(<Route>entry, packet):
            return False
        call = self.open_call(<Route>entry, packet, now_s)
        set_terms(call, packet)
        call.address = packet.address.at[:packet.address.size]
        onward = packet[0]
        onward.request_id = slice_of(call.id)
        onward.hops += 1
        call.endpoint.write_relay(&onward)
        return True

    cdef bint may_open(self, const Packet* packet, double due_s) except -1:
        """Return False if the slow path must refuse a call, or set a timer for it."""
        # After a change of names, rules or paths the slow path resolves the addresses again.
        if self.draining or self.generation != self.table.generation:
            return False
        if not 0 < packet.request_id.size <= MAX_ID or PyDict_Size(self.calls) >= self.table.max_open_calls:
            return False
        # An earlier deadline than all others needs a new timer.
        return due_s >= self.table.next_due_s

    cdef bint may_use(self, Route route, const Packet* packet) except -1:
        """Return False if the slow path must decide about this call to a service."""
        cdef CallEndpoint endpoint = route.service.endpoint
        # The slow path makes the caller or the service wait (back_pressure.py).
        if endpoint.full or (self.full and not endpoint.credits) or not endpoint.has_fast_path:
            return False
        return PyDict_GetItem(self.calls, packet.request_id.at[:packet.request_id.size]) is NULL

    cdef OpenCall open_call(self, Route route, const Packet* packet, double now_s):
        """Add a call to both tables."""
        cdef CallTable table = self.table
        cdef bytes request_id = packet.request_id.at[:packet.request_id.size]
        cdef OpenCall call = OpenCall.__new__(OpenCall)
        table.opened += 1
        call.begin(self, route, request_id, hexadecimal(table.opened), packet.data.size, now_s)
        PyDict_SetItem(self.calls, request_id, call)
        PyDict_SetItem(call.endpoint.serving, call.id, call)
        route.service.calls += 1
        route.service.pending += 1
        return call

    cdef bint call_reply(self, const Packet* packet, double now_s) except -1:
        cdef CallTable table = self.table
        cdef OpenCall call
        cdef void* entry
        cdef bytes call_id
        if packet.type > PARTIAL:
            return False
        call_id = packet.request_id.at[:packet.request_id.size]
        entry = <void*>PyDict_GetItem(self.serving, call_id)
        if entry is NULL:
            return False
        call = <OpenCall>entry
        # The slow path decides whether the reply has to wait (back_pressure.py).
        if call.caller.full or not call.caller.has_fast_path:
            return False
        if packet.type == PARTIAL:
            return self.partial(call, packet, now_s)
        # Other codes are counted one by one, by the slow path.
        if packet.code and packet.code != FAILURE:
            return False
        PyDict_DelItem(call.caller.calls, call.request_id)
        PyDict_DelItem(self.serving, call_id)
        call.service.pending -= 1
        call.reply_bytes += packet.data.size
        if table.log is not None:
            table.log.append((call, packet.code, now_s))
        if call.account is not None:
            call.account.add(call.request_bytes, call.reply_bytes, packet.code != 0)
        if packet.code:
            table.failed += 1
        else:
            table.answered += 1
        call.caller.write_reply(call.request_id, packet)
        return True

    cdef bint partial(self, OpenCall call, const Packet* packet, double now_s) except -1:
        cdef CallTable table = self.table
        cdef bint is_relayed = call.caller.is_link
        if (self.credits or is_relayed) and not call.free_left():
            if call.credit <= 0:
                return False
            call.credit -= 1
        call.restart_clock(now_s)
        call.partials += 1
        call.reply_bytes += packet.data.size
        call.caller.write_reply(call.request_id, packet)
        if is_relayed:  # its credit comes from its own caller
            if not call.free_left() and call.credit <= 0:
                call.stop_clock(now_s)
            return True
        if not self.credits:
            return True
        if call.free_left() + call.credit <= call.window(table) // 2:
            # Gathered output goes first, because `grant` pushes to the service directly.
            table.flush()
            table.grant(call)
        return True

    # --- writing for the peer

    cdef int write_signed(self, OpenCall call, Slice data) except -1:
        """Write a call of this node for another one, over this link."""
        cdef Packet packet
        cdef bytes mac
        packet.request_id, packet.address, packet.data = slice_of(call.id), slice_of(call.address), data
        packet.hops = 1
        packet.deadline_ms = <uint64_t>max(1, call.deadline_s * 1000)
        packet.free_partials, packet.free_bytes = call.free_partials, call.free_bytes
        mac = (<NodeService?>call.service).key.sign_call(&packet)
        return self.write_relay(&packet)

    cdef int write_relay(self, const Packet* packet) except -1:
        cdef Py_ssize_t inner = relay_size(packet)
        cdef Py_ssize_t size = frame_size(self.ipc, inner) + 1
        cdef bytes alone = self.room(size)
        put_relay(self.place(alone), self.ipc, inner, packet)
        return self.written(alone, size)

    cdef int write_call(self, OpenCall call, Slice data, bytes caller_name) except -1:
        cdef Slice request_id = slice_of(call.id)
        cdef Slice caller = slice_of(caller_name)
        cdef Slice address = slice_of(call.address)
        cdef Py_ssize_t inner = (
            field_size(request_id) + field_size(data) + field_size(caller) + field_size(address)
        )
        cdef Py_ssize_t size = frame_size(self.ipc, inner) + 1
        cdef bytes alone = self.room(size)
        cdef unsigned char* out = self.place(alone)
        out = put_head(out, self.ipc, CALL_REQUEST, inner)
        out = put_field(put_field(out, 1, request_id), 2, data)
        put_field(put_field(out, 3, caller), 4, address)
        return self.written(alone, size)

    cdef int write_reply(self, bytes request_id, const Packet* packet) except -1:
        cdef Slice name = slice_of(request_id)
        cdef Py_ssize_t inner = reply_size(name, packet.code, packet.type, packet.data)
        cdef Py_ssize_t size = frame_size(self.ipc, inner)
        cdef bytes alone = self.room(size)
        put_reply(
            self.place(alone), self.ipc, inner, name, packet.code, packet.type, packet.data
        )
        return self.written(alone, size)

    cdef bytes room(self, Py_ssize_t size):
        """Make room in the gathered output. Returns a separate object for a large frame."""
        cdef void* grown
        cdef Py_ssize_t capacity
        if size >= GATHER_BYTES:
            self.flush()  # earlier frames go first
            return PyBytes_FromStringAndSize(NULL, size)
        if self.out_size + size > self.out_capacity:
            capacity = 2 * (self.out_size + size)
            grown = PyMem_Realloc(self.out, capacity)
            if grown is NULL:
                raise MemoryError
            self.out = <unsigned char*>grown
            self.out_capacity = capacity
        return None

    cdef unsigned char* place(self, bytes alone) noexcept:
        if alone is not None:
            return <unsigned char*>PyBytes_AS_STRING(alone)
        return self.out + self.out_size

    cdef int written(self, bytes alone, Py_ssize_t size) except -1:
        if alone is not None:
            self.push(alone)
            return 0
        if not self.out_size:
            self.table.touched.append(self)
        self.out_size += size
        if self.out_size >= GATHER_BYTES:
            self.flush()
        return 0

    cdef int flush(self) except -1:
        cdef bytes data
        if self.out_size:
            data = PyBytes_FromStringAndSize(<char*>self.out, self.out_size)
            self.out_size = 0
            self.push(data)
        return 0


cdef bint has_usual_form(const Packet* call) noexcept:
    """Return False if the slow path must check the fields of a call between nodes."""
    return (
        call.origin.size == ID_BYTES and call.target.size == ID_BYTES
        and call.address.size <= MAX_ADDRESS
        and 0 < call.hops <= MAX_HOPS and 0 < call.deadline_ms <= MAX_UINT32
        and 0 < call.free_partials <= MAX_FREE_PARTIALS and 0 < call.free_bytes <= MAX_FREE_BYTES
    )


cdef void set_terms(OpenCall call, const Packet* packet) noexcept:
    """Apply the deadline and the free replies that a call brings along."""
    call.deadline_s = packet.deadline_ms / 1000.0
    call.free_partials = <Py_ssize_t>packet.free_partials
    call.free_bytes = <Py_ssize_t>packet.free_bytes


def overdue(endpoints, double now_s):
    """Return the calls over their deadline, and when the next one is due (None if none)."""
    cdef CallEndpoint endpoint
    cdef OpenCall call
    cdef double due_s, nearest_s = 0
    cdef list late = []
    cdef bint has_next = False
    for endpoint in endpoints:
        for call in endpoint.calls.values():
            due_s = call.due(now_s)
            if due_s <= now_s:
                late.append(call)
            elif not has_next or due_s < nearest_s:
                has_next = True
                nearest_s = due_s
    return late, nearest_s if has_next else None


cdef bytes hexadecimal(uint64_t number):
    """Return `b"%x" % number`."""
    cdef char[HEX_DIGITS] digits
    cdef int at = HEX_DIGITS
    while True:
        at -= 1
        digits[at] = b"0123456789abcdef"[number & 15]
        number >>= 4
        if not number:
            break
    return PyBytes_FromStringAndSize(digits + at, HEX_DIGITS - at)
