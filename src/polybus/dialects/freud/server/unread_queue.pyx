"""Unread messages of ephemeral topics, in chunks shared by all readers.

A chunk is three columns (bodies, offsets, timestamps) that only grow at the end. Readers hold ranges of chunks, so a message is stored once
however many readers it has, and is freed with the last range that covers it.
A batch from a pipelining producer becomes a chunk of its own as it is; single
messages are gathered into one chunk of moderate size, so that a small message
costs a few bytes and not a few objects.

A reader takes messages in two steps. `take` hands out a range; `confirm` says
that it is in the reader's socket, and only then it is consumed. A connection that
ends in between gives its range back to its old place, for the next Get.

Get Message delivers a body and nothing else, so a body that starts as a deletion notice does
needs an escape (codec.BODY_PREFIX). `take` hands such a message out alone.
"""
cimport cython
from cpython.array cimport array, clone, resize_smart
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy

from array import array as new_array
from collections import deque

from polybus.kernel.quota_account cimport BYTES

cdef extern from "bytes_inline.h":
    void copy "polybus_copy"(unsigned char* out, const unsigned char* source, size_t size) noexcept nogil
    bint same "polybus_same"(const unsigned char* a, const unsigned char* b, size_t size) noexcept nogil

cdef enum:
    GATHERED_COUNT = 4096
    BESIDE = 12  # bytes beside each body: where it ends, and its time
    # A reader that has read all but this part of a large chunk keeps a copy of the rest
    # alone: the memory that it holds must be in proportion to its charge.
    SMALL_REST = 4
    WORTH = 64
    RESERVED_SIZE = 7

cdef const unsigned char* RESERVED = b"\0FREUD\0"

GATHERED_BYTES = GATHERED  # a new chunk starts here, so that read messages can be freed soon
GATHERED_MESSAGES = GATHERED_COUNT
WORTH_A_CHUNK = WORTH  # a batch of this many messages becomes a chunk without copying

cdef array NO_PLACES = new_array("i")
cdef array NO_TIMES = new_array("Q")


@cython.final
cdef class Chunk:
    """Messages `first_id`, `first_id` + 1, …; `notice` if it is a deletion notice."""

    def __init__(self, uint64_t first_id, *, bint notice=False):
        self.first_id = first_id
        self.notice = notice
        self.bodies = bytearray()
        self.offsets = clone(NO_PLACES, 1, True)
        self.times = clone(NO_TIMES, 0, False)

    def __len__(self):
        return self.count()

    @staticmethod
    def of_batch(uint64_t first_id, offsets, bytes bodies not None, uint64_t timestamp_ns):
        """Return a chunk of the given columns, after checking them."""
        cdef array places = new_array("i", bytes(offsets))
        check_places(places, len(bodies))
        return batch(first_id, places, bodies, timestamp_ns)

    @staticmethod
    def of_notice(uint64_t message_id, bytes body not None, uint64_t timestamp_ns):
        cdef Chunk chunk = Chunk(message_id, notice=True)
        chunk.add(<const unsigned char*>PyBytes_AS_STRING(body), len(body), timestamp_ns)
        return chunk

    def part(self, Py_ssize_t start, Py_ssize_t end):
        """Return a copy of these messages as a chunk that does not grow."""
        cdef Chunk part
        cdef Py_ssize_t at
        cdef int32_t base
        self.check(start, end)
        base = self.places()[start]
        part = Chunk(self.first_id + <uint64_t>start, notice=self.notice)
        part.bodies = (<const unsigned char*>self.body() + base)[: self.places()[end] - base]
        part.offsets = clone(NO_PLACES, end - start + 1, False)
        for at in range(end - start + 1):
            part.offsets.data.as_ints[at] = self.places()[start + at] - base
        part.times = self.times[start:end]
        return part

    cdef int check(self, Py_ssize_t start, Py_ssize_t end) except -1:
        if not 0 <= start <= end <= self.count():
            raise IndexError("a range lies within its chunk")
        return 0

    cdef Py_ssize_t count(self) noexcept:
        return len(self.times)

    cdef const int32_t* places(self) noexcept:
        return <const int32_t*>self.offsets.data.as_voidptr

    cdef const unsigned char* body(self) except NULL:
        if isinstance(self.bodies, bytes):
            return <const unsigned char*>PyBytes_AS_STRING(self.bodies)
        return <const unsigned char*>PyByteArray_AS_STRING(self.bodies)

    cdef int add(self, const unsigned char* body, Py_ssize_t size, uint64_t stamp) except -1:
        """Append a message. The column of timestamps grows last: its size is the count.

        Views of the columns must be released before this call.
        """
        cdef Py_ssize_t count = self.count()
        cdef Py_ssize_t filled = self.places()[count]
        if size > 0x7FFFFFFF - filled:
            raise OverflowError("a chunk has less than 2 GiB")
        PyByteArray_Resize(self.bodies, filled + size)
        copy(<unsigned char*>PyByteArray_AS_STRING(self.bodies) + filled, body, size)
        resize_smart(self.offsets, count + 2)
        self.offsets.data.as_ints[count + 1] = <int32_t>(filled + size)
        resize_smart(self.times, count + 1)
        (<uint64_t*>self.times.data.as_voidptr)[count] = stamp
        return 0

    cdef bint is_open(self) noexcept:
        """Return True if more single messages may be appended."""
        return (
            isinstance(self.bodies, bytearray)
            and not self.notice
            and PyByteArray_GET_SIZE(self.bodies) < GATHERED
            and self.count() < GATHERED_COUNT
        )


