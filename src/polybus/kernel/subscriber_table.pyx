"""The subscriptions: subscribers, their topics, and the remembered verdicts of the policy.

The bus changes this table; the fan-out (fanout.pyx) reads it for every message. The table
must not change while a buffer is routed: methods that change it raise RuntimeError then,
instead of leaving the scan with a dangling pointer.
"""
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc

from polybus.kernel.framing cimport Encoding
from polybus.kernel.subscriber_set cimport SubscriberSetTable
from polybus.kernel.topic_index cimport ALLOW, DENY, UNKNOWN, Topic, TopicTable, is_idle


cdef class SubscriberTable:
    def __cinit__(self, *args, **kwargs):
        self.table = TopicTable()
        self.sets = SubscriberSetTable()
        self.capacity = 64
        self.generation = 1
        self.outboxes = []
        self.names = []
        self.free = []
        self.detached = set()  # (number, topic) pairs: subscribed, but the fan-out skips them
        self.encodings = [None] * 32
        self.subscribers = <Subscriber*>PyMem_Malloc(self.capacity * sizeof(Subscriber))
        if self.subscribers is NULL:
            raise MemoryError

    def __dealloc__(self):
        PyMem_Free(self.subscribers)

    def add_subscriber(self, outbox, Encoding encoding not None) -> int:
        """Add a subscriber. Returns its number; every output for it names `outbox`.

        Raises ValueError if another encoding has the same number.
        """
        known = self.encodings[encoding.number]
        if known is not None and known is not encoding:
            raise ValueError(f"encoding number must be unique, got {encoding.number} twice")
        number = self.allocate_number()
        self.encodings[encoding.number] = encoding
        self.subscribers[number] = Subscriber(0, 0, 0, 0, NULL, encoding.number, 0, 1)
        self.outboxes[number] = outbox
        self.names[number] = set()
        return number

    def remove_subscriber(self, uint32_t number) -> int:
        """End all its subscriptions. Returns their count; the number may be assigned again."""
        ended = self.unsubscribe_all(number)
        self.set_full(number, False)  # keeps full_count right
        # The outbox is dropped here; a stale number raises KeyError until it is assigned again.
        self.subscribers[number].alive = 0
        self.outboxes[number] = None
        self.names[number] = None
        self.free.append(number)
        return ended

    def subscribe(self, uint32_t number, bytes topic) -> bool:
        """Subscribe. Returns False if it was subscribed already."""
        cdef Subscriber* subscriber = self.require_subscriber(number)
        if topic in self.names[number]:
            return False
        self.link(number, topic, subscriber.encoding)
        self.names[number].add(topic)
        return True

    def unsubscribe(self, uint32_t number, bytes topic) -> bool:
        """Unsubscribe. Returns False if there was no such subscription."""
        self.require_subscriber(number)
        if topic not in self.names[number]:
            return False
        self.unlink(number, topic)
        self.names[number].discard(topic)
        return True

    def detach(self, uint32_t number, bytes topic) -> None:
        """Stop relaying a topic to a subscriber that a catch-up cursor serves; it stays subscribed.

        Raises KeyError if it is not subscribed, or detached already.
        """
        self.require_subscriber(number)
        if topic not in self.names[number] or (number, topic) in self.detached:
            raise KeyError(topic)
        self.unlink(number, topic)
        self.detached.add((number, topic))

    def attach(self, uint32_t number, bytes topic) -> None:
        """Relay the topic to a detached subscriber again. Raises KeyError if it is not detached."""
        cdef Subscriber* subscriber = self.require_subscriber(number)
        if (number, topic) not in self.detached:
            raise KeyError(topic)
        self.detached.discard((number, topic))
        self.link(number, topic, subscriber.encoding)

    def unsubscribe_all(self, uint32_t number) -> int:
        self.require_subscriber(number)
        cdef set topics = self.names[number]
        ended = len(topics)
        while topics:
            self.unlink(number, topics.pop())
        return ended

    def is_subscribed(self, uint32_t number, bytes topic) -> bool:
        self.require_subscriber(number)
        return topic in self.names[number]

    def topics_of(self, uint32_t number) -> frozenset:
        self.require_subscriber(number)
        return frozenset(self.names[number])

    def subscription_count(self, uint32_t number) -> int:
        self.require_subscriber(number)
        return len(self.names[number])

    def subscriber_count(self, bytes topic) -> int:
        cdef Topic* entry = self.table.find(topic, len(topic))
        return 0 if entry is NULL else self.sets.sets[entry.subscribers].size

    def set_full(self, uint32_t number, bint full) -> None:
        """Mark a subscriber as full: its publishers block instead of filling its outbox further."""
        cdef Subscriber* subscriber = self.require_subscriber(number)
        self.full_count += <int>full - <int>subscriber.full
        subscriber.full = full

    def set_collect(self, bytes topic, bint collect) -> None:
        """Set whether the bus gets the topic's messages, one batch per buffer, besides the relaying."""
        cdef Topic* entry = self.entry(topic)
        cdef bint idle = is_idle(entry)
        entry.collect = collect
        self.update_idle(entry, idle)

    def set_durable(self, bytes topic, bint durable) -> None:
        """Set whether only the bus gets the messages. It publishes them to readers after the commit."""
        cdef Topic* entry = self.entry(topic)
        cdef bint idle = is_idle(entry)
        entry.durable = durable
        self.update_idle(entry, idle)

    def set_hold(self, bytes topic, bint hold) -> None:
        """Set whether the entry, and so its next id, outlives the last reader."""
        cdef Topic* entry = self.entry(topic)
        cdef bint idle = is_idle(entry)
        entry.hold = hold
        self.update_idle(entry, idle)

    def has_topic(self, bytes topic) -> bool:
        """Return whether the topic has a reader or is held."""
        cdef Topic* entry = self.table.find(topic, len(topic))
        return entry is not NULL and not is_idle(entry)

    def next_id(self, bytes topic) -> int:
        cdef Topic* entry = self.table.find(topic, len(topic))
        return 0 if entry is NULL else entry.next_id

    def set_next_id(self, bytes topic, uint64_t next_id) -> None:
        """Set the next id. Raises KeyError unless the topic has a reader or is held."""
        cdef Topic* entry = self.table.find(topic, len(topic))
        if entry is NULL or is_idle(entry):
            raise KeyError(topic)
        self.require_not_routing()
        entry.next_id = next_id

    def sent_totals(self, uint32_t number) -> tuple:
        """Return the messages and bytes sent to this subscriber."""
        cdef Subscriber* subscriber = self.require_subscriber(number)
        return subscriber.messages, subscriber.bytes

    def forget_verdicts(self) -> None:
        """Forget every verdict because the policy has changed."""
        self.require_not_routing()
        # Verdicts carry the generation that they belong to, so no entry needs to be visited.
        self.generation += 1

    def verdict(self, uint32_t identity, bytes topic) -> bool | None:
        """Return the remembered verdict for an identity class, or None if it is unknown."""
        cdef Topic* entry = self.table.find(topic, len(topic))
        if entry is NULL:
            return None
        known = self.table.verdict(entry, identity, self.generation)
        return None if known == UNKNOWN else known == ALLOW

    def remember_verdict(self, uint32_t identity, bytes topic, bint allowed) -> None:
        """Remember a verdict until the entry is dropped or the policy changes."""
        cdef Topic* entry = self.table.find(topic, len(topic))
        self.require_not_routing()
        if entry is not NULL:
            self.table.remember_verdict(entry, identity, self.generation, ALLOW if allowed else DENY)

    @property
    def topic_count(self) -> int:
        return self.table.count - self.table.idle

    @property
    def set_count(self) -> int:
        return len(self.sets)

    cdef int require_not_routing(self) except -1:
        if self.routing:
            raise RuntimeError("the subscriber table must not change while a buffer is routed")
        return 0

    cdef Topic* entry(self, bytes topic) except NULL:
        self.require_not_routing()
        return self.table.find_or_add(topic, len(topic))

    cdef Subscriber* require_subscriber(self, uint32_t number) except NULL:
        if number >= self.used or not self.subscribers[number].alive:
            raise KeyError(number)
        self.require_not_routing()
        return &self.subscribers[number]

    cdef uint32_t allocate_number(self) except? 0xFFFFFFFF:
        cdef Subscriber* grown
        self.require_not_routing()
        # Numbers are reused so that the arrays stay as small as the number of live subscribers.
        if self.free:
            return self.free.pop()
        if self.used == self.capacity:
            grown = <Subscriber*>PyMem_Realloc(
                self.subscribers, 2 * <size_t>self.capacity * sizeof(Subscriber)
            )
            if grown is NULL:
                raise MemoryError
            self.subscribers = grown
            self.capacity *= 2
        self.outboxes.append(None)
        self.names.append(None)
        self.used += 1
        return self.used - 1

    cdef int link(self, uint32_t number, bytes topic, uint32_t encoding) except -1:
        cdef Topic* entry = self.entry(topic)
        cdef bint idle = is_idle(entry)
        cdef uint32_t old
        try:
            old = entry.subscribers
            entry.subscribers = self.sets.with_member(old, number, encoding)
            self.sets.release(old)
        finally:
            # Also after MemoryError: `entry` may have been added above and still be idle.
            self.update_idle(entry, idle)
        return 0

    cdef int unlink(self, uint32_t number, bytes topic) except -1:
        # A detached subscriber is in no set; there is nothing to unlink.
        if (number, topic) in self.detached:
            self.detached.discard((number, topic))
            return 0
        cdef Topic* entry = self.table.find(topic, len(topic))
        cdef uint32_t old = entry.subscribers
        cdef uint32_t encodings = 0
        cdef uint32_t at, member
        # The mask is rebuilt: other members may share the leaving one's encoding.
        for at in range(self.sets.sets[old].size):
            member = self.sets.sets[old].members[at]
            if member != number:
                encodings |= <uint32_t>1 << self.subscribers[member].encoding
        entry.subscribers = self.sets.without_member(old, number, encodings)
        self.sets.release(old)
        return self.update_idle(entry, False)

    cdef int update_idle(self, Topic* topic, bint was_idle) except -1:
        """Count a change between used and idle, and drop an entry that became idle."""
        cdef bint idle = is_idle(topic)
        self.table.idle += <int>idle - <int>was_idle
        if idle:
            self.table.drop(topic)
        return 0
