"""Produces and Gets on ephemeral topics: the rules of every message that a client produces.

A run of Produces to one topic, of one message or of thousands, is one operation:

    charge     each reader has room for the run and its user's account is charged, or none is
    deliver    the run takes the next ids, is stored once, and reaches all readers; then those
               that wait are woken

`produce` does both for a *plain* run: the topic is live, has pull readers and no push reader,
the policy is known to allow it, and every reader has room. It declines any other run and
changes nothing. ephemeral_delivery.py then takes the same two steps, with its own between them:
the reason of a refusal, evictions, push readers, the buffer of a topic that is created again.
"""
cimport cython
from cpython.dict cimport PyDict_Values
from libc.stdint cimport int64_t, uint64_t

from polybus.dialects.freud.server.request_scanner cimport ProduceRun
from polybus.dialects.freud.server.unread_queue cimport ChunkWriter, UnreadQueue, put_to
from polybus.kernel.fanout cimport Source
from polybus.kernel.quota_account cimport BYTES
from polybus.kernel.router cimport (
    PB_ALLOW,
    pb_source_identity,
    pb_topic,
    pb_topic_next_id,
    pb_topic_set_next_id,
    pb_topic_verdict,
)
from polybus.kernel.subscriber_table cimport SubscriberTable

from polybus.bus.quotas import BYTES as QUOTA_BYTES

UNREAD = "max_unread_messages"

# The state of a topic that accepts messages; TopicState in topic_lifecycle.py takes it from here.
cdef enum:
    STATE_LIVE = 1

LIVE = STATE_LIVE


@cython.final
cdef class MessageCounts:
    """Messages and bytes that entered and left ephemeral topics outside the fan-out."""

    cpdef add_received(self, uint64_t messages, uint64_t size):
        self.received += messages
        self.received_bytes += size


cdef class IncarnationBase:
    """The fields of an incarnation (topic_lifecycle.py) that a delivery reads."""

    def __cinit__(self, bytes name not None, *args, **kwargs):
        self.name = name
        self.readers = {}
        self.writer = ChunkWriter()
        self.buffer = []


cdef class TopicBase:
    """A topic's lifecycle state, its current incarnation, and those marked for deletion."""

    def __cinit__(self, bytes name not None, *args, **kwargs):
        self.name = name
        self.marked = []


@cython.final
cdef class PlainDelivery:
    """Works on the bus's own tables: `topics` of TopicBase, `readers` of UnreadQueue by id."""

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

    cpdef UnreadQueue find_reader(self, object account, bytes reader_id):
        """Return the subscription with this id if it is the account's."""
        cdef UnreadQueue reader = self.readers.get(reader_id)
        if reader is None or reader.account is None or reader.account.key != account:
            return None
        return reader

    cdef Py_ssize_t produce(self, Source source, ProduceRun run, uint64_t* first_id) except -1:
        """Deliver a plain run. Returns the number of readers; 0 if it is not plain."""
        cdef TopicBase topic = self.topics.get(run.topic)
        cdef IncarnationBase current
        cdef pb_topic* entry
        cdef Py_ssize_t readers
        cdef int64_t size = len(run.bodies)
        if topic is None or topic.state != STATE_LIVE:
            return 0
        current = topic.current
        readers = len(current.readers)
        entry = self.subscribers.find(run.topic)
        if not readers or entry is NULL or entry.subscribers != 0:
            return 0
        if not self.may_produce(source, topic, entry):
            return 0
        if self.charge(current, size, run.count) is not None:
            return 0
        first_id[0] = pb_topic_next_id(entry)
        self.store(current, entry, first_id[0], run)
        self.counts.add_received(<uint64_t>run.count, <uint64_t>size)
        return readers

    cdef bint may_produce(self, Source source, TopicBase topic, const pb_topic* entry) except -1:
        """Without rules for producing, everyone may; else the verdict that the fan-out cached."""
        # While a buffer is being routed, its generation and verdicts may be changing.
        if self.subscribers.routing:
            return False
        if not self.subscribers.router.has_produce_rules and not topic.is_restricted:
            return True
        identity = pb_source_identity(&source.publisher)
        return pb_topic_verdict(entry, identity, self.subscribers.router.generation) == PB_ALLOW

    cpdef str charge(self, IncarnationBase current, int64_t size, int64_t count):
        """Charge every reader or none. Returns the name of the limit that was reached, if any."""
        cdef list readers = PyDict_Values(current.readers)
        cdef UnreadQueue reader
        cdef Py_ssize_t at
        cdef str reached = None
        for at in range(len(readers)):
            reader = <UnreadQueue?>readers[at]
            if reader.held_messages + count > self.max_unread_messages:
                reached = UNREAD
            elif not reader.try_charge(size):
                reached = QUOTA_BYTES
            if reached is not None:
                release_all(readers, at, size)
                break
        return reached

    cpdef release(self, IncarnationBase current, int64_t size):
        """Undo `charge`."""
        cdef list readers = PyDict_Values(current.readers)
        release_all(readers, len(readers), size)

    cpdef deliver(self, IncarnationBase current, uint64_t first_id, ProduceRun run):
        """Deliver a run, whose first message has this id, to the readers that were charged."""
        cdef pb_topic* entry = self.subscribers.find(current.name)
        if entry is NULL:
            raise KeyError(current.name)
        self.store(current, entry, first_id, run)

    cdef int store(self, IncarnationBase current, pb_topic* entry, uint64_t first_id, ProduceRun run) except -1:
        self.subscribers.require_not_routing()
        pb_topic_set_next_id(entry, first_id + <uint64_t>run.count)
        if current.readers:
            messages = current.writer.store(first_id, run.ends(), run.count, run.bodies, self.wall_ns())
            put_to(PyDict_Values(current.readers), messages)
        return 0


cdef int release_all(list readers, Py_ssize_t count, int64_t size) except -1:
    cdef Py_ssize_t at
    for at in range(count):
        (<UnreadQueue>readers[at]).account.refund(BYTES, size)
    return 0
