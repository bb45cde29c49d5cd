/* Interned subscriber sets: topics with the same subscribers share one set.
 *
 * The scan gathers runs of messages by set number, so messages of two topics with the same
 * readers form one run. Number 0 is the empty set and is never stored.
 *
 * A set's hash is the sum of its members' hashes, so the hash of a set with one member more or
 * less is known without visiting the others. Adding or removing a member
 *   - shares the resulting set if it exists already,
 *   - changes the set in place if only this topic refers to it,
 *   - copies it otherwise.
 *
 * A set remembers its last such step. Topics with the same readers then follow one another from
 * set to set without comparing members: clients that subscribe to the same topics cost O(1) each.
 *
 * The table takes no lock: see router.h for who may read and change it.
 */
#ifndef POLYBUS_SUBSCRIBER_SET_H
#define POLYBUS_SUBSCRIBER_SET_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Readers are of at most 64 kinds: see pb_subscriber_kind in router.h. */
enum { PB_KINDS = 64 };

/* The set that another set became when a member joined or left. A set that has the member can
   only lose it, so the direction is known. */
typedef struct pb_set_step {
    uint32_t to;
    uint32_t member;
    uint64_t to_version; /* the step is valid while `to` has this version; 0: no step */
} pb_set_step;

typedef struct pb_set {
    uint32_t references; /* topics that point here */
    uint32_t size;
    uint32_t capacity;
    uint32_t next;     /* in the chain of its bucket or of free numbers; 0 ends it */
    uint64_t hash;     /* sum over the members */
    uint64_t version;  /* unique: differs for any two sets and any two states of one set */
    uint64_t kinds;    /* bit mask over the members */
    uint32_t *members; /* subscriber numbers, ascending */
    uint32_t *counts;  /* members of each kind; NULL while there is only one kind */
    pb_set_step step;
} pb_set;

typedef struct pb_set_table {
    pb_set *sets;
    uint32_t capacity;
    uint32_t used; /* numbers below were given out */
    uint32_t free; /* first of the chain of free numbers, or 0 */
    uint32_t count;
    uint32_t *buckets;
    uint32_t bucket_count; /* a power of two */
    uint64_t seed;
    uint64_t version; /* of the last change */
} pb_set_table;

/* Returns 0, or -1 without memory. */
static inline int pb_sets_init(pb_set_table *table, uint64_t seed) {
    memset(table, 0, sizeof *table);
    table->capacity = table->bucket_count = 64;
    table->used = 1; /* number 0 is the empty set */
    table->seed = seed;
    table->sets = calloc(table->capacity, sizeof(pb_set));
    table->buckets = calloc(table->bucket_count, sizeof(uint32_t));
    return table->sets == NULL || table->buckets == NULL ? -1 : 0;
}

static inline void pb_sets_free(pb_set_table *table) {
    uint32_t number;
    for (number = 0; table->sets != NULL && number < table->used; number++) {
        free(table->sets[number].members);
        free(table->sets[number].counts);
    }
    free(table->sets);
    free(table->buckets);
    table->sets = NULL;
    table->buckets = NULL;
}

/* The finalizer of splitmix64. The seed is random, so collisions cannot be chosen. */
static inline uint64_t pb_member_hash(const pb_set_table *table, uint32_t member) {
    uint64_t hash = table->seed + (member + 1) * 0x9e3779b97f4a7c15ULL;
    hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9ULL;
    hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebULL;
    return hash ^ (hash >> 31);
}