cdef Chunk batch(uint64_t first_id, array places, bytes bodies, uint64_t stamp):
    cdef Chunk chunk = Chunk(first_id)
    cdef Py_ssize_t at
    chunk.bodies = bodies
    chunk.offsets = places
    chunk.times = clone(NO_TIMES, len(places) - 1, False)
    for at in range(len(places) - 1):
        (<uint64_t*>chunk.times.data.as_voidptr)[at] = stamp
    return chunk


@cython.final
@cython.freelist(64)
cdef class Range:
    """Messages start to end of a chunk, by place in the chunk."""

    def __init__(self, Chunk chunk not None, Py_ssize_t start, Py_ssize_t end):
        chunk.check(start, end)
        self.chunk = chunk
        self.start = start
        self.end = end

    def __len__(self):
        return self.end - self.start

    @property
    def size(self):
        """Bytes of the bodies."""
        return self.body_bytes()

    @property
    def first_id(self):
        return self.id()

    @property
    def needs_escape(self):
        """True if its first body must be escaped in the answer to a Get Message."""
        return not self.chunk.notice and self.is_reserved(self.start)

    def sizes(self):
        """Return the size of each body."""
        cdef Py_ssize_t at
        self.chunk.check(self.start, self.end)
        return [self.chunk.places()[at + 1] - self.chunk.places()[at] for at in range(self.start, self.end)]

    def extend(self, Range more not None):
        """Append the range that directly follows this one. Returns False for any other."""
        if more.chunk is not self.chunk or more.start != self.end:
            return False
        self.end = more.end
        return True

    cdef int64_t body_bytes(self) noexcept:
        return self.chunk.places()[self.end] - self.chunk.places()[self.start]

    cdef uint64_t id(self) noexcept:
        return self.chunk.first_id + <uint64_t>self.start

    cdef bint is_reserved(self, Py_ssize_t place) except -1:
        """Return True if the body at this place of the chunk starts as a notice does."""
        cdef const int32_t* places = self.chunk.places()
        cdef const unsigned char* body = self.chunk.body() + places[place]
        if places[place + 1] - places[place] < RESERVED_SIZE:
            return False
        return body[0] == RESERVED[0] and same(body, RESERVED, RESERVED_SIZE)

    cdef int let_go(self) except -1:
        """Copy the rest if it is a small part of a large chunk, to free the chunk."""
        cdef Chunk chunk = self.chunk
        cdef int64_t whole = chunk.places()[chunk.count()] + BESIDE * chunk.count()
        cdef int64_t own = self.body_bytes() + BESIDE * (self.end - self.start)
        if whole > GATHERED and SMALL_REST * own < whole:
            self.chunk = chunk.part(self.start, self.end)
            self.start, self.end = 0, self.chunk.count()
        return 0


cdef Range new_range(Chunk chunk, Py_ssize_t start, Py_ssize_t end):
    cdef Range found = Range.__new__(Range)
    found.chunk = chunk
    found.start = start
    found.end = end
    return found


@cython.final
cdef class ChunkWriter:
    """Stores incoming batches of one incarnation of a topic, and returns their ranges."""

    def __init__(self):
        self.open = Chunk(0)

    def time(self, uint64_t now_ns):
        """Return a timestamp that is not before the last one of the topic."""
        return self.stamp(now_ns)

    def write(self, uint64_t first_id, offsets, bytes bodies not None, uint64_t now_ns):
        """Store a batch. `offsets` are int32, native order, one more than messages."""
        cdef array places = new_array("i", bytes(offsets))
        cdef Py_ssize_t count = check_places(places, len(bodies))
        return self.store(first_id, <const int32_t*>places.data.as_voidptr, count, bodies, now_ns)

    cdef Range store(
        self, uint64_t first_id, const int32_t* ends, Py_ssize_t count, bytes bodies, uint64_t now_ns
    ):
        """Store a batch whose offsets were checked."""
        cdef uint64_t stamp = self.stamp(now_ns)
        cdef const unsigned char* body = <const unsigned char*>PyBytes_AS_STRING(bodies)
        cdef array places
        cdef Chunk chunk
        cdef Py_ssize_t at, start
        if count >= WORTH or len(bodies) >= GATHERED:
            places = clone(NO_PLACES, count + 1, False)
            memcpy(places.data.as_voidptr, ends, (count + 1) * sizeof(int32_t))
            return new_range(batch(first_id, places, bodies, stamp), 0, count)
        chunk = self.open_at(first_id)
        start = chunk.count()
        for at in range(count):
            chunk.add(body + ends[at], ends[at + 1] - ends[at], stamp)
        return new_range(chunk, start, start + count)

    cdef uint64_t stamp(self, uint64_t now_ns) noexcept:
        self.last_ns = max(self.last_ns, now_ns)
        return self.last_ns

    cdef Chunk open_at(self, uint64_t first_id):
        """Return the chunk to which a message with this id can be appended."""
        cdef Chunk chunk = self.open
        if not chunk.is_open() or chunk.first_id + <uint64_t>chunk.count() != first_id:
            chunk = self.open = Chunk(first_id)
        return chunk


