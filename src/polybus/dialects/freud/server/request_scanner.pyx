"""Reads Freud's pipelined requests, and returns them in groups.

    request  =  type u32 | length u32 | payload                     (little-endian)

A client that pipelines sends long runs of like requests. `RequestScanner.scan` walks a
received buffer once and returns such runs as groups, in the order of the wire:

    ProduceRun      messages for one topic, as columns in Arrow's layout
    GetRun          equal requests for the next message of one subscriber
    SingleRequest   any other well-formed request, one each
    MalformedFrame  a request that breaks a rule, one each, with the rule's stable name

So Python runs once per group. One scan gathers a bounded amount, and sets `more` when it
stopped because of that.

A length over the cap is refused by the header, before anything is allocated or waited
for. It is the last group of its scan, and `closes`: the start of the next frame is
unknown. Every other fault lies within its frame, and the next request is read as usual.

`with_header` reads the framing of an older client: its length counts the header, too, except
that of a Get Message, which is 4 more than its payload. A length below that also `closes`.

A first pass over the frames records offsets; a second pass copies the bodies by that
record alone.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.stdint cimport int32_t, int64_t, uint32_t

from polybus.kernel.byte_order cimport load_length, load_u32

cdef extern from "bytes_inline.h":
    void copy "polybus_copy"(unsigned char* out, const unsigned char* source, size_t size) noexcept nogil
    bint same "polybus_same"(const unsigned char* a, const unsigned char* b, size_t size) noexcept nogil

cdef enum:
    HEADER = 8  # type 4, length 4
    NAME_LENGTH = 4
    PRODUCE_HEADER = 12  # the header and the name's length
    MAX_NAME = 255
    SUBSCRIBER_ID = 16
    GET_PAYLOAD = 20  # subscriber id 16, max_blocking 4
    GET_FRAME = 28
    GET_EXCESS = 4  # of the length of a Get Message over its payload, `with_header`
    FIRST_CAPACITY = 256  # offsets of a fresh scratch; it doubles as it fills

cdef enum Type:
    CREATE_TOPIC = 0
    DELETE_TOPIC = 1
    SUBSCRIBE = 2
    UNSUBSCRIBE = 3
    PRODUCE = 4
    GET_MESSAGE = 5
    LIST_TOPICS = 6
    COUNT_SUBSCRIBERS = 7
    GET_RECORD = 8

# The most that one scan gathers. A session holds it while an earlier request waits, so it
# bounds the memory that one connection can pin: the bodies, and about 100 bytes per group.
# (A single body may be larger: it was received already, and is within the cap.)
cdef enum:
    SCAN_BODY_BYTES = 1048576
    SCAN_GROUPS = 1024
    GROUP_MESSAGES = 65536  # bodies may be empty: bounds the offsets, 256 KiB of them

MAX_SCAN_BODY_BYTES = SCAN_BODY_BYTES
MAX_SCAN_GROUPS = SCAN_GROUPS
MAX_GROUP_MESSAGES = GROUP_MESSAGES

# Offsets in a group's columns are int32, as in Arrow.
cdef Py_ssize_t MAX_CAP = 0x7FFFFFFF

# The stable names of the rules: logs and counters use them.
TOO_LARGE = "too_large"
TOO_SHORT = "too_short"  # only `with_header`
UNKNOWN_TYPE = "unknown_type"
TRUNCATED = "truncated"
TRAILING_BYTES = "trailing_bytes"
BAD_NAME = "bad_name"
REASONS = (TOO_LARGE, TOO_SHORT, UNKNOWN_TYPE, TRUNCATED, TRAILING_BYTES, BAD_NAME)


# --- results -------------------------------------------------------------------


@cython.final
@cython.freelist(64)
cdef class ProduceRun:
    """Consecutive Produce requests to one topic, all well-formed; columns in Arrow's layout."""

    def __repr__(self):
        return f"ProduceRun({self.topic!r}, {self.count} messages, {len(self.bodies)} bytes)"

    def part(self, Py_ssize_t start, Py_ssize_t end):
        """Return messages `start` to `end` as a run."""
        cdef ProduceRun part = ProduceRun.__new__(ProduceRun)
        cdef const int32_t* ends = self.ends()
        cdef Py_ssize_t at
        cdef int32_t* out
        if not 0 <= start <= end <= self.count:
            raise IndexError("a part lies within its run")
        part.topic = self.topic
        part.count = end - start
        part.bodies = self.bodies[ends[start] : ends[end]]
        part.offsets = PyBytes_FromStringAndSize(NULL, (part.count + 1) * <Py_ssize_t>sizeof(int32_t))
        out = <int32_t*>PyBytes_AS_STRING(part.offsets)
        for at in range(part.count + 1):
            out[at] = ends[start + at] - ends[start]
        return part

    cdef const int32_t* ends(self) noexcept:
        return <const int32_t*>PyBytes_AS_STRING(self.offsets)


