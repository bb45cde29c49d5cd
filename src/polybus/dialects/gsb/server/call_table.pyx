"""What calls are made of: the state that bus/calls works on, and its short path.

A call is in two tables while it is open: its caller's, by the id that the caller chose,
and its service's, by an id of the bus's own.

Most packets are calls and replies with nothing in their way. Those are carried out here:
read from the received bytes, looked up, and written for the other end, many to a write.
Everything else goes to `receive_slow_path`, the long way in dialects/gsb/server/session.py: other
packets, whatever is refused, whoever is full, whatever must set a timer or be logged. Both
ways change the same tables by the same rules; tests run every conversation on both.

A packet that does not fit into what is received at once is put together here, in a buffer
of its own size, so that it is copied once and not with every read.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_DelItem, PyDict_GetItem, PyDict_SetItem, PyDict_Size
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from polybus.dialects.gsb.server.gsb_packets cimport CALL_REPLY, NOT_HOT, SERVICE_CALL, Kind, Packet, Slice, field_size, frame_size, put_field, put_head, put_reply, read_packet, reply_size

cdef enum:
    LENGTH_SIZE = 8
    IPC_MARK = 1
    CALL_REQUEST = 16
    MAX_ID = 255
    PARTIAL = 1
    FAILURE = 500
    # An output of this size is written on its own; gathered beyond it, it is not worth waiting.
    GATHER_BYTES = 64 * 1024
    # Shorter packets are left with the transport until they are whole.
    LARGE_BYTES = 64 * 1024
    HEX_DIGITS = 16
    # Packets that went the long way before everybody else has a turn: a few milliseconds.
    MAX_SLOW = 128

# A call whose clock stands is never late, however little it has left.
cdef double STANDING_S = 0.01


@cython.final
cdef class Desk:
    """What all ends of a bus share."""

    cdef public uint64_t generation  # of names and rules: routes of an older one are void
    cdef public uint64_t opened  # calls
    cdef public uint64_t answered, failed  # how many of them ended so, on the short path
    cdef public double next_due_s  # no call with an earlier deadline needs a timer
    cdef public bint is_short  # may the short path be taken?
    # Where calls that have ended on it are put for the log: (call, code, when); None: nowhere.
    cdef public list log
    cdef readonly Py_ssize_t max_packet_bytes, max_open_calls, free_partials, free_bytes
    cdef readonly Py_ssize_t window_bytes, min_window, max_window
    cdef object clock, grant
    cdef list touched  # ends that something was written for, in this turn of `receive`

    def __init__(
        self, clock, grant, *, Py_ssize_t max_packet_bytes, Py_ssize_t max_open_calls,
        Py_ssize_t free_partials, Py_ssize_t free_bytes, Py_ssize_t window_bytes,
        Py_ssize_t min_window, Py_ssize_t max_window,
    ):
        """`grant(call)` gives a call's service new credit."""
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
        self.is_short = True
        self.touched = []

    cdef int flush(self) except -1:
        """Everything that was written goes to where it belongs."""
        cdef End end
        cdef list touched
        while self.touched:
            touched = self.touched
            self.touched = []
            for end in touched:
                end.flush()
        return 0


cdef class Service:
    """One registered name."""

    cdef readonly str id
    cdef readonly End end
    cdef readonly object since_ms
    cdef public Py_ssize_t calls, pending

    def __init__(self, str name not None, End end not None, since_ms):
        self.id = name
        self.end = end
        self.since_ms = since_ms


@cython.final
cdef class Route:
    """What an address means to one caller, who may call it."""

    cdef readonly Service service
    cdef readonly bytes address  # without the node

    def __init__(self, Service service not None, bytes address not None):
        self.service = service
        self.address = address


