"""Who reads what: subscribers, their topics, and the policy's remembered answers.

The bus changes this table; the fan-out (fanout.pyx) reads it for every message.
While a buffer is being routed nothing here may change, and an attempt to is an
error of the caller, not a crash.
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
        self.detached = set()  # of (number, topic): subscribed, and not among its readers
        self.encodings = [None] * 32
        self.subscribers = <Subscriber*>PyMem_Malloc(self.capacity * sizeof(Subscriber))
        if self.subscribers is NULL:
            raise MemoryError

    def __dealloc__(self):
        PyMem_Free(self.subscribers)

    def add_subscriber(self, outbox, Encoding encoding not None) -> int:
        """A number for a reader; `outbox` is handed back with every output for it."""
        known = self.encodings[encoding.number]
        if known is not None and known is not encoding:
            raise ValueError("another encoding has this number")
        number = self.allocate_number()
        self.encodings[encoding.number] = encoding
        self.subscribers[number] = Subscriber(0, 0, 0, 0, NULL, encoding.number, 0, 1)
        self.outboxes[number] = outbox
        self.names[number] = set()
        return number

    def remove_subscriber(self, uint32_t number) -> int:
        """Ends all its subscriptions; the number may be given to the next one."""
        ended = self.unsubscribe_all(number)
        self.set_full(number, False)
        self.subscribers[number].alive = 0
        self.outboxes[number] = None
        self.names[number] = None
        self.free.append(number)
        return ended

    def subscribe(self, uint32_t number, bytes topic) -> bool:
        """False if it was subscribed already."""
        cdef Subscriber* subscriber = self.require_subscriber(number)
        if topic in self.names[number]:
            return False
        self.link(number, topic, subscriber.encoding)
        self.names[number].add(topic)
        return True

    def unsubscribe(self, uint32_t number, bytes topic) -> bool:
        """False if there was no such subscription."""
        self.require_subscriber(number)
        if topic not in self.names[number]:
            return False
        self.unlink(number, topic)
        self.names[number].discard(topic)
        return True

    def detach(self, uint32_t number, bytes topic) -> None:
        """Nothing more is relayed to it, and yet it stays subscribed: it is fed otherwise."""
        self.require_subscriber(number)
        if topic not in self.names[number] or (number, topic) in self.detached:
            raise KeyError(topic)
        self.unlink(number, topic)
        self.detached.add((number, topic))

    def attach(self, uint32_t number, bytes topic) -> None:
        """Messages are relayed to it again."""
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
        """While full, nothing is routed to it: its publishers are stopped instead."""
        cdef Subscriber* subscriber = self.require_subscriber(number)
        self.full_count += <int>full - <int>subscriber.full
        subscriber.full = full

    def set_collect(self, bytes topic, bint collect) -> None:
        """Hands the topic's messages to the bus, one batch a buffer, beside any relaying."""
        cdef Topic* entry = self.entry(topic)
        cdef bint idle = is_idle(entry)
        entry.collect = collect
        self.update_idle(entry, idle)

    def set_durable(self, bytes topic, bint durable) -> None:
        """Hands the topic's messages to the bus alone; readers get what it publishes itself."""
        cdef Topic* entry = self.entry(topic)
        cdef bint idle = is_idle(entry)
        entry.durable = durable
        self.update_idle(entry, idle)

    def set_hold(self, bytes topic, bint hold) -> None:
        """Keeps the topic's entry, and with it its ids, also while nobody reads it."""
        cdef Topic* entry = self.entry(topic)
        cdef bint idle = is_idle(entry)
        entry.hold = hold
        self.update_idle(entry, idle)

    def has_topic(self, bytes topic) -> bool:
        """Does anybody read or hold it?"""
        cdef Topic* entry = self.table.find(topic, len(topic))
        return entry is not NULL and not is_idle(entry)

    def next_id(self, bytes topic) -> int:
        cdef Topic* entry = self.table.find(topic, len(topic))
        return 0 if entry is NULL else entry.next_id

    def set_next_id(self, bytes topic, uint64_t next_id) -> None:
        """For a topic somebody reads or holds; ids are forgotten with the last of them."""
        cdef Topic* entry = self.table.find(topic, len(topic))
        if entry is NULL or is_idle(entry):
            raise KeyError(topic)
        self.require_not_routing()
        entry.next_id = next_id

    def sent_totals(self, uint32_t number) -> tuple:
        """Messages and bytes handed out for this subscriber."""
        cdef Subscriber* subscriber = self.require_subscriber(number)
        return subscriber.messages, subscriber.bytes

    def forget_verdicts(self) -> None:
        """Forgets every verdict: the policy has changed."""
        self.require_not_routing()
        self.generation += 1

    def verdict(self, uint32_t identity, bytes topic) -> bool | None:
        """The remembered answer of the policy to a class of callers; None if there is none."""
        cdef Topic* entry = self.table.find(topic, len(topic))
        if entry is NULL:
            return None
        known = self.table.verdict(entry, identity, self.generation)
        return None if known == UNKNOWN else known == ALLOW

    def remember_verdict(self, uint32_t identity, bytes topic, bint allowed) -> None:
        """What the policy says; forgotten with the topic's entry and with the policy."""
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
            raise RuntimeError("the table cannot change while a buffer is routed")
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
            self.update_idle(entry, idle)
        return 0

    cdef int unlink(self, uint32_t number, bytes topic) except -1:
        if (number, topic) in self.detached:
            self.detached.discard((number, topic))
            return 0
        cdef Topic* entry = self.table.find(topic, len(topic))
        cdef uint32_t old = entry.subscribers
        cdef uint32_t encodings = 0
        cdef uint32_t at, member
        for at in range(self.sets.sets[old].size):
            member = self.sets.sets[old].members[at]
            if member != number:
                encodings |= <uint32_t>1 << self.subscribers[member].encoding
        entry.subscribers = self.sets.without_member(old, number, encodings)
        self.sets.release(old)
        return self.update_idle(entry, False)

    cdef int update_idle(self, Topic* topic, bint was_idle) except -1:
        """Books a change between read and idle; an entry that nobody needs goes."""
        cdef bint idle = is_idle(topic)
        self.table.idle += <int>idle - <int>was_idle
        if idle:
            self.table.drop(topic)
        return 0