@cython.final
@cython.freelist(64)
cdef class GetRun:
    """Consecutive equal Get Message requests, or Get Record if `records`."""

    def __repr__(self):
        what = "records" if self.records else "messages"
        return f"GetRun({self.subscriber.hex()}, {self.count} {what}, {self.max_blocking_s} s)"


@cython.final
@cython.freelist(64)
cdef class SingleRequest:
    """One request of another type. `subject` is a topic's name, a subscriber's id, or empty."""

    cdef readonly int type
    cdef readonly bytes subject

    def __repr__(self):
        return f"SingleRequest({self.type}, {self.subject!r})"


@cython.final
@cython.freelist(64)
cdef class MalformedFrame:
    """One request that breaks a rule; if it `closes`, the rest of the stream is unreadable."""

    cdef readonly str reason
    cdef readonly bint closes

    def __repr__(self):
        return f"MalformedFrame({self.reason!r}{', closes' if self.closes else ''})"


Group = ProduceRun | GetRun | SingleRequest | MalformedFrame


@cython.final
@cython.freelist(8)
cdef class ScanResult:
    """The groups of one scan, which cover `consumed` bytes.

    `more`: the scan reached its limits; scan again from there. `bad`: the last group is
    a MalformedFrame that closes; do not scan again.
    """

    def __repr__(self):
        return f"ScanResult({self.consumed} bytes, {self.groups!r}, more={self.more}, bad={self.bad})"


cdef MalformedFrame malformed(str reason, bint closes):
    cdef MalformedFrame group = MalformedFrame.__new__(MalformedFrame)
    group.reason = reason
    group.closes = closes
    return group


# --- scanning ------------------------------------------------------------------


