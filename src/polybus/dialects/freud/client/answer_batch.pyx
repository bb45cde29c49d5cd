"""Freud's wire for its clients: many requests out, many answers in, one call each.

`encode_run` writes the Produce requests of many messages into one buffer, and `encode_gets`
writes many equal Gets.

`scan_answers` walks a received buffer once and returns an AnswerBatch: one copy of the bytes,
and for each answer its code and the offset of its payload. A Python object per answer is made
only on access. Answers arrive in the order of the requests, so a client matches them by
counting.
"""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.mem cimport PyMem_Free
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from polybus.kernel.byte_order cimport load_u32, load_u64, store_u32
from polybus.kernel.client_batch cimport (
    NO_MARK, TOO_LARGE, FrameBatch, FrameFormat, LengthField, RequestPrefix, Scan,
    encode_all, encode_run as encode_contents, grow, next_frame, start_scan,
)

cdef extern from "Python.h":
    Py_ssize_t PY_SSIZE_T_MAX

cdef enum:
    HEADER = 8  # type or code 4, length 4
    PRODUCE_HEADER = 12  # the header and the name's length
    MAX_NAME = 255
    SUBSCRIBER_ID = 16
    GET_FRAME = 28
    MESSAGE_ID = 8
    RECORD_HEADER = 20  # message id 8, timestamp 8, flags 4
    NOTICE_FLAG = 1

cdef enum Type:
    PRODUCE = 4
    GET_MESSAGE = 5
    GET_RECORD = 8

cdef int64_t MAX_U32 = 0xFFFFFFFF

# The approximate size of a batch's objects besides its bytes and its table.
cdef Py_ssize_t BATCH_OVERHEAD_BYTES = 192

cdef struct Entry:
    uint32_t code
    uint32_t start  # of the payload, in the region
    uint32_t size


cdef inline void put(list found, Py_ssize_t place, object item) noexcept:
    Py_INCREF(item)  # SET_ITEM takes a reference of its own
    PyList_SET_ITEM(found, place, item)


# --- answers -------------------------------------------------------------------


@cython.final
@cython.freelist(256)
cdef class Answer:
    """One answer, as received."""

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
    """A message with its id and timestamp: the answer to Get Record."""

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
        """Return True for the notice that the topic was deleted."""
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
cdef class AnswerBatch(FrameBatch):
    """The answers of one received buffer, in order; immutable.

    `len`, indexing and iteration return single answers. The other methods work on answers
    `start` to `end` at once; `run_end` returns how far a code reaches.
    """

    cdef Entry* entries
    cdef Py_ssize_t capacity

    def __dealloc__(self):
        PyMem_Free(self.entries)

    cdef inline int add(self, uint32_t code, Py_ssize_t start, Py_ssize_t size) except -1:
        if self.count == self.capacity:
            self.entries = <Entry*>grow(self.entries, &self.capacity, sizeof(Entry))
        self.entries[self.count] = Entry(code, <uint32_t>start, <uint32_t>size)
        self.count += 1
        return 0

    # --- objects, made on access

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
        """Return a list that `put` fills. It never grows, because an append may fail."""
        self.check(start, end)
        return PyList_New(end - start)

    # --- the public interface

    def __getitem__(self, Py_ssize_t place):
        return self.answer(self.index(place))

    def __iter__(self):
        cdef Py_ssize_t place
        for place in range(self.count):
            yield self.answer(place)

    def __repr__(self):
        return f"<AnswerBatch of {self.count} answers>"

    @property
    def memory_bytes(self):
        """Return the approximate memory of the batch."""
        cdef Py_ssize_t table = self.capacity * <Py_ssize_t>sizeof(Entry)
        return BATCH_OVERHEAD_BYTES + PyBytes_GET_SIZE(self.region) + table

    def code(self, Py_ssize_t place):
        """Return the code of one answer."""
        if not 0 <= place < self.count:
            raise IndexError("answers out of range")
        return self.entries[place].code

    def run_end(self, Py_ssize_t start, Py_ssize_t end):
        """Return the end of the run of equal codes that begins with `start`, at most `end`."""
        cdef Py_ssize_t place = start + 1
        self.check(start, end)
        if start == end:
            return end
        while place < end and self.entries[place].code == self.entries[start].code:
            place += 1
        return place

    def payloads(self, Py_ssize_t start, Py_ssize_t end):
        """Return the payloads: message bodies, if Gets were answered Ok."""
        cdef Py_ssize_t place
        cdef list found = self.places(start, end)
        for place in range(start, end):
            put(found, place - start, self.payload(&self.entries[place]))
        return found

    def message_ids(self, Py_ssize_t start, Py_ssize_t end):
        """Return the ids in Ok answers to Produce. Raises ValueError if one is not an id."""
        cdef Py_ssize_t place
        cdef list found = self.places(start, end)
        for place in range(start, end):
            if self.entries[place].size != MESSAGE_ID:
                raise ValueError("a message id has 8 bytes")
            put(found, place - start, load_u64(self.payload_at(&self.entries[place])))
        return found

    def records(self, Py_ssize_t start, Py_ssize_t end):
        """Return the records in Ok answers to Get Record. Raises ValueError if one is invalid."""
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
    """Read the complete answers in buffer[start:end].

    Returns (bytes consumed, AnswerBatch, whether the next answer's length exceeds
    `max_frame_bytes`). An incomplete answer at the end is left unconsumed.
    """
    cdef AnswerBatch batch = AnswerBatch.__new__(AnswerBatch)
    cdef Scan scan = start_scan(buffer.shape[0], start, end)
    cdef FrameFormat format = FrameFormat(HEADER, 4, 4, False, NO_MARK)
    cdef const unsigned char* data = &buffer[start] if scan.size else NULL
    while next_frame(&scan, data, &format, max_frame_bytes):
        batch.add(load_u32(data + scan.consumed), scan.payload, scan.length)
    if batch.count:
        batch.region = PyBytes_FromStringAndSize(<const char*>data, scan.consumed)
    return scan.consumed, batch, scan.reason == TOO_LARGE


