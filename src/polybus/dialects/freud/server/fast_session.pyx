"""Freud's fast path: one Produce or Get, executed and answered without Python.

A program that sends a request and waits for its answer pays for every step in between.
A connection that has no other request pending, and has sent exactly one, is answered
here if the request is the most common case of its kind:

    Produce   the topic is live and has no push reader and exactly one pull reader,
              that reader has room, and the policy is known to allow it
    Get       the subscription is the caller's, its connection is open, and its next
              message is neither a deletion notice nor a body that needs an escape

Every other request goes to `receive_slow_path` in session.py, as if it had not been
looked at: several requests (executed together), malformed ones, every answer but Ok. The rules
are those of topic_lifecycle.py and ephemeral_delivery.py; the fast path handles a subset
of them on the same objects, and makes every check of the slow path.
`tests/property/bus` runs both paths against one model.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.dict cimport PyDict_Next
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t

from polybus.dialects.freud.server.unread_queue cimport GATHERED, Range, UnreadQueue, ChunkWriter
from polybus.kernel.byte_order cimport load_length, load_u32, store_u32, store_u64
from polybus.kernel.quota_account cimport BYTES
from polybus.kernel.router cimport (
    PB_ALLOW,
    pb_topic,
    pb_topic_advance,
    pb_topic_next_id,
    pb_topic_verdict,
)
from polybus.kernel.subscriber_table cimport SubscriberTable

cdef extern from "bytes_inline.h":
    void copy "polybus_copy"(unsigned char* out, const unsigned char* source, size_t size) noexcept nogil

cdef enum:
    HEADER = 8  # type or code 4, length 4
    NAME_LENGTH = 4
    SUBSCRIBER_ID = 16
    GET_PAYLOAD = 20  # subscriber id 16, max_blocking 4
    MESSAGE_ID = 8
    RECORD_HEADER = 20  # message id 8, timestamp 8, flags 4
    PRODUCE = 4
    GET_MESSAGE = 5
    GET_RECORD = 8
    OK = 0

# The states that the fast path tests. The Python enums take their values from these
# constants (TopicState in topic_lifecycle.py, Phase and Halt in session.py).
cdef enum:
    STATE_LIVE = 1
    PHASE_OPEN = 0
    HALT_NONE = 0

LIVE = STATE_LIVE
OPEN = PHASE_OPEN
NOT_HALTED = HALT_NONE


# --- topics ------------------------------------------------------------------


@cython.final
cdef class MessageCounts:
    """Messages and bytes that entered and left ephemeral topics outside the fan-out."""

    cdef public uint64_t received, received_bytes, delivered, delivered_bytes


cdef class IncarnationBase:
    """The fields of an incarnation (topic_lifecycle.py) that the fast path reads."""

    cdef readonly bytes name
    cdef readonly dict readers  # by subscriber id
    cdef readonly ChunkWriter writer
    cdef public list buffer

    def __cinit__(self, bytes name not None, *args, **kwargs):
        self.name = name
        self.readers = {}
        self.writer = ChunkWriter()
        self.buffer = []


cdef class TopicBase:
    """A topic's lifecycle state, its current incarnation, and those marked for deletion."""

    cdef readonly bytes name
    cdef public int state
    cdef public IncarnationBase current
    cdef readonly list marked
    cdef public bint is_restricted  # not everyone may produce, even if there are no rules

    def __cinit__(self, bytes name not None, *args, **kwargs):
        self.name = name
        self.marked = []


