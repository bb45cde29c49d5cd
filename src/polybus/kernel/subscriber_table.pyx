"""The subscriptions: subscribers, their topics, and the remembered verdicts of the policy.

The bus changes this table; the fan-out (fanout.pyx) reads it for every message. The table
must not change while a buffer is routed: methods that change it raise RuntimeError then,
instead of leaving the scan with a dangling pointer.

The tables themselves are in router.h, where other threads read them. Each method that changes
them does so as one change, while no thread routes.
"""
from libc.stdint cimport uint32_t, uint64_t

from polybus.kernel.framing cimport Encoding
from polybus.kernel.outbox cimport Outbox, pb_outbox
from polybus.kernel.router cimport (
    PB_ALLOW,
    PB_DENY,
    PB_UNKNOWN,
    pb_counter_get,
    pb_router_add_subscriber,
    pb_router_change_begin,
    pb_router_change_end,
    pb_router_free,
    pb_router_init,
    pb_router_link,
    pb_router_remove_subscriber,
    pb_router_set,
    pb_router_set_full,
    pb_router_set_outbox,
    pb_router_subscriber,
    pb_router_unlink,
    pb_topic_is_idle,
    pb_topic_next_id,
    pb_topic_remember_verdict,
    pb_topic_set_next_id,
    pb_topic_verdict,
    pb_topics_find,
    pb_topics_find_or_add,
    pb_topics_update_idle,
    pb_verdict,
)

import os

cdef enum:
    COLLECT
    DURABLE
    HOLD