# --- requests ------------------------------------------------------------------


cdef RequestPrefix produce_prefix(bytes topic, Py_ssize_t max_frame_bytes) except *:
    """Return the bytes of a Produce request before its body."""
    cdef RequestPrefix prefix
    cdef Py_ssize_t topic_size = PyBytes_GET_SIZE(topic)
    if not 1 <= topic_size <= MAX_NAME:
        raise ValueError(f"a topic has 1 to {MAX_NAME} bytes, not {topic_size}")
    if not 0 <= max_frame_bytes <= MAX_U32:
        raise ValueError("max_frame_bytes must fit 32 bits")
    store_u32(&prefix.data[0], PRODUCE)
    store_u32(&prefix.data[HEADER], <uint32_t>topic_size)
    memcpy(&prefix.data[PRODUCE_HEADER], PyBytes_AS_STRING(topic), topic_size)
    prefix.size = PRODUCE_HEADER + topic_size
    prefix.lengths[0] = LengthField(4, prefix.size - HEADER, False)
    prefix.length_count = 1
    return prefix


def encode_produces(bytes topic not None, contents, Py_ssize_t max_frame_bytes):
    """Return one buffer with a Produce request for each of `contents` (bytes-like objects).

    Raises OverflowError that names the first content that is too large for one frame.
    """
    cdef RequestPrefix prefix = produce_prefix(topic, max_frame_bytes)
    return encode_all(&prefix, contents, max_frame_bytes - prefix.lengths[0].empty)


def encode_run(
    bytes topic not None,
    contents not None,
    Py_ssize_t first,
    Py_ssize_t max_frame_bytes,
    Py_ssize_t max_bytes,
):
    """Return (Produce requests for a run of contents[first:], the place after the run).

    The run ends at the end of the list, before a content that is too large for one frame, or
    before the buffer would exceed `max_bytes`; a single request may exceed that.
    """
    cdef RequestPrefix prefix = produce_prefix(topic, max_frame_bytes)
    cdef Py_ssize_t max_content = max_frame_bytes - prefix.lengths[0].empty
    return encode_contents(&prefix, contents, first, max_content, max_bytes)


def encode_gets(
    bytes subscriber not None, Py_ssize_t count, int32_t max_blocking_s, bint records=False
):
    """Return a buffer with `count` equal Get Message requests, or Get Record if `records`."""
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