cdef Py_ssize_t check_places(array places, Py_ssize_t size) except -1:
    """Return the number of messages. Raises ValueError unless the offsets cover `size` bytes."""
    cdef const int32_t* ends = <const int32_t*>places.data.as_voidptr
    cdef Py_ssize_t count = len(places) - 1
    cdef Py_ssize_t at
    if count < 0:
        raise ValueError("offsets are one more than messages")
    if ends[0] != 0 or ends[count] != size:
        raise ValueError("offsets cover the bodies")
    for at in range(count):
        if ends[at + 1] < ends[at]:
            raise ValueError("offsets must not go back")
    return count


cdef class UnreadQueue:
    """The unread messages of one subscription; unconsumed ones are charged to its account."""

    def __cinit__(self, *args, **kwargs):
        self.is_owned = True
        self.ranges = deque()
        self.waiters = {}

    cpdef put(self, Range messages):
        cdef Range last
        self.count_held(messages, 1)
        if self.ranges:
            last = self.ranges[len(self.ranges) - 1]
            if last.chunk is messages.chunk and last.end == messages.start:
                last.end = messages.end
                return
        self.ranges.append(new_range(messages.chunk, messages.start, messages.end))

    cpdef Range take(self, Py_ssize_t count, Py_ssize_t max_bytes, bint bare=False):
        """Take up to `count` messages of one chunk, and up to `max_bytes` but at least one.

        `bare`: for Get Message, so a body that needs an escape is taken alone.
        """
        cdef Range first, taken
        cdef Py_ssize_t end, place
        if not self.ranges:
            return None
        first = self.ranges[0]
        end = min(first.end, first.start + count)
        taken = new_range(first.chunk, first.start, end)
        while end > first.start + 1 and taken.body_bytes() > max_bytes:
            end = taken.end = first.start + (end - first.start) // 2
        if bare:
            place = first.start + 1
            while place < end and not first.is_reserved(place):
                place += 1
            end = taken.end = first.start + 1 if first.is_reserved(first.start) else place
        first.start = end
        if first.start < first.end:
            first.let_go()
        else:
            self.ranges.popleft()
        return taken

    def give_back(self, Range taken not None):
        """Put messages that did not reach the reader back to their place in the order."""
        cdef Py_ssize_t place = 0
        # Usually the front, unless another connection has given back earlier messages.
        while place < len(self.ranges) and (<Range?>self.ranges[place]).id() < taken.id():
            place += 1
        self.ranges.insert(place, taken)

    cpdef confirm(self, Range taken):
        """Release messages that are consumed."""
        self.count_held(taken, -1)
        if self.account is not None and not taken.chunk.notice:
            self.account.refund(BYTES, taken.body_bytes())

    cdef bint try_charge(self, int64_t size) except -1:
        if self.account is None:
            raise ValueError("a reader must have an account")
        return self.account.try_charge(BYTES, size)

    def end(self):
        """Drop all unread messages. Returns their number, without notices."""
        dropped = sum([len(unread) for unread in self.ranges if not unread.chunk.notice])
        self.ranges.clear()
        self.gone = True
        return dropped

    cdef void count_held(self, Range messages, int sign) noexcept:
        if not messages.chunk.notice:
            self.held_messages += sign * (messages.end - messages.start)
            self.held_bytes += sign * messages.body_bytes()


def put_and_wake(readers, Range messages not None):
    """Put messages to all readers, then wake them."""
    put_to(list(readers), messages)


cdef int put_to(list readers, Range messages) except -1:
    cdef UnreadQueue reader
    cdef Py_ssize_t at
    # Two passes: a reader that is woken must find every reader in the same state.
    for at in range(len(readers)):
        (<UnreadQueue?>readers[at]).put(messages)
    for at in range(len(readers)):
        reader = <UnreadQueue>readers[at]
        if reader.waiters:
            (<object>reader).wake()
    return 0
