/* Hash table from topic names in received bytes to topics.
 *
 * Open addressing with linear probing and backward-shift deletion, so there are no tombstones
 * to collect. A topic keeps its address until it is dropped.
 *
 * A topic is *idle* if it has no reader and is not held. It then only remembers verdicts, so
 * that a publisher who is denied costs one call of the policy and not one per message. The
 * owner of the table bounds the idle topics and sweeps them together.
 *
 * The table takes no lock: see router.h for who may read and change it.
 */
#ifndef POLYBUS_TOPIC_TABLE_H
#define POLYBUS_TOPIC_TABLE_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "bytes_inline.h"
#include "topic_hash.h"

enum { PB_MAX_TOPIC = 255 };

typedef enum { PB_UNKNOWN, PB_ALLOW, PB_DENY } pb_verdict;

typedef struct pb_topic {
    uint64_t hash;
    _Atomic uint64_t next_id; /* threads advance it while they route, hence atomic */
    uint64_t generation;      /* of the policy that the verdicts below belong to */
    uint8_t *verdicts;        /* by identity class */
    uint32_t verdict_count;
    uint32_t subscribers; /* number of the interned set; 0 is the empty set */
    uint8_t collect;
    uint8_t durable; /* committed first; the bus then publishes it from a trusted source */
    uint8_t hold;
    uint8_t name_size;
    int collected; /* scratch of a general route: index of its column, or -1 */
    unsigned char name[];
} pb_topic;

typedef struct pb_topic_table {
    pb_topic **slots;
    size_t capacity; /* a power of two */
    size_t count;
    size_t idle; /* topics that exist only for their verdicts */
    uint64_t seed;
} pb_topic_table;

static inline int pb_topic_is_idle(const pb_topic *topic) {
    return topic->subscribers == 0 && !topic->collect && !topic->hold && !topic->durable;
}

static inline int pb_topic_is_named(const pb_topic *topic, const unsigned char *name, size_t size) {
    return topic->name_size == size && polybus_same(topic->name, name, size);
}

static inline uint64_t pb_topic_next_id(pb_topic *topic) {
    return atomic_load_explicit(&topic->next_id, memory_order_relaxed);
}

static inline void pb_topic_set_next_id(pb_topic *topic, uint64_t next_id) {
    atomic_store_explicit(&topic->next_id, next_id, memory_order_relaxed);
}

/* `shared` says whether another thread may advance it meanwhile: a locked addition takes as long as
   a fifth of all other work on a message. */
static inline void pb_topic_advance(pb_topic *topic, uint64_t count, int shared) {
    if (shared)
        atomic_fetch_add_explicit(&topic->next_id, count, memory_order_relaxed);
    else
        pb_topic_set_next_id(topic, pb_topic_next_id(topic) + count);
}

/* The seed must be random: a client that chooses topic names must not be able to force
   collisions. Returns 0, or -1 without memory. */
static inline int pb_topics_init(pb_topic_table *table, uint64_t seed) {
    table->capacity = 256;
    table->count = table->idle = 0;
    table->seed = seed;
    table->slots = calloc(table->capacity, sizeof(pb_topic *));
    return table->slots == NULL ? -1 : 0;
}

static inline void pb_topic_free(pb_topic *topic) {
    free(topic->verdicts);
    free(topic);
}

static inline void pb_topics_free(pb_topic_table *table) {
    size_t at;
    if (table->slots == NULL) return;
    for (at = 0; at < table->capacity; at++)
        if (table->slots[at] != NULL) pb_topic_free(table->slots[at]);
    free(table->slots);
    table->slots = NULL;
}

static inline pb_topic *pb_topics_find(
    const pb_topic_table *table, const unsigned char *name, size_t size) {
    uint64_t hash = polybus_topic_hash(name, size, table->seed);
    size_t at = hash & (table->capacity - 1);
    pb_topic *topic;
    while ((topic = table->slots[at]) != NULL) {
        if (topic->hash == hash && pb_topic_is_named(topic, name, size)) return topic;
        at = (at + 1) & (table->capacity - 1);
    }
    return NULL;
}

static inline void pb_topics_place(pb_topic **slots, size_t capacity, pb_topic *topic) {
    size_t at = topic->hash & (capacity - 1);
    while (slots[at] != NULL) at = (at + 1) & (capacity - 1);
    slots[at] = topic;
}