/* Returns the index of `member`, or the index at which it must be inserted. */
static inline uint32_t pb_set_position(const pb_set *set, uint32_t member) {
    uint32_t low = 0, high = set->size;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (set->members[middle] < member)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static inline int pb_same_members(const uint32_t *a, const uint32_t *b, uint32_t count) {
    return count == 0 || memcmp(a, b, count * sizeof(uint32_t)) == 0;
}

/* Whether `larger` is `smaller` and one member more, which is at index `at`. */
static inline int pb_set_extends(
    const pb_set *larger, const pb_set *smaller, uint32_t member, uint32_t at) {
    return larger->members[at] == member && pb_same_members(larger->members, smaller->members, at)
        && pb_same_members(larger->members + at + 1, smaller->members + at, smaller->size - at);
}

static inline void pb_sets_enter(pb_set_table *table, uint32_t number) {
    uint32_t *bucket = &table->buckets[table->sets[number].hash & (table->bucket_count - 1)];
    table->sets[number].next = *bucket;
    *bucket = number;
}

static inline void pb_sets_leave(pb_set_table *table, uint32_t number) {
    uint32_t *link = &table->buckets[table->sets[number].hash & (table->bucket_count - 1)];
    while (*link != number) link = &table->sets[*link].next;
    *link = table->sets[number].next;
}

static inline int pb_sets_grow_buckets(pb_set_table *table) {
    uint32_t *wider = calloc(2 * (size_t)table->bucket_count, sizeof(uint32_t));
    uint32_t number;
    if (wider == NULL) return -1;
    free(table->buckets);
    table->buckets = wider;
    table->bucket_count *= 2;
    for (number = 1; number < table->used; number++)
        if (table->sets[number].size) pb_sets_enter(table, number);
    return 0;
}

/* Returns a free number whose set is empty; 0 without memory. */
static inline uint32_t pb_sets_allocate(pb_set_table *table) {
    uint32_t number = table->free;
    if (table->count >= table->bucket_count && pb_sets_grow_buckets(table) < 0) return 0;
    if (number) {
        table->free = table->sets[number].next;
        return number;
    }
    if (table->used == table->capacity) {
        pb_set *grown = realloc(table->sets, 2 * (size_t)table->capacity * sizeof(pb_set));
        if (grown == NULL) return 0;
        table->sets = grown;
        table->capacity *= 2;
    }
    memset(&table->sets[table->used], 0, sizeof(pb_set));
    return table->used++;
}

static inline void pb_sets_give_back(pb_set_table *table, uint32_t number) {
    pb_set *set = &table->sets[number];
    free(set->members);
    free(set->counts);
    memset(set, 0, sizeof *set);
    set->next = table->free;
    table->free = number;
}

/* Drops one reference; the last one frees the set. */
static inline void pb_sets_release(pb_set_table *table, uint32_t number) {
    if (number == 0 || --table->sets[number].references) return;
    pb_sets_leave(table, number);
    pb_sets_give_back(table, number);
    table->count--;
}

/* Changes the room for members. Returns 0, or -1 without memory. */
static inline int pb_set_resize(pb_set *set, uint32_t capacity) {
    uint32_t *members = realloc(set->members, (size_t)capacity * sizeof(uint32_t));
    if (members == NULL) return -1;
    set->members = members;
    set->capacity = capacity;
    return 0;
}

/* Makes room for one member of this kind and counts nothing yet, so that the change that
   follows cannot fail. Returns 0, or -1 without memory. */
static inline int pb_set_prepare(pb_set *set, uint32_t kind) {
    if (set->size == set->capacity && pb_set_resize(set, set->capacity ? 2 * set->capacity : 4) < 0)
        return -1;
    if (set->counts == NULL && set->kinds && set->kinds != (uint64_t)1 << kind) {
        set->counts = calloc(PB_KINDS, sizeof(uint32_t));
        if (set->counts == NULL) return -1;
        set->counts[__builtin_ctzll(set->kinds)] = set->size; /* all are of the one kind so far */
    }
    return 0;
}

static inline void pb_set_insert(pb_set *set, uint32_t at, uint32_t member, uint32_t kind) {
    memmove(set->members + at + 1, set->members + at, (set->size - at) * sizeof(uint32_t));
    set->members[at] = member;
    set->size++;
    set->kinds |= (uint64_t)1 << kind;
    if (set->counts != NULL) set->counts[kind]++;
}

static inline void pb_set_delete(pb_set *set, uint32_t at, uint32_t kind) {
    set->size--;
    memmove(set->members + at, set->members + at + 1, (set->size - at) * sizeof(uint32_t));
    if (set->counts != NULL && --set->counts[kind] == 0) set->kinds &= ~((uint64_t)1 << kind);
    /* Half of the room stays free, so that joining and leaving by turns moves nothing. A failure
       to shrink leaves the larger array, which is valid. */
    if (set->capacity > 16 && set->size < set->capacity / 4)
        (void)pb_set_resize(set, set->capacity / 2);
}

/* Returns the number of a copy that is not entered into the table yet; 0 without memory. */
static inline uint32_t pb_sets_copy(pb_set_table *table, uint32_t from) {
    uint32_t number = pb_sets_allocate(table);
    pb_set *copy = &table->sets[number];
    const pb_set *old = &table->sets[from];
    if (number == 0) return 0;
    if (pb_set_resize(copy, old->size + 1) == 0) {
        if (old->counts != NULL) copy->counts = malloc(PB_KINDS * sizeof(uint32_t));
        if (old->counts == NULL || copy->counts != NULL) {
            if (old->size) memcpy(copy->members, old->members, old->size * sizeof(uint32_t));
            if (old->counts) memcpy(copy->counts, old->counts, PB_KINDS * sizeof(uint32_t));
            copy->size = old->size;
            copy->kinds = old->kinds;
            copy->hash = old->hash;
            return number;
        }
    }
    pb_sets_give_back(table, number);
    return 0;
}

/* Returns the number of the set that equals set `from` with the member added or removed, and
   takes a reference to it; 0 if there is none. */
static inline uint32_t pb_sets_share(
    pb_set_table *table, uint32_t from, uint32_t member, uint32_t at, int added, uint64_t hash) {
    pb_set *old = &table->sets[from];
    uint32_t size = added ? old->size + 1 : old->size - 1;
    uint32_t number = old->step.to;
    pb_set *found = &table->sets[number];
    if (old->step.to_version == 0 || old->step.member != member
        || found->version != old->step.to_version) {
        number = table->buckets[hash & (table->bucket_count - 1)];
        for (; number; number = found->next) {
            found = &table->sets[number];
            if (found->hash == hash && found->size == size
                && (added ? pb_set_extends(found, old, member, at)
                          : pb_set_extends(old, found, member, at)))
                break;
        }
        if (number == 0) return 0;
        old->step = (pb_set_step){number, member, found->version};
    }
    found->references++;
    return number;
}

/* Changes `number` in place, or a copy of it if other topics refer to it. Returns the number of
   the changed set; 0 without memory. */
static inline uint32_t pb_sets_change(
    pb_set_table *table, uint32_t number, uint32_t member, uint32_t kind, uint32_t at, int added,
    uint64_t hash) {
    uint32_t changed = number;
    int in_place = table->sets[number].references == 1;
    pb_set *set;
    if (!in_place && (changed = pb_sets_copy(table, number)) == 0) return 0;
    set = &table->sets[changed];
    if (added && pb_set_prepare(set, kind) < 0) {
        if (!in_place) pb_sets_give_back(table, changed);
        return 0;
    }
    if (in_place)
        pb_sets_leave(table, changed);
    else
        table->count++;
    if (added)
        pb_set_insert(set, at, member, kind);
    else
        pb_set_delete(set, at, kind);
    set->hash = hash;
    set->version = ++table->version;
    set->step.to_version = 0;
    pb_sets_enter(table, changed);
    if (!in_place) {
        set->references = 1;
        table->sets[number].references -= number != 0;
        table->sets[number].step = (pb_set_step){changed, member, set->version};
    }
    return changed;
}

/* Returns the number of the set with a member of this kind added, in exchange for the caller's
   reference to `number`. Returns 0 without memory; then nothing has changed. */
static inline uint32_t pb_sets_add(
    pb_set_table *table, uint32_t number, uint32_t member, uint32_t kind) {
    uint32_t at = pb_set_position(&table->sets[number], member);
    uint64_t hash = table->sets[number].hash + pb_member_hash(table, member);
    uint32_t shared = pb_sets_share(table, number, member, at, 1, hash);
    if (shared == 0) return pb_sets_change(table, number, member, kind, at, 1, hash);
    pb_sets_release(table, number);
    return shared;
}

/* Sets `number` to the set without the member, in exchange for the caller's reference. Returns
   0, or -1 without memory; then nothing has changed. */
static inline int pb_sets_remove(
    pb_set_table *table, uint32_t *number, uint32_t member, uint32_t kind) {
    const pb_set *old = &table->sets[*number];
    uint32_t at = pb_set_position(old, member);
    uint64_t hash = old->hash - pb_member_hash(table, member);
    uint32_t rest = 0;
    if (old->size > 1) {
        rest = pb_sets_share(table, *number, member, at, 0, hash);
        if (rest == 0) {
            rest = pb_sets_change(table, *number, member, kind, at, 0, hash);
            if (rest == 0) return -1;
            *number = rest;
            return 0;
        }
    }
    pb_sets_release(table, *number);
    *number = rest;
    return 0;
}

#endif
