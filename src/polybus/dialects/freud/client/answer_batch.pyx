"""Freud's wire as its clients see it: many requests out, many answers in, one call each.

Going out, `encode_run` writes the Produce requests of many messages into one
buffer, and `encode_gets` writes many equal Gets.

Coming in, `scan_answers` walks a received buffer once and returns an AnswerBatch:
one copy of the bytes, and for each answer its code and where its payload lies. No
Python object is made per answer until someone asks for it. Answers come in the order
of the requests, so a client counts them off against what it has sent.

Every length is checked against the end of the buffer before it is believed. Places
in a batch are 32 bits, so a region over 4 GiB is refused.
"""
cimport cython
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_Check, PyBytes_FromStringAndSize, PyBytes_GET_SIZE,
)
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from polybus.kernel.byte_order cimport load_length, load_u32, load_u64, store_u32

cdef extern from "bytes_inline.h":
    void copy "polybus_copy"(unsigned char* out, const unsigned char* source, size_t size) noexcept nogil

cdef extern from "Python.h":
    Py_ssize_t PY_SSIZE_T_MAX

cdef enum:
    HEADER = 8  # type or code 4, length 4
    PRODUCE_HEADER = 12  # the header and the name's length
    NAME_LENGTH = 4
    MAX_NAME = 255
    SUBSCRIBER_ID = 16
    GET_FRAME = 28
    MESSAGE_ID = 8
    RECORD_HEADER = 20  # message id 8, timestamp 8, flags 4
    FIRST_CAPACITY = 32  # entries of a fresh table; it doubles as it fills
    NOTICE_FLAG = 1

cdef enum Type:
    PRODUCE = 4
    GET_MESSAGE = 5
    GET_RECORD = 8

cdef int64_t MAX_U32 = 0xFFFFFFFF

# Roughly what the objects of one batch weigh besides its bytes and its table.
cdef Py_ssize_t BATCH_OVERHEAD_BYTES = 192

cdef struct Entry:
    uint32_t code
    uint32_t start  # of the payload, in the region
    uint32_t size


cdef inline void put(list found, Py_ssize_t place, object item) noexcept:
    Py_INCREF(item)  # the place takes over a reference
    PyList_SET_ITEM(found, place, item)


# --- answers -------------------------------------------------------------------


@cython.final
@cython.freelist(256)
cdef class Answer:
    """One answer, as it came."""

    cdef readonly uint32_t code
    cdef readonly bytes payload

    __match_args__ = ("code", "payload")

    def __init__(self, uint32_t code, bytes payload not None):
        self.code = code
        self.payload = payload

    def __eq__(self, other):
        cdef Answer that
        if not isinstance(other, Answer):
            return NotImplemented
        that = other
        return self.code == that.code and self.payload == that.payload

    def __hash__(self):
        return hash((self.code, self.payload))

    def __repr__(self):
        return f"Answer(code={self.code}, payload={self.payload!r})"


@cython.final
@cython.freelist(256)
cdef class Record:
    """A message with its id and its time, as Get Record answers it."""

    cdef readonly uint64_t message_id
    cdef readonly uint64_t timestamp_ns
    cdef readonly uint32_t flags
    cdef readonly bytes body

    __match_args__ = ("message_id", "timestamp_ns", "flags", "body")

    def __init__(
        self, uint64_t message_id, uint64_t timestamp_ns, uint32_t flags, bytes body not None
    ):
        self.message_id = message_id
        self.timestamp_ns = timestamp_ns
        self.flags = flags
        self.body = body

    @property
    def is_notice(self):
        """Is this the notice that the topic was deleted, and no message?"""
        return bool(self.flags & NOTICE_FLAG)

    cdef tuple fields(self):
        return self.message_id, self.timestamp_ns, self.flags, self.body

    def __eq__(self, other):
        if not isinstance(other, Record):
            return NotImplemented
        return self.fields() == (<Record>other).fields()

    def __hash__(self):
        return hash(self.fields())

    def __repr__(self):
        return (
            f"Record(message_id={self.message_id}, timestamp_ns={self.timestamp_ns},"
            f" flags={self.flags}, body={self.body!r})"
        )


