"""The short path of ephemeral topics: one message to the one reader of a live topic, and back.

A program that sends a message and waits, or asks for one and waits, pays for every
step in between. dialects/freud/server/ephemeral_topics.py and dialects/freud/server/ephemeral_delivery.py are the rules, and do everything;
here the most common case of each verb is carried out again, compiled, on the same
objects. Whatever is not that case is left alone, as if it had not been asked:

    produce   the topic is live, nobody pushes, one reader pulls and has room,
              and the policy is known to allow it
    take      the subscription is the caller's, its connection is open, and a
              message is there that is no deletion notice

So no answer but Ok is ever given here, and every check of the long path is made, in
an order that changes nothing. `tests/property/bus` runs both against one model.
"""
cimport cython
from cpython.dict cimport PyDict_Next
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint64_t

from polybus.kernel.quota_account cimport BYTES
from polybus.kernel.subscriber_table cimport SubscriberTable
from polybus.kernel.topic_index cimport ALLOW, Topic
from polybus.dialects.freud.server.unread_queue cimport GATHERED, Range, Unread, Writer


@cython.final
cdef class Tally:
    """Messages and bytes that ephemeral topics took and gave, beside what the fan-out counts."""


cdef class Life:
    """One life of a topic (dialects/freud/server/topic_lifecycle.py): who reads it, and what is buffered for later."""

    def __cinit__(self, bytes name not None, *args, **kwargs):
        self.name = name
        self.readers = {}
        self.writer = Writer()
        self.buffer = []


cdef class Lives:
    """A topic's current life, if there is one, and those that were marked for deletion."""

    def __cinit__(self, bytes name not None, *args, **kwargs):
        self.name = name
        self.marked = []


@cython.final
cdef class ShortPath:
    """`topics` (of Lives) and `readers` (of Unread) are the bus's own tables."""

    def __init__(
        self,
        dict topics not None,
        dict readers not None,
        SubscriberTable registry not None,
        Tally tally not None,
        int64_t max_unread_messages,
        wall_ns,
    ):
        self.topics = topics
        self.readers = readers
        self.registry = registry
        self.tally = tally
        self.max_unread_messages = max_unread_messages
        self.wall_ns = wall_ns

    cdef bint produce(
        self, object source, bytes name, const unsigned char* body, Py_ssize_t size, uint64_t* message_id
    ) except -1:
        """False, with nothing changed, if this is a case for the long path."""
        cdef Life life = live(self.topics.get(name))
        cdef Topic* topic
        cdef Unread reader
        cdef Range found
        if life is None or len(life.readers) != 1 or size >= GATHERED:
            return False
        topic = self.registry.table.find(name, len(name))
        if topic is NULL or topic.subscribers != 0 or not self.may_produce(source, topic):
            return False
        reader = only_reader(life)
        if not self.has_room(reader, size):
            return False
        found = life.writer.write_one(topic.next_id, body, size, self.wall_ns())
        reader.account.try_charge(BYTES, size)
        message_id[0] = topic.next_id
        topic.next_id += 1
        reader.put(found)
        self.tally.received += 1
        self.tally.received_bytes += <uint64_t>size
        if reader.waiters:
            (<object>reader).wake()
        return True

    cdef bint may_produce(self, object source, const Topic* topic) except -1:
        """Without rules about it everybody may; else the verdict that the fan-out remembers."""
        if self.registry.routing:
            return False
        if not self.registry.has_produce_rules:
            return True
        return self.registry.table.verdict(topic, source.identity, self.registry.generation) == ALLOW

    cdef bint has_room(self, Unread reader, Py_ssize_t size) noexcept:
        if reader.account is None or reader.held_messages >= self.max_unread_messages:
            return False
        return reader.account.has_room(BYTES, size)

    cdef Unread reader(self, object account, bytes reader_id):
        """The subscription, if it is the account's, in use, and has a message to take."""
        cdef Unread reader = self.readers.get(reader_id)
        if reader is None or reader.account is None or not reader.is_owned or not reader.ranges:
            return None
        if reader.account.key != account or (<Range?>reader.ranges[0]).chunk.notice:
            return None
        return reader

    cdef int confirm(self, Unread reader, Range taken) except -1:
        """What was taken is in the reader's socket."""
        cdef int64_t size = taken.body_bytes()
        if reader.gone:
            return 0
        reader.confirm(taken)
        reader.account.refund(BYTES, size)
        self.tally.delivered += <uint64_t>(taken.end - taken.start)
        self.tally.delivered_bytes += <uint64_t>size
        return 0


cdef Life live(Lives topic):
    """The current life, if it is live by dialects/freud/server/topic_lifecycle.py: no earlier one is left, nothing waits."""
    if topic is None or topic.current is None or topic.marked or topic.current.buffer:
        return None
    return topic.current


cdef Unread only_reader(Life life):
    cdef PyObject* value = NULL
    cdef Py_ssize_t place = 0
    PyDict_Next(life.readers, &place, NULL, &value)
    return <Unread?>value