@cython.final
cdef class FastPath:
    """Produce and Get on the bus's own tables: `topics` of TopicBase, `readers` of UnreadQueue."""

    cdef dict topics
    cdef dict readers
    cdef SubscriberTable subscribers
    cdef MessageCounts counts
    cdef int64_t max_unread_messages
    cdef object wall_ns

    def __init__(
        self,
        dict topics not None,
        dict readers not None,
        SubscriberTable subscribers not None,
        MessageCounts counts not None,
        int64_t max_unread_messages,
        wall_ns,
    ):
        self.topics = topics
        self.readers = readers
        self.subscribers = subscribers
        self.counts = counts
        self.max_unread_messages = max_unread_messages
        self.wall_ns = wall_ns

    cdef bint produce(
        self, object source, bytes name, const unsigned char* body, Py_ssize_t size, uint64_t* message_id
    ) except -1:
        """Put one message. Returns False, with nothing changed, if the slow path must do it."""
        cdef TopicBase topic = self.topics.get(name)
        cdef IncarnationBase current
        cdef pb_topic* entry
        cdef UnreadQueue reader
        cdef Range written
        if topic is None or topic.state != STATE_LIVE:
            return False
        current = topic.current
        if len(current.readers) != 1 or size >= GATHERED:
            return False
        entry = self.subscribers.find(name)
        if entry is NULL or entry.subscribers != 0 or not self.may_produce(source, topic, entry):
            return False
        reader = only_reader(current)
        if not self.has_room(reader, size):
            return False
        message_id[0] = pb_topic_next_id(entry)
        written = current.writer.write_one(message_id[0], body, size, self.wall_ns())
        reader.account.try_charge(BYTES, size)
        pb_topic_advance(entry, 1, True)
        reader.put(written)
        self.counts.received += 1
        self.counts.received_bytes += <uint64_t>size
        if reader.waiters:
            (<object>reader).wake()
        return True

    cdef bint may_produce(self, object source, TopicBase topic, const pb_topic* entry) except -1:
        """Without rules for producing, everyone may; else the verdict that the fan-out cached."""
        # While a buffer is being routed, its generation and verdicts may be changing.
        if self.subscribers.routing:
            return False
        if not self.subscribers.router.has_produce_rules and not topic.is_restricted:
            return True
        return pb_topic_verdict(entry, source.identity, self.subscribers.router.generation) == PB_ALLOW

    cdef bint has_room(self, UnreadQueue reader, Py_ssize_t size) noexcept:
        if reader.account is None or reader.held_messages >= self.max_unread_messages:
            return False
        return reader.account.has_room(BYTES, size)

    cdef UnreadQueue find_reader(self, object account, bytes reader_id, bint record):
        """Return the subscription if the account owns it and it has a message to take."""
        cdef UnreadQueue reader = self.readers.get(reader_id)
        cdef Range first
        # A detached one is attached to the connection: the slow path does that.
        if reader is None or reader.account is None or not reader.is_owned or not reader.ranges:
            return None
        first = reader.ranges[0]
        if reader.account.key != account or first.chunk.notice:
            return None
        return reader if record or not first.is_reserved(first.start) else None

    cdef int confirm(self, UnreadQueue reader, Range taken) except -1:
        """Count the messages as consumed: they are in the reader's socket."""
        cdef int64_t size = taken.body_bytes()
        if reader.gone:
            return 0
        reader.confirm(taken)
        reader.account.refund(BYTES, size)
        self.counts.delivered += <uint64_t>(taken.end - taken.start)
        self.counts.delivered_bytes += <uint64_t>size
        return 0


cdef UnreadQueue only_reader(IncarnationBase current):
    cdef PyObject* value = NULL
    cdef Py_ssize_t place = 0
    PyDict_Next(current.readers, &place, NULL, &value)
    return <UnreadQueue?>value


# --- one connection ----------------------------------------------------------