@cython.final
cdef class AnswerBatch:
    """The answers of one received buffer, in their order; it never changes.

    `len`, indexing and iteration give answers one by one. The other methods work
    on answers `start` to `end` at once; `run_end` says how far a code reaches.
    """

    cdef bytes region
    cdef Entry* entries
    cdef Py_ssize_t count
    cdef Py_ssize_t capacity

    def __cinit__(self):
        self.region = b""

    def __dealloc__(self):
        PyMem_Free(self.entries)

    # Filling: only inside this file, before anyone else sees the batch.

    cdef int add(self, uint32_t code, Py_ssize_t start, Py_ssize_t size) except -1:
        if self.count == self.capacity:
            self.widen()
        self.entries[self.count] = Entry(code, <uint32_t>start, <uint32_t>size)
        self.count += 1
        return 0

    cdef int widen(self) except -1:
        cdef Py_ssize_t wider = max(<Py_ssize_t>FIRST_CAPACITY, 2 * self.capacity)
        cdef void* grown = PyMem_Realloc(self.entries, wider * sizeof(Entry))
        if grown is NULL:
            raise MemoryError
        self.entries = <Entry*>grown
        self.capacity = wider
        return 0

    # Making objects, only when asked.

    cdef inline const unsigned char* payload_at(self, const Entry* entry) noexcept:
        return <const unsigned char*>PyBytes_AS_STRING(self.region) + entry.start

    cdef inline bytes payload(self, const Entry* entry):
        return PyBytes_FromStringAndSize(<const char*>self.payload_at(entry), entry.size)

    cdef Answer answer(self, Py_ssize_t place):
        cdef Answer answer = Answer.__new__(Answer)
        answer.code = self.entries[place].code
        answer.payload = self.payload(&self.entries[place])
        return answer

    cdef Record record(self, const Entry* entry):
        cdef const unsigned char* at = self.payload_at(entry)
        cdef Record record
        if entry.size < RECORD_HEADER:
            raise ValueError("a record has at least 20 bytes")
        record = Record.__new__(Record)
        record.message_id = load_u64(at)
        record.timestamp_ns = load_u64(at + 8)
        record.flags = load_u32(at + 16)
        record.body = PyBytes_FromStringAndSize(
            <const char*>at + RECORD_HEADER, entry.size - RECORD_HEADER
        )
        return record

    cdef int check(self, Py_ssize_t start, Py_ssize_t end) except -1:
        if not 0 <= start <= end <= self.count:
            raise IndexError("answers out of range")
        return 0

    cdef list places(self, Py_ssize_t start, Py_ssize_t end):
        """A list with a place for each; `put` fills it. (It never grows: an append may fail.)"""
        self.check(start, end)
        return PyList_New(end - start)

    # The public face.

    def __len__(self):
        return self.count

    def __getitem__(self, Py_ssize_t place):
        if place < 0:
            place += self.count
        if not 0 <= place < self.count:
            raise IndexError("batch index out of range")
        return self.answer(place)

    def __iter__(self):
        cdef Py_ssize_t place
        for place in range(self.count):
            yield self.answer(place)

    def __repr__(self):
        return f"<AnswerBatch of {self.count} answers>"

    @property
    def memory_bytes(self):
        """About how much memory the batch holds."""
        cdef Py_ssize_t table = self.capacity * <Py_ssize_t>sizeof(Entry)
        return BATCH_OVERHEAD_BYTES + PyBytes_GET_SIZE(self.region) + table

    def code(self, Py_ssize_t place):
        """The code of one answer."""
        if not 0 <= place < self.count:
            raise IndexError("answers out of range")
        return self.entries[place].code

    def run_end(self, Py_ssize_t start, Py_ssize_t end):
        """The end of the run of equal codes that begins with answer `start`, at most `end`."""
        cdef Py_ssize_t place = start + 1
        self.check(start, end)
        if start == end:
            return end
        while place < end and self.entries[place].code == self.entries[start].code:
            place += 1
        return place

    def payloads(self, Py_ssize_t start, Py_ssize_t end):
        """The payloads, as a list of bytes: message bodies, where Gets were answered Ok."""
        cdef Py_ssize_t place
        cdef list found = self.places(start, end)
        for place in range(start, end):
            put(found, place - start, self.payload(&self.entries[place]))
        return found

    def message_ids(self, Py_ssize_t start, Py_ssize_t end):
        """The ids in Ok answers to Produce; ValueError if one is none."""
        cdef Py_ssize_t place
        cdef list found = self.places(start, end)
        for place in range(start, end):
            if self.entries[place].size != MESSAGE_ID:
                raise ValueError("a message id has 8 bytes")
            put(found, place - start, load_u64(self.payload_at(&self.entries[place])))
        return found

    def records(self, Py_ssize_t start, Py_ssize_t end):
        """The records in Ok answers to Get Record; ValueError if one is none."""
        cdef Py_ssize_t place
        cdef list found = self.places(start, end)
        for place in range(start, end):
            put(found, place - start, self.record(&self.entries[place]))
        return found


def scan_answers(
    const unsigned char[::1] buffer not None,
    Py_ssize_t start,
    Py_ssize_t end,
    Py_ssize_t max_frame_bytes,
):
    """Reads the whole answers in buffer[start:end].

    Returns (bytes consumed, AnswerBatch, whether the next answer's length is over
    the cap). An unfinished answer at the end is left unconsumed.
    """
    cdef AnswerBatch batch = AnswerBatch.__new__(AnswerBatch)
    cdef const unsigned char* at
    cdef Py_ssize_t size, consumed = 0
    cdef int64_t length
    cdef bint too_large = False
    if not 0 <= start <= end <= buffer.shape[0]:
        raise ValueError("start and end must lie within the buffer")
    size = end - start
    if size > MAX_U32:
        raise ValueError("a scanned region is at most 4 GiB")
    if size < HEADER:
        return 0, batch, False
    at = &buffer[start]
    while size - consumed >= HEADER:
        length = load_length(at + consumed + 4)
        too_large = length > max_frame_bytes
        if too_large or length > size - consumed - HEADER:
            break
        batch.add(load_u32(at + consumed), consumed + HEADER, <Py_ssize_t>length)
        consumed += HEADER + <Py_ssize_t>length
    if batch.count:
        batch.region = PyBytes_FromStringAndSize(<const char*>at, consumed)
    return consumed, batch, too_large