@cython.final
cdef class RequestScanner:
    """Reads requests. It has no state of a connection, so one scanner serves them all.

    `is_name(bytes) -> bool` checks names that are not plain ASCII; those of ASCII are
    checked here. The last name is cached with its verdict.
    """

    def __init__(self, Py_ssize_t max_frame_bytes, is_name, *, bint with_header=False):
        if not 0 < max_frame_bytes <= MAX_CAP:
            raise ValueError(f"max_frame_bytes must be 1 to {MAX_CAP}, got {max_frame_bytes}")
        self.max_frame_bytes = max_frame_bytes
        self.is_name = is_name
        self.with_header = with_header

    def __dealloc__(self):
        PyMem_Free(self.offsets)

    cpdef ScanResult scan(self, buffer, Py_ssize_t start, Py_ssize_t end):
        """Scan the complete requests in buffer[start:end], up to the limits of one scan."""
        cdef ScanResult scanned = ScanResult.__new__(ScanResult)
        cdef Py_buffer view
        scanned.groups = []
        PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
        try:
            if not 0 <= start <= end <= view.len:
                raise ValueError("start and end must lie within the buffer")
            if self.scanning:
                raise RuntimeError("a buffer is being scanned already")
            self.scanning = True
            try:
                self.walk(<const unsigned char*>view.buf + start, end - start, scanned)
            finally:
                self.scanning = False
        finally:
            PyBuffer_Release(&view)
        return scanned

    cdef int walk(self, const unsigned char* start, Py_ssize_t size, ScanResult scanned) except -1:
        cdef Py_ssize_t done = 0
        cdef Py_ssize_t room = SCAN_BODY_BYTES
        cdef int64_t length
        while size - done >= HEADER:
            length = self.payload_length(start + done)
            if length <= self.max_frame_bytes and length > size - done - HEADER:
                break
            if len(scanned.groups) == SCAN_GROUPS:
                scanned.more = True
                break
            if length < 0 or length > self.max_frame_bytes:
                scanned.groups.append(malformed(TOO_SHORT if length < 0 else TOO_LARGE, True))
                scanned.bad = True
                break
            if length > room and room < SCAN_BODY_BYTES:
                scanned.more = True
                break
            done += self.take(start + done, size - done, <Py_ssize_t>length, &room, scanned.groups)
        scanned.consumed = done
        return 0

    cdef int64_t payload_length(self, const unsigned char* at) noexcept:
        """Return the bytes after the header at `at`; negative if the length is too short."""
        cdef int64_t length = load_length(at + 4)
        if self.with_header:
            length -= GET_EXCESS if load_u32(at) == GET_MESSAGE else HEADER
        return length

    def frame_bytes(self, bytes header not None):
        """Return the size of the request with this header, the header included."""
        if PyBytes_GET_SIZE(header) != HEADER:
            raise ValueError(f"header must have {HEADER} bytes, got {len(header)}")
        return HEADER + self.payload_length(<const unsigned char*>PyBytes_AS_STRING(header))

    cdef Py_ssize_t take(
        self,
        const unsigned char* at,
        Py_ssize_t left,
        Py_ssize_t length,
        Py_ssize_t* room,
        list groups,
    ) except -1:
        """Scan the group that starts with the complete frame at `at`. Returns its bytes."""
        cdef uint32_t kind = load_u32(at)
        cdef SingleRequest request
        fault = self.fault(kind, at + HEADER, length)
        if fault is not None:
            groups.append(malformed(fault, False))
            return HEADER + length
        if kind == PRODUCE:
            return self.take_produces(at, left, length, room, groups)
        if kind == GET_MESSAGE or kind == GET_RECORD:
            return take_gets(at, left, groups)
        request = SingleRequest.__new__(SingleRequest)
        request.type = kind
        if kind == LIST_TOPICS:
            request.subject = b""
        elif kind == UNSUBSCRIBE:
            request.subject = at[HEADER:HEADER + SUBSCRIBER_ID]
        else:
            request.subject = self.name
        groups.append(request)
        return HEADER + length

    cdef object fault(self, uint32_t kind, const unsigned char* payload, Py_ssize_t length):
        """Return the rule that a complete request breaks, or None. Sets `name` if it has one."""
        cdef Py_ssize_t fixed = fixed_length(kind)
        cdef int64_t name_size
        if kind > GET_RECORD:
            return UNKNOWN_TYPE
        if fixed >= 0:
            return TRUNCATED if length < fixed else TRAILING_BYTES if length > fixed else None
        if length < NAME_LENGTH:
            return TRUNCATED
        name_size = load_length(payload)
        if name_size > length - NAME_LENGTH:
            return TRUNCATED
        if kind != PRODUCE and name_size < length - NAME_LENGTH:
            return TRAILING_BYTES
        return None if self.judge(payload + NAME_LENGTH, <Py_ssize_t>name_size) else BAD_NAME

    cdef bint judge(self, const unsigned char* name, Py_ssize_t size) except -1:
        """Return True if a topic may have this name."""
        cdef bint plain = True
        cdef Py_ssize_t at
        if not 0 < size <= MAX_NAME:
            return False
        if self.name is not None and is_named(self.name, name, size):
            return self.name_is_good
        if name[0] == c"_":
            return False
        for at in range(size):
            if name[at] < 0x20 or name[at] == 0x7F or name[at] == c"," or name[at] == c"*":
                return False
            plain = plain and name[at] < 0x80
        # Set last: while Python judges, nothing half-judged is remembered.
        judged = name[:size]
        self.name_is_good = plain or bool(self.is_name(judged))
        self.name = judged
        return self.name_is_good

    cdef Py_ssize_t take_produces(
        self,
        const unsigned char* at,
        Py_ssize_t left,
        Py_ssize_t length,
        Py_ssize_t* room,
        list groups,
    ) except -1:
        """Scan the Produce at `at`, and those after it to the same topic."""
        cdef const unsigned char* name = <const unsigned char*>PyBytes_AS_STRING(self.name)
        cdef Py_ssize_t name_size = PyBytes_GET_SIZE(self.name)
        cdef Py_ssize_t head = PRODUCE_HEADER + name_size
        cdef Py_ssize_t done = HEADER + length
        cdef Py_ssize_t size = done - head
        cdef Py_ssize_t total = size
        cdef Py_ssize_t count = 1
        cdef int64_t next_length
        if self.capacity < 2:
            self.widen()
        self.offsets[0] = 0
        self.offsets[1] = <int32_t>size
        while count < GROUP_MESSAGES and left - done >= head:
            if load_u32(at + done) != PRODUCE or load_length(at + done + HEADER) != name_size:
                break
            next_length = self.payload_length(at + done)
            if next_length > self.max_frame_bytes or next_length > left - done - HEADER:
                break
            size = HEADER + <Py_ssize_t>next_length - head
            if size < 0 or size > room[0] - total:
                break
            if not same(at + done + PRODUCE_HEADER, name, name_size):
                break
            count += 1
            if count == self.capacity:
                self.widen()
            total += size
            self.offsets[count] = <int32_t>total
            done += head + size
        room[0] -= total
        groups.append(self.gather(at, head, count))
        return done

    cdef ProduceRun gather(self, const unsigned char* at, Py_ssize_t head, Py_ssize_t count):
        """Second pass: copy the bodies recorded in `offsets`."""
        cdef ProduceRun group = ProduceRun.__new__(ProduceRun)
        cdef const int32_t* offsets = self.offsets
        cdef unsigned char* out
        cdef Py_ssize_t place, size
        group.topic = self.name
        group.count = count
        group.bodies = PyBytes_FromStringAndSize(NULL, offsets[count])
        group.offsets = PyBytes_FromStringAndSize(
            <const char*>offsets, (count + 1) * <Py_ssize_t>sizeof(int32_t)
        )
        out = <unsigned char*>PyBytes_AS_STRING(group.bodies)
        for place in range(count):
            size = offsets[place + 1] - offsets[place]
            at += head
            copy(out, at, size)
            at += size
            out += size
        return group

    cdef int widen(self) except -1:
        cdef Py_ssize_t wider = max(<Py_ssize_t>FIRST_CAPACITY, 2 * self.capacity)
        cdef void* grown = PyMem_Realloc(self.offsets, wider * sizeof(int32_t))
        if grown is NULL:
            raise MemoryError
        self.offsets = <int32_t*>grown
        self.capacity = wider
        return 0