cdef class FastSession:
    """The state of a session that the fast path tests; session.py does everything else."""

    cdef public int phase, halt
    cdef public object pending  # deque of requests that were read and not executed
    cdef public object answers, pipe
    cdef public Py_ssize_t uncommitted  # Produces that wait for their commit
    # Messages received from and sent to the client, on either path.
    cdef public uint64_t received_messages, received_bytes, sent_messages, sent_bytes
    cdef FastPath path
    cdef object source, account
    cdef Py_ssize_t max_frame_bytes

    def __cinit__(self, *args, **kwargs):
        self.pending = self.answers = self.pipe = None

    def enable_fast_path(self, FastPath path not None, source, account, Py_ssize_t max_frame_bytes):
        """Use the fast path from now on. `account` owns the subscriptions it may read."""
        self.path = path
        self.source = source
        self.account = account
        self.max_frame_bytes = max_frame_bytes

    def receive(self, buffer, Py_ssize_t start, Py_ssize_t end):
        """Execute the requests in buffer[start:end]. Returns the number of bytes consumed."""
        if self.is_idle() and self.serve(buffer, start, end):
            return end - start
        return self.receive_slow_path(buffer, start, end)

    cdef bint is_idle(self) except -1:
        """True if nothing halts the connection and no earlier request is pending."""
        if self.phase != PHASE_OPEN or self.halt != HALT_NONE:
            return False
        if self.uncommitted or self.path is None or self.pending:
            return False
        return not self.answers.stalled

    cdef bint serve(self, buffer, Py_ssize_t start, Py_ssize_t end) except -1:
        """Answer the request. Returns False, with nothing done, if the slow path must do it."""
        cdef Py_buffer view
        PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
        try:
            if not 0 <= start <= end <= view.len:
                raise ValueError("start and end must lie within the buffer")
            return self.request(<const unsigned char*>view.buf + start, end - start)
        finally:
            PyBuffer_Release(&view)

    cdef bint request(self, const unsigned char* at, Py_ssize_t size) except -1:
        cdef int64_t length
        cdef uint32_t kind
        if size < HEADER:
            return False
        kind = load_u32(at)
        length = load_length(at + 4)
        if length != size - HEADER or length > self.max_frame_bytes:
            return False
        if kind == PRODUCE:
            return self.produce(at + HEADER, <Py_ssize_t>length)
        if (kind == GET_MESSAGE or kind == GET_RECORD) and length == GET_PAYLOAD:
            return self.get(at + HEADER, kind == GET_RECORD)
        return False

    cdef bint produce(self, const unsigned char* at, Py_ssize_t length) except -1:
        cdef int64_t name_size
        cdef uint64_t message_id
        cdef Py_ssize_t size
        cdef bytes answer
        if length < NAME_LENGTH:
            return False
        name_size = load_length(at)
        if name_size > length - NAME_LENGTH:
            return False
        at += NAME_LENGTH
        size = <Py_ssize_t>(length - NAME_LENGTH - name_size)
        # The name needs no check: only names of existing topics are found.
        if not self.path.produce(self.source, at[:name_size], at + name_size, size, &message_id):
            return False
        self.received_messages += 1
        self.received_bytes += <uint64_t>size
        answer = PyBytes_FromStringAndSize(NULL, HEADER + MESSAGE_ID)
        store_u64(header(answer, MESSAGE_ID), message_id)
        self.pipe.write(answer)
        return True

    cdef bint get(self, const unsigned char* at, bint record) except -1:
        cdef UnreadQueue reader = self.path.find_reader(self.account, at[:SUBSCRIBER_ID], record)
        cdef Range taken
        cdef bytes answer
        if reader is None:
            return False
        taken = reader.take(1, 0)
        answer = encode_answer(taken, record)
        self.pipe.write(answer)
        # A message is consumed only when the socket has taken its whole answer.
        if self.answers.stalled or self.pipe.has_failed():
            self.answers.add_written(len(answer), reader, taken, records=record)
        else:
            self.path.confirm(reader, taken)
            self.sent_messages += 1
            self.sent_bytes += <uint64_t>taken.body_bytes()
        return True


cdef unsigned char* header(bytes answer, Py_ssize_t length) noexcept:
    cdef unsigned char* out = <unsigned char*>PyBytes_AS_STRING(answer)
    return store_u32(store_u32(out, OK), <uint32_t>length)


cdef bytes encode_answer(Range taken, bint record):
    """Return the answer that carries one message."""
    cdef Py_ssize_t size = <Py_ssize_t>taken.body_bytes()
    cdef Py_ssize_t length = size + (RECORD_HEADER if record else 0)
    cdef bytes answer = PyBytes_FromStringAndSize(NULL, HEADER + length)
    cdef unsigned char* out = header(answer, length)
    if record:
        out = store_u64(out, taken.id())
        out = store_u64(out, (<const uint64_t*>taken.chunk.times.data.as_voidptr)[taken.start])
        out = store_u32(out, 0)
    copy(out, taken.chunk.body() + taken.chunk.places()[taken.start], size)
    return answer