# --- requests ------------------------------------------------------------------


def encode_produces(bytes topic not None, contents, Py_ssize_t max_frame_bytes):
    """One buffer with a Produce request for each of `contents` (any bytes-like objects).

    OverflowError names the first that is too large for one frame.
    """
    cdef list items = list(contents)
    data, after = encode_run(topic, items, 0, max_frame_bytes, PY_SSIZE_T_MAX)
    if after != len(items):
        raise OverflowError(
            f"content {after} has {memoryview(items[after]).nbytes} bytes, at most"
            f" {max(0, max_frame_bytes - NAME_LENGTH - len(topic))} fit one frame"
        )
    return data


def encode_run(
    bytes topic not None,
    contents not None,
    Py_ssize_t first,
    Py_ssize_t max_frame_bytes,
    Py_ssize_t max_bytes,
):
    """Produce requests for a run of contents[first:]: (the buffer, the place after the run).

    The run ends at the end of the list, before a content that is too large for
    one frame, or before the buffer would grow past `max_bytes`; a single request
    may pass that mark, so there is always progress.
    """
    cdef Py_ssize_t head = PRODUCE_HEADER + len(topic)
    cdef Py_ssize_t room = max_frame_bytes - (head - HEADER)
    cdef Py_ssize_t total = 0
    cdef Py_ssize_t size
    cdef Py_ssize_t place = first
    # Holds what the second pass reads, whatever becomes of the caller's list meanwhile.
    cdef list run = []
    if not 1 <= len(topic) <= MAX_NAME:
        raise ValueError(f"a topic has 1 to {MAX_NAME} bytes, not {len(topic)}")
    if not 0 <= max_frame_bytes <= MAX_U32:
        raise ValueError("max_frame_bytes must fit 32 bits")
    if first < 0 or max_bytes < 0:
        raise ValueError("first and max_bytes are not negative")
    while place < len(contents):
        content = contents[place]
        if not PyBytes_Check(content):
            content = memoryview(content).tobytes()
        size = PyBytes_GET_SIZE(content)
        if size > room or (run and size > max_bytes - head - total):
            break
        run.append(content)
        total += head + size
        place += 1
    return write_run(topic, run, total), place


cdef bytes write_run(bytes topic, list run, Py_ssize_t total):
    cdef bytes data = PyBytes_FromStringAndSize(NULL, total)
    cdef unsigned char* out = <unsigned char*>PyBytes_AS_STRING(data)
    cdef unsigned char[PRODUCE_HEADER + MAX_NAME] prefix
    cdef Py_ssize_t topic_size = PyBytes_GET_SIZE(topic)
    cdef Py_ssize_t head = PRODUCE_HEADER + topic_size
    cdef Py_ssize_t size
    store_u32(&prefix[0], PRODUCE)
    store_u32(&prefix[HEADER], <uint32_t>topic_size)
    memcpy(&prefix[PRODUCE_HEADER], PyBytes_AS_STRING(topic), topic_size)
    for content in run:
        size = PyBytes_GET_SIZE(content)
        store_u32(&prefix[4], <uint32_t>(head - HEADER + size))
        copy(out, &prefix[0], head)
        copy(out + head, <const unsigned char*>PyBytes_AS_STRING(content), size)
        out += head + size
    return data


def encode_gets(
    bytes subscriber not None, Py_ssize_t count, int32_t max_blocking_s, bint records=False
):
    """One buffer with `count` equal Get Message requests, or Get Record if `records`."""
    cdef unsigned char[GET_FRAME] frame
    cdef bytes data
    cdef unsigned char* out
    cdef Py_ssize_t number
    if PyBytes_GET_SIZE(subscriber) != SUBSCRIBER_ID:
        raise ValueError(f"a subscriber id has {SUBSCRIBER_ID} bytes, not {len(subscriber)}")
    if count < 0:
        raise ValueError("a count is not negative")
    if count > PY_SSIZE_T_MAX // GET_FRAME:
        raise OverflowError("too many requests for one buffer")
    store_u32(&frame[0], GET_RECORD if records else GET_MESSAGE)
    store_u32(&frame[4], GET_FRAME - HEADER)
    memcpy(&frame[HEADER], PyBytes_AS_STRING(subscriber), SUBSCRIBER_ID)
    store_u32(&frame[HEADER + SUBSCRIBER_ID], <uint32_t>max_blocking_s)
    data = PyBytes_FromStringAndSize(NULL, count * GET_FRAME)
    out = <unsigned char*>PyBytes_AS_STRING(data)
    for number in range(count):
        memcpy(out, &frame[0], GET_FRAME)
        out += GET_FRAME
    return data