static inline int pb_topics_grow(pb_topic_table *table) {
    size_t wider = table->capacity * 2;
    pb_topic **slots = calloc(wider, sizeof(pb_topic *));
    size_t at;
    if (slots == NULL) return -1;
    for (at = 0; at < table->capacity; at++)
        if (table->slots[at] != NULL) pb_topics_place(slots, wider, table->slots[at]);
    free(table->slots);
    table->slots = slots;
    table->capacity = wider;
    return 0;
}

/* Returns the topic of this name, which has 1 to 255 bytes. A new one is idle and has no
   verdicts. Returns NULL without memory. */
static inline pb_topic *pb_topics_find_or_add(
    pb_topic_table *table, const unsigned char *name, size_t size) {
    pb_topic *topic = pb_topics_find(table, name, size);
    if (topic != NULL) return topic;
    /* At most half full: linear probing degrades quickly above that. */
    if ((table->count + 1) * 2 > table->capacity && pb_topics_grow(table) < 0) return NULL;
    topic = calloc(1, sizeof(pb_topic) + size);
    if (topic == NULL) return NULL;
    topic->hash = polybus_topic_hash(name, size, table->seed);
    topic->name_size = (uint8_t)size;
    topic->collected = -1;
    memcpy(topic->name, name, size);
    pb_topics_place(table->slots, table->capacity, topic);
    table->count++;
    table->idle++;
    return topic;
}

/* Removes an idle topic and closes the gap in its probe chain. */
static inline void pb_topics_drop(pb_topic_table *table, pb_topic *topic) {
    size_t mask = table->capacity - 1;
    size_t hole = topic->hash & mask;
    size_t at, home;
    while (table->slots[hole] != topic) hole = (hole + 1) & mask;
    for (at = (hole + 1) & mask; table->slots[at] != NULL; at = (at + 1) & mask) {
        home = table->slots[at]->hash & mask;
        /* A topic may move into the hole only if its home slot is not after the hole. */
        if (((at - home) & mask) >= ((at - hole) & mask)) {
            table->slots[hole] = table->slots[at];
            hole = at;
        }
    }
    table->slots[hole] = NULL;
    pb_topic_free(topic);
    table->count--;
    table->idle--;
}

static inline void pb_topics_sweep_idle(pb_topic_table *table) {
    size_t at = 0;
    pb_topic *topic;
    while (at < table->capacity && table->idle) {
        topic = table->slots[at];
        if (topic != NULL && pb_topic_is_idle(topic))
            pb_topics_drop(table, topic); /* may move another topic to this slot, so `at` stays */
        else
            at++;
    }
}

/* Counts a change between used and idle, and drops a topic that became idle. */
static inline void pb_topics_update_idle(pb_topic_table *table, pb_topic *topic, int was_idle) {
    if (pb_topic_is_idle(topic)) {
        table->idle += !was_idle;
        pb_topics_drop(table, topic);
    } else {
        table->idle -= was_idle;
    }
}

static inline pb_verdict pb_topic_verdict(
    const pb_topic *topic, uint32_t identity, uint64_t generation) {
    if (topic->generation != generation || identity >= topic->verdict_count) return PB_UNKNOWN;
    return (pb_verdict)topic->verdicts[identity];
}

/* Returns 0, or -1 without memory. */
static inline int pb_topic_remember_verdict(
    pb_topic *topic, uint32_t identity, uint64_t generation, pb_verdict verdict) {
    if (identity >= topic->verdict_count) {
        uint8_t *grown = realloc(topic->verdicts, (size_t)identity + 1);
        if (grown == NULL) return -1;
        memset(grown + topic->verdict_count, PB_UNKNOWN, identity + 1 - topic->verdict_count);
        topic->verdicts = grown;
        topic->verdict_count = identity + 1;
    }
    if (topic->generation != generation) {
        /* The first verdict under a new policy invalidates all older ones. */
        memset(topic->verdicts, PB_UNKNOWN, topic->verdict_count);
        topic->generation = generation;
    }
    topic->verdicts[identity] = (uint8_t)verdict;
    return 0;
}

#endif