@cython.final
@cython.freelist(256)
cdef class Call:
    """One open call."""

    cdef readonly End caller
    cdef readonly Service service
    cdef readonly End end  # the service's, which it may have left behind
    cdef readonly bytes request_id, id, address
    cdef readonly double begun_s
    cdef readonly Py_ssize_t request_bytes
    cdef public Py_ssize_t partials, reply_bytes
    cdef public Py_ssize_t credit  # granted and not used
    # The deadline's clock: since when it runs, and how long the service had been unread by
    # then. `is_dry`: it stands for lack of credit, and had run for `ran_s`.
    cdef double last_s, unread_before_s, ran_s
    cdef readonly bint is_dry

    def __init__(
        self, End caller not None, Route route not None, bytes request_id not None,
        bytes call_id not None, Py_ssize_t request_bytes, double now_s,
    ):
        self.begin(caller, route, request_id, call_id, request_bytes, now_s)

    cdef void begin(
        self, End caller, Route route, bytes request_id, bytes call_id, Py_ssize_t request_bytes,
        double now_s,
    ):
        self.caller = caller
        self.service = route.service
        self.end = route.service.end
        self.request_id = request_id
        self.id = call_id
        self.address = route.address
        self.request_bytes = request_bytes
        self.begun_s = now_s
        self.restart_clock(now_s)

    cpdef void restart_clock(self, double now_s):
        """The service has given a sign of life."""
        self.last_s = now_s
        self.unread_before_s = self.end.unread_by(now_s)
        self.ran_s = 0

    cpdef void stop_clock(self, double now_s):
        """The service has no credit left, and can have none."""
        if not self.is_dry:
            self.ran_s = now_s - self.last_s - self.end.unread_by(now_s) + self.unread_before_s
            self.is_dry = True

    cpdef void go_on_clock(self, double now_s):
        """It has some again."""
        if self.is_dry:
            self.last_s = now_s - self.ran_s
            self.unread_before_s = self.end.unread_by(now_s)
            self.is_dry = False

    cpdef double due(self, double now_s):
        """When it is over its deadline, or at the earliest: while the clock stands, if it went on
        now. So who looks again then is not late, whenever it went on.
        """
        cdef double unread_s = self.end.unread_by(now_s) - self.unread_before_s
        cdef double due_s = self.last_s + self.caller.deadline_s + unread_s
        if self.is_dry:
            due_s = now_s + self.caller.deadline_s - self.ran_s
        if self.is_dry or self.end.halted:
            return max(due_s, now_s + STANDING_S)
        return due_s

    cpdef Py_ssize_t free_left(self, Desk desk):
        """PARTIALs that still need no credit."""
        if self.reply_bytes >= desk.free_bytes or self.partials >= desk.free_partials:
            return 0
        return desk.free_partials - self.partials

    cpdef Py_ssize_t window(self, Desk desk):
        """How many PARTIALs may be under way: about as many as fill an outbox to its mark."""
        cdef Py_ssize_t average = self.reply_bytes // max(1, self.partials)
        cdef Py_ssize_t fitting = desk.window_bytes // max(1, average)
        return min(desk.max_window, max(desk.min_window, fitting))