cdef class SubscriberTable:
    def __cinit__(self, *args, **kwargs):
        # A random seed: a client that chooses topic names must not be able to force collisions.
        if pb_router_init(&self.router, int.from_bytes(os.urandom(8), "little")) < 0:
            raise MemoryError
        self.worker = self.router.workers[0]
        self.outboxes = []
        self.names = []
        self.detached = set()  # (number, topic) pairs: subscribed, but the fan-out skips them
        self.encodings = [None] * 32

    def __dealloc__(self):
        pb_router_free(&self.router)

    def add_subscriber(self, outbox, Encoding encoding not None) -> int:
        """Add a subscriber. Returns its number; every output for it names `outbox`.

        Raises ValueError if another encoding has the same number.
        """
        known = self.encodings[encoding.number]
        if known is not None and known is not encoding:
            raise ValueError(f"encoding number must be unique, got {encoding.number} twice")
        self.require_not_routing()
        cdef uint32_t number
        cdef pb_outbox* box = NULL
        if isinstance(outbox, Outbox):
            box = (<Outbox>outbox).box
            self.turn = (<Outbox>outbox).turn
            self.worker.turn = &self.turn.turn
        pb_router_change_begin(&self.router)
        number = pb_router_add_subscriber(&self.router, encoding.number)
        if number != 0xFFFFFFFF and box is not NULL:
            pb_router_set_outbox(&self.router, number, box)
        pb_router_change_end(&self.router)
        if number == 0xFFFFFFFF:
            raise MemoryError
        if number == len(self.outboxes):
            self.outboxes.append(None)
            self.names.append(None)
        self.encodings[encoding.number] = encoding
        self.outboxes[number] = outbox
        self.names[number] = set()
        return number

    def remove_subscriber(self, uint32_t number) -> int:
        """End all its subscriptions. Returns their count; the number may be assigned again."""
        ended = self.unsubscribe_all(number)
        # Kept until the end: freeing it may run code that uses this table.
        outbox = self.outboxes[number]
        self.outboxes[number] = None
        self.names[number] = None
        # A stale number raises KeyError from here on, until it is assigned again.
        pb_router_change_begin(&self.router)
        pb_router_remove_subscriber(&self.router, number)
        pb_router_change_end(&self.router)
        return ended

    def subscribe(self, uint32_t number, bytes topic) -> bool:
        """Subscribe. Returns False if it was subscribed already."""
        self.require_subscriber(number)
        if topic in self.names[number]:
            return False
        self.link(number, topic)
        self.names[number].add(topic)
        return True

    def unsubscribe(self, uint32_t number, bytes topic) -> bool:
        """Unsubscribe. Returns False if there was no such subscription."""
        self.require_subscriber(number)
        if topic not in self.names[number]:
            return False
        if (number, topic) in self.detached:
            self.detached.discard((number, topic))
        else:
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
        self.require_subscriber(number)
        if (number, topic) not in self.detached:
            raise KeyError(topic)
        self.detached.discard((number, topic))
        self.link(number, topic)

    def unsubscribe_all(self, uint32_t number) -> int:
        self.require_subscriber(number)
        cdef set topics = self.names[number]
        cdef bytes topic
        cdef int done = 0
        ended = len(topics)
        if self.detached:
            # A detached subscriber is in no set; there is nothing to unlink.
            for pair in [(number, name) for name in topics if (number, name) in self.detached]:
                self.detached.discard(pair)
                topics.discard(pair[1])
        # One change for all, because each waits for every thread that routes. Nothing within it
        # allocates a Python object: the collector may run code that uses this table.
        pb_router_change_begin(&self.router)
        while topics and done == 0:
            topic = topics.pop()
            done = pb_router_unlink(&self.router, number, topic, len(topic))
        pb_router_change_end(&self.router)
        if done < 0:
            raise MemoryError
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
        cdef pb_topic* entry = self.find(topic)
        return 0 if entry is NULL else pb_router_set(&self.router, entry.subscribers).size

    def set_full(self, uint32_t number, bint full) -> None:
        """Mark a subscriber as full: its publishers block instead of filling its outbox further."""
        pb_router_set_full(&self.router, self.require_subscriber(number), full)

    def set_collect(self, bytes topic, bint collect) -> None:
        """Set whether the bus gets the topic's messages, one batch per buffer, besides the relaying."""
        self.set_flag(topic, COLLECT, collect)

    def set_durable(self, bytes topic, bint durable) -> None:
        """Set whether only the bus gets the messages. It publishes them to readers after the commit."""
        self.set_flag(topic, DURABLE, durable)

    def set_hold(self, bytes topic, bint hold) -> None:
        """Set whether the entry, and so its next id, outlives the last reader."""
        self.set_flag(topic, HOLD, hold)

    def has_topic(self, bytes topic) -> bool:
        """Return whether the topic has a reader or is held."""
        cdef pb_topic* entry = self.find(topic)
        return entry is not NULL and not pb_topic_is_idle(entry)

    def next_id(self, bytes topic) -> int:
        cdef pb_topic* entry = self.find(topic)
        return 0 if entry is NULL else pb_topic_next_id(entry)

    def set_next_id(self, bytes topic, uint64_t next_id) -> None:
        """Set the next id. Raises KeyError unless the topic has a reader or is held."""
        cdef pb_topic* entry = self.find(topic)
        if entry is NULL or pb_topic_is_idle(entry):
            raise KeyError(topic)
        self.require_not_routing()
        pb_topic_set_next_id(entry, next_id)

    def sent_totals(self, uint32_t number) -> tuple:
        """Return the messages and bytes sent to this subscriber."""
        cdef pb_subscriber* subscriber = self.require_subscriber(number)
        cdef uint64_t messages = pb_counter_get(&subscriber.messages)
        cdef uint64_t size = pb_counter_get(&subscriber.bytes)
        if subscriber.outbox is not NULL:
            messages += subscriber.outbox.messages
            size += subscriber.outbox.message_bytes
        return messages, size

    def forget_verdicts(self) -> None:
        """Forget every verdict because the policy has changed."""
        self.require_not_routing()
        pb_router_change_begin(&self.router)
        # Verdicts carry the generation that they belong to, so no entry needs to be visited.
        self.router.generation += 1
        pb_router_change_end(&self.router)

    def verdict(self, uint32_t identity, bytes topic) -> bool | None:
        """Return the remembered verdict for an identity class, or None if it is unknown."""
        cdef pb_topic* entry = self.find(topic)
        if entry is NULL:
            return None
        known = pb_topic_verdict(entry, identity, self.router.generation)
        return None if known == PB_UNKNOWN else known == PB_ALLOW

    def remember_verdict(self, uint32_t identity, bytes topic, bint allowed) -> None:
        """Remember a verdict until the entry is dropped or the policy changes."""
        cdef pb_topic* entry = self.find(topic)
        cdef pb_verdict verdict = PB_ALLOW if allowed else PB_DENY
        cdef int done
        self.require_not_routing()
        if entry is NULL:
            return
        pb_router_change_begin(&self.router)
        done = pb_topic_remember_verdict(entry, identity, self.router.generation, verdict)
        pb_router_change_end(&self.router)
        if done < 0:
            raise MemoryError

    @property
    def has_produce_rules(self) -> bool:
        """Whether messages without a reader are judged, too."""
        return self.router.has_produce_rules

    @has_produce_rules.setter
    def has_produce_rules(self, bint has_rules):
        # The policy may set it while it is asked, within a route.
        pb_router_change_begin(&self.router)
        self.router.has_produce_rules = has_rules
        pb_router_change_end(&self.router)

    @property
    def topic_count(self) -> int:
        return self.router.topics.count - self.router.topics.idle

    @property
    def stops(self) -> int:
        """How often changes have stopped the threads that route."""
        return self.router.stops

    @property
    def set_count(self) -> int:
        return self.router.sets.count

    cdef int require_not_routing(self) except -1:
        if self.routing:
            raise RuntimeError("the subscriber table must not change while a buffer is routed")
        return 0

    cdef pb_topic* find(self, bytes topic) except? NULL:
        return pb_topics_find(&self.router.topics, topic, len(topic))

    cdef pb_subscriber* require_subscriber(self, uint32_t number) except NULL:
        cdef pb_subscriber* subscriber
        if number >= self.router.used:
            raise KeyError(number)
        subscriber = pb_router_subscriber(&self.router, number)
        if not subscriber.alive:
            raise KeyError(number)
        self.require_not_routing()
        return subscriber

    cdef int set_flag(self, bytes topic, int flag, bint value) except -1:
        cdef pb_topic* entry
        cdef bint was_idle
        self.require_not_routing()
        require_name(topic)
        pb_router_change_begin(&self.router)
        entry = pb_topics_find_or_add(&self.router.topics, topic, len(topic))
        if entry is not NULL:
            was_idle = pb_topic_is_idle(entry)
            if flag == COLLECT:
                entry.collect = value
            elif flag == DURABLE:
                entry.durable = value
            else:
                entry.hold = value
            pb_topics_update_idle(&self.router.topics, entry, was_idle)
        pb_router_change_end(&self.router)
        if entry is NULL:
            raise MemoryError
        return 0

    cdef int link(self, uint32_t number, bytes topic) except -1:
        cdef int done
        require_name(topic)
        pb_router_change_begin(&self.router)
        done = pb_router_link(&self.router, number, topic, len(topic))
        pb_router_change_end(&self.router)
        if done < 0:
            raise MemoryError
        return 0

    cdef int unlink(self, uint32_t number, bytes topic) except -1:
        cdef int done
        pb_router_change_begin(&self.router)
        done = pb_router_unlink(&self.router, number, topic, len(topic))
        pb_router_change_end(&self.router)
        if done < 0:
            raise MemoryError
        return 0


cdef int require_name(bytes topic) except -1:
    if not 0 < len(topic) <= 255:
        raise ValueError(f"topic must have 1 to 255 bytes, got {len(topic)}")
    return 0
