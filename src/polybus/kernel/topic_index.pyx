"""Hash table from topic names in received bytes to entries, without Python objects.

Open addressing with linear probing and backward-shift deletion, so there are no tombstones
to collect. An entry keeps its address until it is dropped.

An entry is *idle* if the topic has no reader and is not held. It then only remembers
verdicts, so that a publisher who is denied costs one call of the policy and not one per
message. The owner of the table bounds the idle entries and sweeps them together.
"""
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc, PyMem_Realloc
from libc.string cimport memcpy, memset

import os

cdef extern from "bytes_inline.h":
    bint same "polybus_same"(const unsigned char* a, const unsigned char* b, size_t size) noexcept nogil

cdef extern from "topic_hash.h":
    uint64_t polybus_topic_hash(const unsigned char* name, size_t size, uint64_t seed) noexcept nogil


cdef inline void free_topic(Topic* topic) noexcept:
    PyMem_Free(topic.verdicts)
    PyMem_Free(topic)


cdef class TopicTable:
    def __cinit__(self):
        self.capacity = 256
        # A random seed: a client that chooses topic names must not be able to force collisions.
        self.seed = int.from_bytes(os.urandom(8), "little")
        self.slots = <Topic**>PyMem_Calloc(self.capacity, sizeof(Topic*))
        if self.slots is NULL:
            raise MemoryError

    def __dealloc__(self):
        cdef size_t at
        if self.slots is NULL:
            return
        for at in range(self.capacity):
            if self.slots[at] is not NULL:
                free_topic(self.slots[at])
        PyMem_Free(self.slots)

    cdef Topic* find(self, const unsigned char* name, Py_ssize_t size) noexcept nogil:
        cdef uint64_t hash = polybus_topic_hash(name, size, self.seed)
        cdef size_t at = hash & (self.capacity - 1)
        cdef Topic* topic
        while True:
            topic = self.slots[at]
            if topic is NULL:
                return NULL
            if topic.hash == hash and topic.name_size == size and same(topic.name, name, size):
                return topic
            at = (at + 1) & (self.capacity - 1)

    cdef Topic* find_or_add(self, const unsigned char* name, Py_ssize_t size) except NULL:
        """Return the entry of this name. A new one is idle and has no verdicts.

        Raises ValueError if the name is empty or longer than 255 bytes.
        """
        cdef Topic* topic = self.find(name, size)
        cdef size_t at
        if topic is not NULL:
            return topic
        if not 0 < size <= 255:
            raise ValueError(f"topic must have 1 to 255 bytes, got {size}")
        # At most half full: linear probing degrades quickly above that.
        if (self.count + 1) * 2 > self.capacity:
            self.grow()
        # The name is the last field, so a short name takes a short allocation.
        topic = <Topic*>PyMem_Malloc(sizeof(Topic) - 255 + size)
        if topic is NULL:
            raise MemoryError
        memset(topic, 0, sizeof(Topic) - 255)
        topic.hash = polybus_topic_hash(name, size, self.seed)
        topic.name_size = size
        topic.collected = -1
        memcpy(topic.name, name, size)
        at = topic.hash & (self.capacity - 1)
        while self.slots[at] is not NULL:
            at = (at + 1) & (self.capacity - 1)
        self.slots[at] = topic
        self.count += 1
        self.idle += 1
        return topic

    cdef int grow(self) except -1:
        cdef size_t wider = self.capacity * 2
        cdef Topic** slots = <Topic**>PyMem_Calloc(wider, sizeof(Topic*))
        cdef size_t old, at
        if slots is NULL:
            raise MemoryError
        for old in range(self.capacity):
            if self.slots[old] is NULL:
                continue
            at = self.slots[old].hash & (wider - 1)
            while slots[at] is not NULL:
                at = (at + 1) & (wider - 1)
            slots[at] = self.slots[old]
        PyMem_Free(self.slots)
        self.slots = slots
        self.capacity = wider
        return 0

    cdef int drop(self, Topic* topic) except -1:
        """Remove an idle entry and close the gap in its probe chain."""
        cdef size_t mask = self.capacity - 1
        cdef size_t hole = topic.hash & mask
        cdef size_t at, home
        while self.slots[hole] is not topic:
            hole = (hole + 1) & mask
        at = (hole + 1) & mask
        while self.slots[at] is not NULL:
            home = self.slots[at].hash & mask
            # An entry may move into the hole only if its home slot is not after the hole.
            if ((at - home) & mask) >= ((at - hole) & mask):
                self.slots[hole] = self.slots[at]
                hole = at
            at = (at + 1) & mask
        self.slots[hole] = NULL
        free_topic(topic)
        self.count -= 1
        self.idle -= 1
        return 0

    cdef int sweep_idle(self) except -1:
        cdef size_t at = 0
        cdef Topic* topic
        while at < self.capacity and self.idle:
            topic = self.slots[at]
            if topic is not NULL and is_idle(topic):
                self.drop(topic)  # may move another entry to this slot, so `at` stays
            else:
                at += 1
        return 0

    cdef Verdict verdict(self, const Topic* topic, uint32_t identity, uint64_t generation) noexcept nogil:
        if topic.generation != generation or identity >= topic.verdict_count:
            return UNKNOWN
        return <Verdict>topic.verdicts[identity]

    cdef int remember_verdict(self, Topic* topic, uint32_t identity, uint64_t generation, Verdict verdict) except -1:
        cdef uint8_t* grown
        if identity >= topic.verdict_count:
            grown = <uint8_t*>PyMem_Realloc(topic.verdicts, identity + 1)
            if grown is NULL:
                raise MemoryError
            memset(grown + topic.verdict_count, UNKNOWN, identity + 1 - topic.verdict_count)
            topic.verdicts = grown
            topic.verdict_count = identity + 1
        if topic.generation != generation:
            # The first verdict under a new policy invalidates all older ones.
            memset(topic.verdicts, UNKNOWN, topic.verdict_count)
            topic.generation = generation
        topic.verdicts[identity] = verdict
        return 0