cdef class End:
    """One connection, as calls know it: it calls, serves, or both.

    `full`: it is owed so much that streams to it stop. `full_calls`: how many calls that it
    serves have a full caller, if it knows no credits: then it is not read from.
    """

    cdef readonly dict calls  # own, by request id
    cdef readonly dict serving  # others', by the bus's id
    cdef readonly dict services  # registered, by name
    cdef readonly dict routes  # addresses that were resolved and allowed
    cdef readonly dict wanting  # calls of its own whose service waits for credit
    cdef readonly dict waiters  # ends that are not read until this one has room
    cdef public uint64_t generation  # of `routes`
    cdef public bint full, credits, gone, halted, lifted, pinged
    cdef public bint is_open  # greeted, and not in the middle of something to be skipped
    cdef public bint is_first  # no packet has come yet
    cdef public bint ipc
    cdef public Py_ssize_t full_calls
    cdef public double deadline_s, unread_s, halted_since_s, heard_s
    cdef public bytes caller_name
    cdef Desk desk
    cdef object push  # takes bytes for the peer
    # What was written for the peer and not handed on yet.
    cdef unsigned char* out
    cdef Py_ssize_t out_size, out_capacity
    # A large packet that is being put together, and how much of it is there.
    cdef bytes large
    cdef Py_ssize_t large_filled

    def __cinit__(self, *args, **kwargs):
        self.calls = {}
        self.serving = {}
        self.services = {}
        self.routes = {}
        self.wanting = {}
        self.waiters = {}
        self.is_first = True

    def __dealloc__(self):
        PyMem_Free(self.out)

    def take_short_path(self, Desk desk not None, push, bint ipc):
        """From now on."""
        self.desk = desk
        self.push = push
        self.ipc = ipc

    cdef double unread_by(self, double now_s) noexcept:
        """How long it was not read, all times together."""
        return self.unread_s + (now_s - self.halted_since_s if self.halted else 0)

    # --- receiving

    def receive(self, buffer, Py_ssize_t start, Py_ssize_t end):
        """As transports/stream_session.py has it."""
        cdef Py_buffer view
        cdef Py_ssize_t at
        cdef int slow = 0
        cdef double now_s = self.desk.clock()
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
                if slow >= MAX_SLOW and not self.lifted:
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
        """Offers a large packet again that had to wait; False if it has to go on waiting."""
        if self.large is None or self.large_filled < PyBytes_GET_SIZE(self.large):
            return True
        return self.large_done(self.desk.clock())

    cdef bint needs_more(self, const unsigned char* at, Py_ssize_t size) noexcept:
        """Is there something that the short path has left over, and that is whole?"""
        cdef uint64_t length
        if not size or self.large is not None:
            return False
        if not self.is_open or not self.head(at, size, &length):
            return not self.is_open or (self.ipc and at[0] != IPC_MARK)
        return length > <uint64_t>self.desk.max_packet_bytes or (
            length <= <uint64_t>(size - self.ipc - LENGTH_SIZE)
        )

    cdef bint head(self, const unsigned char* at, Py_ssize_t size, uint64_t* length) noexcept:
        """The length of a frame, if its head is there and good."""
        cdef int place
        if size < self.ipc + LENGTH_SIZE or (self.ipc and at[0] != IPC_MARK):
            return False
        length[0] = 0
        for place in range(LENGTH_SIZE):
            length[0] = length[0] << 8 | at[self.ipc + place]
        return True

    cdef Py_ssize_t take(self, const unsigned char* start, Py_ssize_t size, double now_s) except -1:
        """Takes frames as long as they are whole and hot."""
        cdef const unsigned char* at = start
        cdef const unsigned char* end = start + size
        cdef Py_ssize_t head = self.ipc + LENGTH_SIZE
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
            if length > <uint64_t>self.desk.max_packet_bytes:
                break
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
        self.desk.flush()
        return at - start

    cdef Py_ssize_t fill(self, const unsigned char* at, Py_ssize_t size) noexcept:
        cdef Py_ssize_t room = PyBytes_GET_SIZE(self.large) - self.large_filled
        if size > room:
            size = room
        memcpy(PyBytes_AS_STRING(self.large) + self.large_filled, at, size)
        self.large_filled += size
        return size

    cdef bint large_done(self, double now_s) except -1:
        """Carries out a large packet that is whole; False if it has to wait."""
        cdef bytes payload = self.large
        cdef bint done = self.packet(
            <const unsigned char*>PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload), now_s
        )
        self.desk.flush()
        if not done:
            done = self.packet_slow_path(payload, 0, PyBytes_GET_SIZE(payload))
        if done or self.gone:
            self.large = None
        return done and not self.halted and not self.gone

    cdef bint packet(self, const unsigned char* at, Py_ssize_t size, double now_s) except -1:
        """Carries a packet out; False, with nothing done, if it is not for the short path."""
        cdef Packet packet
        cdef Kind kind
        cdef bint done
        if not self.desk.is_short:
            return False
        kind = read_packet(at, size, &packet)
        if kind == SERVICE_CALL:
            done = self.service_call(&packet, now_s)
        elif kind == CALL_REPLY:
            done = self.call_reply(&packet, now_s)
        else:
            return False
        if done:
            self.is_first = False
        return done

    cdef bint service_call(self, const Packet* packet, double now_s) except -1:
        cdef Desk desk = self.desk
        cdef bytes address, request_id
        cdef Route route
        cdef End end
        cdef Call call
        cdef void* found
        if self.lifted or self.generation != desk.generation:
            return False
        if not 0 < packet.request_id.size <= MAX_ID or PyDict_Size(self.calls) >= desk.max_open_calls:
            return False
        if now_s + self.deadline_s < desk.next_due_s:
            return False
        address = packet.address.at[:packet.address.size]
        found = <void*>PyDict_GetItem(self.routes, address)
        if found is NULL:
            return False
        route = <Route>found
        end = route.service.end
        if end.full or (self.full and not end.credits):
            return False
        request_id = packet.request_id.at[:packet.request_id.size]
        if PyDict_GetItem(self.calls, request_id) is not NULL:
            return False
        desk.opened += 1
        call = Call.__new__(Call)
        call.begin(self, route, request_id, hexadecimal(desk.opened), packet.data.size, now_s)
        PyDict_SetItem(self.calls, request_id, call)
        PyDict_SetItem(end.serving, call.id, call)
        route.service.calls += 1
        route.service.pending += 1
        end.write_call(call, packet.data)
        return True

    cdef bint call_reply(self, const Packet* packet, double now_s) except -1:
        cdef Desk desk = self.desk
        cdef Call call
        cdef void* found
        cdef bytes call_id
        if packet.type > PARTIAL:
            return False
        call_id = packet.request_id.at[:packet.request_id.size]
        found = <void*>PyDict_GetItem(self.serving, call_id)
        if found is NULL:
            return False
        call = <Call>found
        if call.caller.full:
            return False
        if packet.type == PARTIAL:
            return self.partial(call, packet, now_s)
        if packet.code and packet.code != FAILURE:
            return False
        PyDict_DelItem(call.caller.calls, call.request_id)
        PyDict_DelItem(self.serving, call_id)
        call.service.pending -= 1
        call.reply_bytes += packet.data.size
        if desk.log is not None:
            desk.log.append((call, packet.code, now_s))
        if packet.code:
            desk.failed += 1
        else:
            desk.answered += 1
        call.caller.write_reply(call.request_id, packet)
        return True

    cdef bint partial(self, Call call, const Packet* packet, double now_s) except -1:
        cdef Desk desk = self.desk
        cdef Py_ssize_t free = call.free_left(desk)
        if self.credits and not free:
            if call.credit <= 0:
                return False
            call.credit -= 1
        call.restart_clock(now_s)
        call.partials += 1
        call.reply_bytes += packet.data.size
        call.caller.write_reply(call.request_id, packet)
        if self.credits and call.free_left(desk) + call.credit <= call.window(desk) // 2:
            desk.flush()
            desk.grant(call)
        return True

    # --- writing for the peer

    cdef int write_call(self, Call call, Slice data) except -1:
        cdef Slice request_id = slice_of(call.id)
        cdef Slice caller = slice_of(call.caller.caller_name)
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
        """Makes room behind what was written; for something large, an object of its own."""
        cdef void* grown
        cdef Py_ssize_t capacity
        if size >= GATHER_BYTES:
            self.flush()
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
            self.desk.touched.append(self)
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


def overdue(ends, double now_s):
    """Open calls that are over their deadline, and when the next will be (None: no other)."""
    cdef End end
    cdef Call call
    cdef double due_s, nearest_s = 0
    cdef list late = []
    cdef bint is_one = False
    for end in ends:
        for call in end.calls.values():
            due_s = call.due(now_s)
            if due_s <= now_s:
                late.append(call)
            elif not is_one or due_s < nearest_s:
                is_one = True
                nearest_s = due_s
    return late, nearest_s if is_one else None


cdef Slice slice_of(bytes text) noexcept:
    cdef Slice found
    found.at = <const unsigned char*>PyBytes_AS_STRING(text)
    found.size = PyBytes_GET_SIZE(text)
    return found


cdef bytes hexadecimal(uint64_t number):
    """As `b"%x" % number`."""
    cdef char[HEX_DIGITS] digits
    cdef int at = HEX_DIGITS
    while True:
        at -= 1
        digits[at] = b"0123456789abcdef"[number & 15]
        number >>= 4
        if not number:
            break
    return PyBytes_FromStringAndSize(digits + at, HEX_DIGITS - at)