cdef Py_ssize_t take_gets(const unsigned char* at, Py_ssize_t left, list groups) except -1:
    """Scan the well-formed Get at `at`, and those after it that are equal byte for byte."""
    cdef GetRun group = GetRun.__new__(GetRun)
    cdef Py_ssize_t done = GET_FRAME
    while left - done >= GET_FRAME and same(at + done, at, GET_FRAME):
        done += GET_FRAME
    group.subscriber = at[HEADER:HEADER + SUBSCRIBER_ID]
    group.count = group.unanswered = done // GET_FRAME
    group.max_blocking_s = <int32_t>load_u32(at + HEADER + SUBSCRIBER_ID)
    group.records = load_u32(at) == GET_RECORD
    groups.append(group)
    return done


cdef inline Py_ssize_t fixed_length(uint32_t kind) noexcept nogil:
    """Return the size of the payload, or -1 if it holds a name."""
    if kind == GET_MESSAGE or kind == GET_RECORD:
        return GET_PAYLOAD
    if kind == UNSUBSCRIBE:
        return SUBSCRIBER_ID
    return 0 if kind == LIST_TOPICS else -1


cdef inline bint is_named(bytes name, const unsigned char* at, Py_ssize_t size) noexcept:
    return PyBytes_GET_SIZE(name) == size and same(
        <const unsigned char*>PyBytes_AS_STRING(name), at, size
    )
