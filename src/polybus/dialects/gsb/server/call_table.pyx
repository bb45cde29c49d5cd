"""Open calls, and the rules of calls: open, forward, reply, end. Each rule has its one text here.

A call is in two tables while it is open: its caller's, by the id that the caller chose, and its
service's, by an id of the bus.

A connection's packets are read from the received bytes and written for the other connection,
many per write. The slow path is in Python (call_router.py): it resolves names and rules, refuses,
makes connections wait, grants credit and sets timers. What it decides, the rules here carry out.
A packet in a form that only protobuf should judge is decoded by it, written again in the usual
form, and then handled as any other.

A packet that is larger than one read is assembled here, in a buffer of its own size, so that
it is copied once and not with every read.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_DelItem, PyDict_GetItem, PyDict_SetItem, PyDict_Size
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy, memset

from polybus.dialects.gsb.gsb_packets cimport CALL_REPLY, CALL_REQUEST, ID_BYTES, MAX_ADDRESS, MAX_FREE_BYTES, MAX_FREE_PARTIALS, NOT_HOT, RELAY_BYTES, RELAY_CALL, SERVICE_CALL, Kind, Packet, Slice, field_size, frame_size, put_field, put_head, put_relay, put_reply, read_canonical, read_packet, relay_size, reply_size, slice_of
from polybus.dialects.gsb.network.call_key cimport CallKey

from polybus.dialects.gsb.codec import BAD_RELAY, BAD_REPLY_TYPE, WRONG_DIRECTION
from polybus.dialects.gsb.sp import BAD_FRAME
from polybus.errors import BadFrame

cdef extern from "Python.h":
    int PyBUF_READ

cdef enum:
    LENGTH_SIZE = 8
    IPC_MARK = 1
    MAX_REQUEST_ID_BYTES = 255  # an id is a key of a table and is sent back with each reply
    PARTIAL = 1
    FAILURE = 500
    # A frame of this size is pushed on its own. Gathered output is flushed when it reaches it.
    GATHER_BYTES = 64 * 1024
    # Shorter packets stay in the transport's buffer until they are complete.
    LARGE_BYTES = 64 * 1024
    HEX_DIGITS = 16
    CODES = 600  # all codes are below it
    # Packets per read that need the slow path, before the connection yields: a few milliseconds.
    MAX_SLOW = 128

# A call whose clock is stopped is never overdue: its due time is at least this far ahead.
cdef double STANDING_S = 0.01


cpdef enum Refusal:
    """Why a call is refused whatever its address. The slow path has the texts."""

    NOT_REFUSED = 0
    BAD_REQUEST_ID
    ID_IN_USE
    TOO_MANY_CALLS
    UNANNOUNCED_RUN  # the announcement of one of the two nodes has not arrived
    FORGED_CALL
    TOO_MANY_HOPS
    FULL_WAY  # a link does not wait for a full service


@cython.final
cdef class CallTable:
    """Settings and counters shared by all GSB connections of a bus."""

    cdef public uint64_t generation  # of names and rules; routes of an older generation are void
    cdef public uint64_t opened  # calls so far; the newest call id
    cdef uint64_t[CODES] counts  # ended calls, by code
    cdef bint[CODES] is_code
    cdef public double next_due_s  # when the deadline timer fires; a later deadline needs no new timer
    # Ended calls for the call log: (call, code, now_s). None if calls are not logged.
    cdef public list log
    cdef readonly Py_ssize_t max_packet_bytes, max_open_calls, free_partials, free_bytes
    cdef readonly Py_ssize_t window_bytes, min_window, max_window, max_hops
    # Over it, replies wait even if they are free or have credit: the outbox must not overflow.
    cdef readonly Py_ssize_t hard_limit_bytes
    # The network: the id of this node, and the nodes that call it, by their ids (20 bytes).
    cdef public bytes node
    cdef readonly dict calling_nodes
    cdef object clock, router
    cdef list touched  # endpoints with unflushed output of this `receive`

    def __init__(
        self, clock, router, codes, *, Py_ssize_t max_packet_bytes, Py_ssize_t max_open_calls,
        Py_ssize_t free_partials, Py_ssize_t free_bytes, Py_ssize_t window_bytes,
        Py_ssize_t min_window, Py_ssize_t max_window, Py_ssize_t hard_limit_bytes,
        Py_ssize_t max_hops,
    ):
        """`router` is the slow path. Ended calls are counted by one of `codes` each."""
        self.clock = clock
        self.router = router
        for code in codes:
            self.is_code[code] = True
        self.max_packet_bytes = max_packet_bytes
        self.max_open_calls = max_open_calls
        self.free_partials = free_partials
        self.free_bytes = free_bytes
        self.window_bytes = window_bytes
        self.min_window = min_window
        self.max_window = max_window
        self.hard_limit_bytes = hard_limit_bytes
        self.max_hops = max_hops
        self.generation = 1
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

    def end(self, OpenCall call not None, int64_t code):
        """End a call whose FULL the slow path sends. Returns False if it has ended before."""
        if PyDict_GetItem(call.caller.calls, call.request_id) != <PyObject*>call:
            return False
        self.end_call(call, code, self.clock())
        return True

    cdef int end_call(self, OpenCall call, int64_t code, double now_s) except -1:
        """Remove a call from both tables, count and log it."""
        PyDict_DelItem(call.caller.calls, call.request_id)
        PyDict_DelItem(call.endpoint.serving, call.id)
        call.service.pending -= 1
        self.count_end(code)
        if call.caller.full or call.endpoint.halted:
            self.router.pressure.on_call_end(call)
        if call.account is not None:
            call.account.add(call.request_bytes, call.reply_bytes, code != 0)
        if self.log is not None:
            self.log.append((call, code, now_s))
        return 0

    cpdef void count_end(self, int64_t code) noexcept:
        """Count an ended call, or one that ends without being opened."""
        if not 0 <= code < CODES or not self.is_code[code]:
            code = FAILURE  # a code of the service's own
        self.counts[code] += 1

    @property
    def ended(self):
        """The number of ended calls, by code."""
        return {code: self.counts[code] for code in range(CODES) if self.counts[code]}


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
    # The key of its announced run. None if that is invalid, and until a call has come since
    # paths have changed.
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

    cdef void begin(
        self, CallEndpoint caller, Route route, bytes request_id, bytes call_id, Py_ssize_t request_bytes,
        double deadline_s, double now_s,
    ):
        self.caller = caller
        self.service = route.service
        self.endpoint = route.service.endpoint
        self.request_id = request_id
        self.id = call_id
        self.address = route.address
        self.request_bytes = request_bytes
        self.begun_s = now_s
        self.deadline_s = deadline_s
        self.free_partials = caller.table.free_partials
        self.free_bytes = caller.table.free_bytes
        self.restart_clock(now_s)

    cdef void restart_clock(self, double now_s) noexcept:
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

    cdef double due(self, double now_s):
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

    cpdef Py_ssize_t free_left(self) noexcept:
        """Return the number of PARTIALs that still need no credit."""
        if self.reply_bytes >= self.free_bytes or self.partials >= self.free_partials:
            return 0
        return self.free_partials - self.partials

    cdef bint has_credit(self) noexcept:
        """Return whether the service may send a PARTIAL."""
        return self.credit > 0 or self.free_left() > 0

    cpdef Py_ssize_t missing_credit(self):
        """Return the credit that refills the call's window; 0 while less than half is used.

        A window is as many PARTIALs as about fill an outbox.
        """
        cdef CallTable table = self.caller.table
        cdef Py_ssize_t average = self.reply_bytes // max(1, self.partials)
        cdef Py_ssize_t fitting = table.window_bytes // max(1, average)
        cdef Py_ssize_t window = min(table.max_window, max(table.min_window, fitting))
        cdef Py_ssize_t left = self.free_left() + self.credit
        return 0 if left > window // 2 else window - left

    cpdef bint can_forward(self, bint is_partial) except -1:
        """Return True if a reply may go to its caller now.

        Replies of a draining service always may, since it cannot wait.
        """
        if self.endpoint.draining:
            return True
        if is_partial and self.caller.is_link and not self.has_credit():
            return False
        if not self.caller.full:
            return True
        if is_partial and not (self.endpoint.credits and self.has_credit()):
            return False
        return self.caller.takes_more()


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
    # False: its packets are not those of gsb.proto, so its session reads and writes them.
    cdef bint is_native
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
    cdef int slow  # packets of this read that needed the slow path

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

    def attach(
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
        self.is_native = length_size == LENGTH_SIZE

    cdef double unread_by(self, double now_s) noexcept:
        """Return the total time for which the connection was halted."""
        return self.unread_s + (now_s - self.halted_since_s if self.halted else 0)

    def has_room(self):
        """Return whether the connection takes packets that cannot wait."""
        return self.takes_more()

    cdef bint takes_more(self) except -1:
        if not self.full:
            return True
        self.flush()
        return self.outbox_bytes <= self.table.hard_limit_bytes

    # --- frames

    def receive(self, buffer, Py_ssize_t start, Py_ssize_t end):
        """Handle received bytes (see transports/stream_session.py). Returns the bytes used."""
        cdef Py_buffer view
        cdef Py_ssize_t used = 0
        cdef double now_s = self.table.clock()
        self.heard_s = now_s
        self.pinged = False
        self.slow = 0
        PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
        try:
            if not 0 <= start <= end <= view.len:
                raise ValueError("start and end must lie within the buffer")
            used = self.take(<const unsigned char*>view.buf + start, end - start, now_s)
        except BadFrame as error:
            self.close_bad_frame(error)
        finally:
            PyBuffer_Release(&view)
        return end - start if self.gone else used

    def finish_large(self):
        """Offer a waiting large packet again. Returns False if it still has to wait."""
        if self.large is None or self.large_filled < PyBytes_GET_SIZE(self.large):
            return True
        try:
            return self.large_done(self.table.clock())
        except BadFrame as error:
            self.close_bad_frame(error)
            return False

    cdef int close_bad_frame(self, error) except -1:
        self.table.flush()  # the packets before it were handled
        self.close(error.reason)
        return 0

    cdef Py_ssize_t take(self, const unsigned char* start, Py_ssize_t size, double now_s) except -1:
        """Handle frames while they are complete and none has to wait. Returns the bytes used."""
        cdef const unsigned char* at = start
        cdef const unsigned char* end = start + size
        cdef Py_ssize_t head = self.head_size
        cdef Py_ssize_t used
        cdef uint64_t length
        while at < end and not self.halted and not self.gone:
            # A session that ends cannot continue later.
            if self.slow >= MAX_SLOW and not self.draining:
                self.yield_turn()
                break
            if self.large is not None:
                at += self.fill(at, end - at)
                if self.large_filled < PyBytes_GET_SIZE(self.large) or not self.large_done(now_s):
                    break
                continue
            if not self.is_open:
                self.slow_path()
                used = self.receive_unframed(PyMemoryView_FromMemory(<char*>at, end - at, PyBUF_READ))
                if not used:
                    break
                at += used
                continue
            if self.ipc and at[0] != IPC_MARK:
                raise BadFrame(BAD_FRAME)
            if end - at < head:
                break
            length = self.length_of(at)
            if length > <uint64_t>self.table.max_packet_bytes:
                self.slow_path()
                self.begin_skipping(length)
                at += head
                continue
            if length <= <uint64_t>(end - at - head):
                if not self.packet(at + head, <Py_ssize_t>length, now_s):
                    break
                at += head + length
                continue
            if length < LARGE_BYTES:
                break
            self.large = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>length)
            self.large_filled = 0
            at += head
        # Once per read, so that many packets for a peer share one write.
        self.table.flush()
        return at - start

    cdef uint64_t length_of(self, const unsigned char* at) noexcept:
        """Return the length of the packet in a frame."""
        cdef uint64_t length = 0
        cdef Py_ssize_t place
        for place in range(self.ipc, self.head_size):
            length = length << 8 | at[place]
        return length

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
        if done or self.gone:
            self.large = None
        return done and not self.halted and not self.gone

    cdef object slow_path(self):
        """Return the router. It may send packets itself, so gathered output goes first."""
        self.slow += 1
        self.table.flush()
        return self.table.router

    # --- packets

    cdef bint packet(self, const unsigned char* at, Py_ssize_t size, double now_s) except -1:
        """Handle a packet. Returns False if it has to wait."""
        cdef Packet packet
        cdef Kind kind = NOT_HOT
        cdef bint done
        if self.is_native and (self.is_link_up or not self.is_link):
            kind = read_packet(at, size, &packet)
        if kind == NOT_HOT:
            self.slow_path()
            done = self.receive_packet(at[:size])
        else:
            done = self.take_packet(kind, &packet, now_s)
        if done:
            self.is_first = False
        return done

    def take_canonical(self, bytes payload not None):
        """Handle a call or reply as protobuf has written it. Returns False if it has to wait."""
        cdef Packet packet
        cdef Kind kind = read_canonical(
            <const unsigned char*>PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload), &packet
        )
        return self.take_packet(kind, &packet, self.table.clock())

    cdef bint take_packet(self, Kind kind, const Packet* packet, double now_s) except -1:
        if kind == CALL_REPLY:
            return self.take_reply(packet, now_s)
        if kind == SERVICE_CALL and not self.is_link:
            return self.take_call(packet, now_s)
        if kind == RELAY_CALL and self.is_link:
            return self.take_relayed(packet, now_s)
        raise BadFrame(WRONG_DIRECTION)

    # --- calls

    def call(self, bytes address not None, bytes request_id not None, bytes data not None):
        """Open a call. Returns False if it has to wait for a full service."""
        cdef Packet packet
        memset(&packet, 0, sizeof(Packet))
        packet.address, packet.request_id = slice_of(address), slice_of(request_id)
        packet.data = slice_of(data)
        return self.take_call(&packet, self.table.clock())

    cdef bint take_call(self, const Packet* packet, double now_s) except -1:
        cdef bytes request_id, address
        cdef Refusal refusal
        cdef Route route
        cdef OpenCall call
        if self.draining:
            return True  # the caller is gone and could not read the reply
        request_id = packet.request_id.at[:packet.request_id.size]
        address = packet.address.at[:packet.address.size]
        # Refusals by request id and limit come before those by address.
        refusal = self.check_request(request_id)
        if refusal != NOT_REFUSED:
            return self.refuse(refusal, request_id, packet, None)
        route = self.cached_route(address)
        if route is None:
            data = packet.data.at[:packet.data.size]
            route = self.slow_path().resolve(self, address, request_id, data)
            if route is None:
                return True
        if route.service.endpoint.full:
            self.slow_path().pressure.wait(self, route.service.endpoint)
            return False
        call = self.open(route, request_id, packet.data.size, self.deadline_s, now_s)
        self.send_opened(call, packet.data)
        return True

    def open_call(
        self, Route route not None, bytes request_id not None, bytes data not None, double deadline_s
    ):
        """Open a call of the bus itself, whose route is known."""
        cdef OpenCall call = self.open(
            route, request_id, PyBytes_GET_SIZE(data), deadline_s, self.table.clock()
        )
        self.send_opened(call, slice_of(data))
        self.table.flush()

    cdef Refusal check_request(self, bytes request_id) noexcept:
        """Return why the endpoint must not open a call, whatever its address."""
        if not 0 < PyBytes_GET_SIZE(request_id) <= MAX_REQUEST_ID_BYTES:
            return BAD_REQUEST_ID
        if PyDict_GetItem(self.calls, request_id) is not NULL:
            return ID_IN_USE
        if PyDict_Size(self.calls) >= self.table.max_open_calls:
            return TOO_MANY_CALLS
        return NOT_REFUSED

    cdef bint refuse(
        self, Refusal refusal, bytes request_id, const Packet* packet, CallingNode origin
    ) except -1:
        cdef bytes address = packet.address.at[:packet.address.size]
        self.slow_path().refuse_call(
            self, refusal, request_id, address, packet.data.size, origin
        )
        return True

    cdef Route cached_route(self, bytes key):
        """Return the route of an address that was resolved since names and rules changed."""
        cdef void* entry
        if self.generation != self.table.generation:
            self.routes.clear()
            self.generation = self.table.generation
        entry = <void*>PyDict_GetItem(self.routes, key)
        return None if entry is NULL else <Route>entry

    cdef OpenCall open(
        self, Route route, bytes request_id, Py_ssize_t request_bytes, double deadline_s, double now_s
    ):
        """Add a call to both tables."""
        cdef CallTable table = self.table
        cdef OpenCall call = OpenCall.__new__(OpenCall)
        table.opened += 1
        call.begin(self, route, request_id, hexadecimal(table.opened), request_bytes, deadline_s, now_s)
        PyDict_SetItem(self.calls, request_id, call)
        PyDict_SetItem(call.endpoint.serving, call.id, call)
        route.service.calls += 1
        route.service.pending += 1
        if self.full:
            table.router.pressure.halt_service(call)
        if now_s + deadline_s < table.next_due_s:
            table.router.deadlines.set_timer(now_s + deadline_s)
        return call

    cdef int send_opened(self, OpenCall call, Slice data) except -1:
        """Send a call of this connection to its service, or over the link to its node."""
        if not call.endpoint.is_link:
            return call.endpoint.write_call(call, data, self.caller_name)
        if data.size + RELAY_BYTES > self.table.max_packet_bytes:
            self.slow_path().fail_too_large(call)
            return 0
        return call.endpoint.write_signed(call, data)

    # --- calls between nodes

    cdef bint take_relayed(self, const Packet* packet, double now_s) except -1:
        """Take a call of another node, for a service of this one or for the next link."""
        cdef bytes request_id
        cdef Refusal refusal
        if not has_valid_form(packet, self.table.max_hops):
            raise BadFrame(BAD_RELAY)
        if self.draining:
            return True  # the link is gone and could not carry the reply
        request_id = packet.request_id.at[:packet.request_id.size]
        refusal = self.check_request(request_id)
        if refusal != NOT_REFUSED:
            return self.refuse(refusal, request_id, packet, None)
        if packet.target.at[:ID_BYTES] == self.table.node:
            return self.serve_relayed(packet, request_id, now_s)
        return self.pass_on(packet, request_id, now_s)

    cdef bint serve_relayed(self, const Packet* packet, bytes request_id, double now_s) except -1:
        cdef bytes address = packet.address.at[:packet.address.size]
        cdef CallingNode origin = self.origin_of(packet)
        cdef Route route
        cdef OpenCall call
        if origin is None or (origin.key is not None and not origin.key.is_for(packet)):
            return self.refuse(UNANNOUNCED_RUN, request_id, packet, None)
        if origin.key is None or not origin.key.check_call(packet):
            return self.refuse(FORGED_CALL, request_id, packet, None)
        route = self.cached_route(origin.name + address)
        if route is None:
            data = packet.data.at[:packet.data.size]
            route = self.slow_path().network.resolve_relayed(
                self, origin, address, request_id, data
            )
            if route is None:
                return True
        if not route.service.endpoint.takes_more():
            return self.refuse(FULL_WAY, request_id, packet, origin)
        call = self.open_relayed(route, packet, request_id, now_s)
        call.origin, call.account = origin.identity, origin.account
        call.endpoint.write_call(call, packet.data, origin.name)
        return True

    cdef CallingNode origin_of(self, const Packet* packet):
        """Return the node that calls, with the key of its announced run. None if it has no run.

        Without a valid key in its announcement it has none here.
        """
        cdef bytes node = packet.origin.at[:ID_BYTES]
        cdef void* entry = <void*>PyDict_GetItem(self.table.calling_nodes, node)
        if entry is not NULL and (<CallingNode>entry).key is not None:
            return <CallingNode>entry
        return self.slow_path().network.find_calling_node(node)

    cdef bint pass_on(self, const Packet* packet, bytes request_id, double now_s) except -1:
        cdef bytes target = packet.target.at[:ID_BYTES]
        cdef Route route
        cdef OpenCall call
        cdef Packet onward
        if packet.hops >= <uint64_t>self.table.max_hops:
            return self.refuse(TOO_MANY_HOPS, request_id, packet, None)
        route = self.cached_route(target)
        if route is None:
            address = packet.address.at[:packet.address.size]
            route = self.slow_path().network.resolve_target(
                self, target, address, request_id, packet.data.size
            )
            if route is None:
                return True
        if not route.service.endpoint.takes_more():
            return self.refuse(FULL_WAY, request_id, packet, None)
        call = self.open_relayed(route, packet, request_id, now_s)
        call.address = packet.address.at[:packet.address.size]
        onward = packet[0]
        onward.request_id = slice_of(call.id)
        onward.hops += 1
        call.endpoint.write_relay(&onward)
        return True

    cdef OpenCall open_relayed(self, Route route, const Packet* packet, bytes request_id, double now_s):
        """Open a call with the deadline and the free replies that it brings along."""
        cdef double deadline_s = packet.deadline_ms / 1000.0
        cdef OpenCall call = self.open(route, request_id, packet.data.size, deadline_s, now_s)
        call.free_partials = <Py_ssize_t>packet.free_partials
        call.free_bytes = <Py_ssize_t>packet.free_bytes
        return call

    # --- replies

    def reply(self, bytes call_id not None, int64_t code, int64_t kind, bytes data not None):
        """Forward a reply. Returns False if it has to wait for a full caller."""
        cdef Packet packet
        cdef bint done
        memset(&packet, 0, sizeof(Packet))
        packet.request_id, packet.data = slice_of(call_id), slice_of(data)
        packet.code, packet.type = <uint64_t>code, <uint64_t>kind
        done = self.take_reply(&packet, self.table.clock())
        self.table.flush()
        return done

    cdef bint take_reply(self, const Packet* packet, double now_s) except -1:
        cdef bytes call_id
        cdef OpenCall call
        cdef void* entry
        if packet.type > PARTIAL:
            raise BadFrame(BAD_REPLY_TYPE)
        call_id = packet.request_id.at[:packet.request_id.size]
        entry = <void*>PyDict_GetItem(self.serving, call_id)
        if entry is NULL:
            self.slow_path().on_unknown_reply()
            return True
        call = <OpenCall>entry
        if not call.can_forward(packet.type == PARTIAL):
            return self.slow_path().on_blocked_reply(call, packet.type == PARTIAL)
        if packet.type == PARTIAL:
            self.forward_partial(call, packet, now_s)
            return True
        call.reply_bytes += packet.data.size
        # Ended first, so that a caller that this reply fills does not halt the service.
        self.table.end_call(call, <int64_t>packet.code, now_s)
        call.caller.write_reply(call.request_id, packet)
        return True

    cdef int forward_partial(self, OpenCall call, const Packet* packet, double now_s) except -1:
        call.restart_clock(now_s)
        if call.credit and not call.free_left():
            call.credit -= 1
        call.partials += 1
        call.reply_bytes += packet.data.size
        call.caller.write_reply(call.request_id, packet)
        if call.caller.is_link:  # its credit comes from its own caller
            if not call.has_credit():
                call.stop_clock(now_s)
        elif self.credits and call.missing_credit():
            # Gathered output goes first: it may fill the caller, and a full one grants none.
            self.table.flush()
            self.table.router.pressure.grant(call)
        return 0

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
        """Write a call for its service, which this connection has registered."""
        cdef Slice request_id = slice_of(call.id)
        cdef Slice caller = slice_of(caller_name)
        cdef Slice address = slice_of(call.address)
        cdef Py_ssize_t inner = (
            field_size(request_id) + field_size(data) + field_size(caller) + field_size(address)
        )
        cdef Py_ssize_t size = frame_size(self.ipc, inner) + 1
        cdef bytes alone
        cdef unsigned char* out
        if not self.is_native:
            self.send_call(call, data.at[:data.size], caller_name)
            return 0
        alone = self.room(size)
        out = put_head(self.place(alone), self.ipc, CALL_REQUEST, inner)
        out = put_field(put_field(out, 1, request_id), 2, data)
        put_field(put_field(out, 3, caller), 4, address)
        return self.written(alone, size)

    cdef int write_reply(self, bytes request_id, const Packet* packet) except -1:
        """Write a reply to a call of this connection."""
        cdef Slice name = slice_of(request_id)
        cdef Py_ssize_t inner = reply_size(name, packet.code, packet.type, packet.data)
        cdef Py_ssize_t size = frame_size(self.ipc, inner)
        cdef bytes alone
        if not self.is_native:
            data = packet.data.at[:packet.data.size]
            self.send_reply(request_id, <int64_t>packet.code, <int64_t>packet.type, data)
            return 0
        alone = self.room(size)
        put_reply(
            self.place(alone), self.ipc, inner, name, packet.code, packet.type, packet.data
        )
        return self.written(alone, size)

    def send_reply(self, bytes request_id not None, int64_t code, int64_t kind, bytes data not None):
        """Send a reply of the bus itself."""
        cdef Packet packet
        packet.code, packet.type, packet.data = <uint64_t>code, <uint64_t>kind, slice_of(data)
        self.write_reply(request_id, &packet)
        self.flush()

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


cdef bint has_valid_form(const Packet* call, Py_ssize_t max_hops) noexcept:
    """Return whether the fields of a call between nodes are in their ranges."""
    return (
        call.origin.size == ID_BYTES and call.target.size == ID_BYTES
        and call.address.size <= MAX_ADDRESS
        and 0 < call.hops <= <uint64_t>max_hops and call.deadline_ms > 0
        and 0 < call.free_partials <= MAX_FREE_PARTIALS and 0 < call.free_bytes <= MAX_FREE_BYTES
    )


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
