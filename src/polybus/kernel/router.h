/* The tables of the fan-out, and the scan: one received buffer in, one output per reader out.
 *
 *     received bytes ──framing──▶ frames ──topic table──▶ subscriber sets
 *                                                              │ runs
 *     one (chunk, size) per reader  ◀──────────copy or share───┘
 *
 * The scan gathers messages into *runs* of the same interned subscriber set. A buffer with one
 * run is the common case: all its readers share one chunk. Otherwise each reader's bytes are
 * measured first and then copied into one chunk of its own. So a reader costs one write per
 * buffer, independent of the number of topics, and holds no memory but its own.
 *
 * Readers of the sender's own dialect get the frames unchanged (`raw`), copied during the scan.
 * A *plain* route stops at the first message that needs more than that: another encoding, a
 * reader whose outbox is a Python object, a collected or durable topic. A *general* route records
 * such messages as pieces, columns and fragments, and fanout.pyx does the rest.
 *
 * The policy judges a message once per (identity class, topic, policy generation). The scan stops
 * at an unknown verdict, so that its caller asks the policy, remembers the verdict, and scans on.
 * A full reader stops the scan at the first message that would reach it. No message is routed
 * partially.
 *
 * Locks
 *     Only the thread of worker 0 changes the tables, also while it routes. So it reads them
 *     without a lock. Every other worker holds its own route lock from pb_worker_begin to
 *     pb_worker_end: while it scans one buffer and delivers the outputs. A change holds the route
 *     locks of all other workers, so nothing is routed meanwhile: sets change in place and memory
 *     may be freed. A change first takes the change lock and sets `changing`; a worker that sees
 *     it waits for the change lock, so busy workers cannot starve a change. Changes in a row may
 *     share one stop of the workers (pb_router_changes_begin), because each stop waits for the
 *     longest route.
 *     `full`, `full_count`, next ids and counters are atomic, and any thread may change them.
 */
#ifndef POLYBUS_ROUTER_H
#define POLYBUS_ROUTER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "bytes_inline.h"
#include "chunk.h"
#include "framing.h"
#include "outbox.h"
#include "subscriber_set.h"
#include "topic_table.h"

enum {
    PB_ENCODINGS = 32,
    PB_MAX_WORKERS = 64,
    PB_MAX_IDLE_TOPICS = 4096, /* topics kept for verdicts alone, about 1 MB */
    PB_SUBSCRIBER_PAGE = 256,  /* subscribers allocated together */
    PB_CHANGES_PER_STOP = 64   /* of the workers; a subscription takes Python about 10 us */
};

/* Written by one thread at a time and read by any. */
typedef _Atomic uint64_t pb_counter;

static inline uint64_t pb_counter_get(const pb_counter *counter) {
    return atomic_load_explicit(counter, memory_order_relaxed);
}

static inline void pb_counter_add(pb_counter *counter, uint64_t more) {
    /* There is one writer, so a plain addition is enough; an atomic one costs ten times as much. */
    uint64_t sum = atomic_load_explicit(counter, memory_order_relaxed) + more;
    atomic_store_explicit(counter, sum, memory_order_relaxed);
}

/* A publisher. Messages of a trusted source are not judged; the caller has done that. Only the
   thread that routes for it writes the counters. */
typedef struct pb_source {
    _Atomic uint32_t identity;
    int trusted;
    pb_counter messages, bytes, denied, unheard;
} pb_source;

static inline uint32_t pb_source_identity(const pb_source *source) {
    return atomic_load_explicit(&source->identity, memory_order_relaxed);
}

static inline void pb_source_reclassify(pb_source *source, uint32_t identity) {
    atomic_store_explicit(&source->identity, identity, memory_order_relaxed);
}

/* Keeps its address until the router is freed, so an outbox may refer to its own. */
typedef struct pb_subscriber {
    pb_counter messages, bytes; /* sent so far, only if `outbox` is NULL: else the outbox counts */
    pb_outbox *outbox;          /* NULL if the reader's outbox is a Python object */
    uint32_t next_free;
    _Atomic uint8_t full;
    uint8_t encoding;
    uint8_t alive;
} pb_subscriber;

/* A part of the raw bytes (or of an encoding of the pieces) that one set of readers gets. */
typedef struct pb_run {
    uint32_t subscribers; /* number of the set */
    size_t start;
    size_t end;
    uint64_t count;
    uint64_t unfit; /* messages that the encoding cannot carry */
} pb_run;

/* A message of a general route that is needed as a column or in another encoding. */
typedef struct pb_piece {
    pb_frame frame;
    size_t run;
    int column; /* index into the worker's columns, or -1 */
    int relayed;
} pb_piece;

/* The collected messages of one topic. */
typedef struct pb_column {
    pb_topic *topic;
    uint64_t first_id;
    size_t count;
    size_t size;
    int32_t *offset;
    unsigned char *body;
} pb_column;

/* What one reader gets of one buffer. */
typedef struct pb_output {
    uint32_t subscriber;
    pb_outbox *outbox; /* NULL if it is a Python object; then there is no chunk either */
    pb_chunk *chunk;   /* holds one reference; its first `size` bytes are the output */
    size_t size;
    uint64_t messages;
    unsigned char *cursor; /* write position while the bytes are copied */
} pb_output;

typedef enum pb_outcome { PB_HEARD, PB_KEPT, PB_UNHEARD, PB_DENIED } pb_outcome;

typedef enum pb_stop {
    PB_STOP_END,       /* all complete frames were consumed */
    PB_STOP_CONTROL,   /* a control frame: the session must act on it. Consumed, unless the route is plain */
    PB_STOP_BLOCKED,   /* the next message would reach a full reader */
    PB_STOP_BAD,       /* the next bytes are not a frame */
    PB_STOP_FRAGMENTS, /* a complete message follows; it must not overtake the fragments before */
    PB_STOP_JUDGE,     /* the policy must judge the next message */
    PB_STOP_GENERAL,   /* the next message needs the general route */
    PB_STOP_NO_MEMORY
} pb_stop;

typedef struct pb_routed {
    size_t consumed;
    pb_stop stop;
    int code;                   /* CONTROL, BAD: of the frame */
    const unsigned char *topic; /* CONTROL, JUDGE: in the buffer */
    size_t topic_size;
    uint32_t blocker; /* BLOCKED: number of the full reader */
    const pb_output *outputs;
    size_t output_count;
} pb_routed;

/* One thread that routes. The arrays are scratch of one buffer and keep their capacity, so a
   call allocates nothing for them. */
typedef struct pb_worker {
    pthread_mutex_t lock; /* the route lock; worker 0 needs none */
    unsigned number;
    pb_turn *turn; /* of the thread that routes */
    pb_counter messages, bytes, delivered, delivered_bytes, denied, unheard, too_large;
    pb_run *runs;
    size_t run_count, run_capacity;
    pb_piece *pieces;
    size_t piece_count, piece_capacity;
    pb_column *columns;
    size_t column_count, column_capacity;
    pb_frame *fragments;
    size_t fragment_count, fragment_capacity;
    pb_output *outputs;
    size_t output_count, output_capacity;
    uint32_t *output_of; /* by subscriber: index of its output + 1, or 0 */
    size_t output_of_capacity;
    pb_chunk *cached; /* the last chunk of raw bytes; reused once no outbox refers to it */
    /* Where the raw bytes go. `open_raw` returns memory of a general route's caller; without it
       they go to a chunk. */
    unsigned char *(*open_raw)(void *owner, size_t size);
    void *owner;
    unsigned char *raw;
    pb_chunk *raw_chunk;
    size_t room, filled;
    uint32_t own_bit;
    int skip; /* number of the encoding whose readers are skipped, or -1 */
    int plain_only;
    pb_topic *last; /* topic of the last message, or NULL if the next one must be looked up */
    pb_outcome last_outcome;
    int is_streak; /* the next message of the last topic only needs to be copied */
} pb_worker;

typedef struct pb_router {
    pb_topic_table topics;
    pb_set_table sets;
    pb_subscriber **pages;
    uint32_t page_count;
    uint32_t used; /* subscriber numbers below were given out */
    uint32_t free; /* first free number + 1, or 0 */
    _Atomic uint32_t full_count;
    uint64_t generation;
    int has_produce_rules;               /* then messages without a reader are judged, too */
    uint32_t outbox_counts[PB_ENCODINGS]; /* readers of each encoding with an outbox in C */
    pb_worker *workers[PB_MAX_WORKERS];
    unsigned worker_count;
    pthread_mutex_t change_lock;
    atomic_int changing;
    int is_stopped, shares_stops; /* by the thread of worker 0 */
    unsigned changes;             /* since the workers stopped */
    uint64_t stops;
} pb_router;

/* --- memory --------------------------------------------------------------- */

/* Makes room for more items. Returns 0, or -1 without memory. */
static inline int pb_make_room_for(
    size_t more, void **array, size_t used, size_t *capacity, size_t item) {
    size_t wider = *capacity ? *capacity : 64;
    void *grown;
    if (used + more <= *capacity) return 0;
    while (wider < used + more) wider *= 2;
    grown = realloc(*array, wider * item);
    if (grown == NULL) return -1;
    *array = grown;
    *capacity = wider;
    return 0;
}

static inline int pb_make_room(void **array, size_t used, size_t *capacity, size_t item) {
    return pb_make_room_for(1, array, used, capacity, item);
}

/* Whether a chunk of this capacity may hold so few bytes: an outbox is charged for the bytes, so
   the memory behind them must stay within a small factor. */
static inline int pb_chunk_fits(size_t capacity, size_t size) {
    return capacity >= size && capacity <= 4 * size + 256;
}

/* Returns a chunk to which no outbox refers; the worker keeps the reference. */
static inline pb_chunk *pb_worker_chunk(pb_worker *worker, size_t size) {
    pb_chunk *chunk = worker->cached;
    if (chunk != NULL && pb_chunk_fits(chunk->capacity, size) && pb_chunk_is_unshared(chunk))
        return chunk;
    chunk = pb_chunk_new(size);
    if (chunk == NULL) return NULL;
    if (worker->cached != NULL) pb_chunk_release(worker->cached);
    worker->cached = chunk;
    return chunk;
}

/* --- workers and locks ---------------------------------------------------- */

/* Returns the new worker, or NULL without memory or if there are 64 already. */
static inline pb_worker *pb_router_add_worker(pb_router *router) {
    pb_worker *worker;
    if (router->worker_count == PB_MAX_WORKERS) return NULL;
    worker = aligned_alloc(64, (sizeof(pb_worker) + 63) / 64 * 64);
    if (worker == NULL) return NULL;
    memset(worker, 0, sizeof *worker);
    pthread_mutex_init(&worker->lock, NULL);
    worker->number = router->worker_count;
    router->workers[router->worker_count++] = worker;
    return worker;
}

static inline void pb_worker_free(pb_worker *worker) {
    pthread_mutex_destroy(&worker->lock);
    if (worker->cached != NULL) pb_chunk_release(worker->cached);
    free(worker->runs);
    free(worker->pieces);
    free(worker->columns);
    free(worker->fragments);
    free(worker->outputs);
    free(worker->output_of);
    free(worker);
}

/* Forgets the buffer. Also after an error, so that a failed call leaves no marks in the tables. */
static inline void pb_worker_reset(pb_worker *worker) {
    size_t at;
    for (at = 0; at < worker->column_count; at++) worker->columns[at].topic->collected = -1;
    for (at = 0; at < worker->output_count; at++) {
        pb_output *output = &worker->outputs[at];
        if (output->chunk != NULL) pb_chunk_release(output->chunk);
        if (output->subscriber < worker->output_of_capacity)
            worker->output_of[output->subscriber] = 0;
    }
    worker->run_count = worker->piece_count = worker->column_count = 0;
    worker->fragment_count = worker->output_count = 0;
    worker->raw = NULL;
    worker->raw_chunk = NULL;
    worker->last = NULL;
}

static inline void pb_worker_begin(pb_router *router, pb_worker *worker) {
    if (worker->number == 0) return;
    if (atomic_load_explicit(&router->changing, memory_order_relaxed)) {
        pthread_mutex_lock(&router->change_lock);
        pthread_mutex_unlock(&router->change_lock);
    }
    pthread_mutex_lock(&worker->lock);
}

static inline void pb_worker_end(pb_worker *worker) {
    pb_worker_reset(worker);
    if (worker->number != 0) pthread_mutex_unlock(&worker->lock);
}

static inline void pb_router_resume_workers(pb_router *router) {
    unsigned at;
    router->is_stopped = 0;
    for (at = router->worker_count; at-- > 1;) pthread_mutex_unlock(&router->workers[at]->lock);
    atomic_store_explicit(&router->changing, 0, memory_order_relaxed);
    pthread_mutex_unlock(&router->change_lock);
}

/* Only the thread of worker 0 may call it. */
static inline void pb_router_change_begin(pb_router *router) {
    unsigned at;
    if (router->is_stopped) return;
    pthread_mutex_lock(&router->change_lock);
    atomic_store_explicit(&router->changing, 1, memory_order_relaxed);
    for (at = 1; at < router->worker_count; at++) pthread_mutex_lock(&router->workers[at]->lock);
    router->is_stopped = 1;
    router->changes = 0;
    router->stops++;
}

static inline void pb_router_change_end(pb_router *router) {
    if (++router->changes < PB_CHANGES_PER_STOP && router->shares_stops) return;
    pb_router_resume_workers(router);
}

/* Changes from here on share stops of the workers, PB_CHANGES_PER_STOP at most each, until
   pb_router_changes_end. The caller must not wait for a worker meanwhile. */
static inline void pb_router_changes_begin(pb_router *router) { router->shares_stops = 1; }

static inline void pb_router_changes_end(pb_router *router) {
    router->shares_stops = 0;
    if (router->is_stopped) pb_router_resume_workers(router);
}

/* --- the router ----------------------------------------------------------- */

static inline void pb_router_free(pb_router *router) {
    unsigned at;
    for (at = 0; at < router->worker_count; at++) pb_worker_free(router->workers[at]);
    for (at = 0; at < router->page_count; at++) free(router->pages[at]);
    free(router->pages);
    pb_topics_free(&router->topics);
    pb_sets_free(&router->sets);
    pthread_mutex_destroy(&router->change_lock);
}

/* Starts with worker 0. Returns 0, or -1 without memory; then it must still be freed. */
static inline int pb_router_init(pb_router *router, uint64_t seed) {
    memset(router, 0, sizeof *router);
    pthread_mutex_init(&router->change_lock, NULL);
    router->generation = 1;
    if (pb_topics_init(&router->topics, seed) < 0 || pb_sets_init(&router->sets, seed) < 0)
        return -1;
    return pb_router_add_worker(router) == NULL ? -1 : 0;
}

static inline pb_subscriber *pb_router_subscriber(const pb_router *router, uint32_t number) {
    return &router->pages[number / PB_SUBSCRIBER_PAGE][number % PB_SUBSCRIBER_PAGE];
}

static inline const pb_set *pb_router_set(const pb_router *router, uint32_t number) {
    return &router->sets.sets[number];
}

/* Bit of a reader in the masks of sets: its encoding, apart for outboxes in C and in Python. */
static inline uint32_t pb_subscriber_kind(const pb_subscriber *subscriber) {
    return subscriber->encoding + (subscriber->outbox == NULL ? PB_ENCODINGS : 0);
}

/* Returns the mask of the encodings of a set's readers. */
static inline uint32_t pb_set_encodings(const pb_set *set) {
    return (uint32_t)(set->kinds | set->kinds >> PB_ENCODINGS);
}

/* A change. Returns the number of a new subscriber without subscriptions and with an outbox in
   Python; UINT32_MAX without memory. Numbers are reused, so that the arrays stay as small as the
   number of live subscribers. */
static inline uint32_t pb_router_add_subscriber(pb_router *router, uint32_t encoding) {
    pb_subscriber *subscriber;
    uint32_t number = router->free - 1;
    if (router->free) {
        router->free = pb_router_subscriber(router, number)->next_free;
    } else {
        if (router->used == router->page_count * PB_SUBSCRIBER_PAGE) {
            size_t size = (router->page_count + 1) * sizeof(pb_subscriber *);
            pb_subscriber **pages = realloc(router->pages, size);
            if (pages == NULL) return UINT32_MAX;
            router->pages = pages;
            pages[router->page_count] = calloc(PB_SUBSCRIBER_PAGE, sizeof(pb_subscriber));
            if (pages[router->page_count] == NULL) return UINT32_MAX;
            router->page_count++;
        }
        number = router->used++;
    }
    subscriber = pb_router_subscriber(router, number);
    memset(subscriber, 0, sizeof *subscriber);
    subscriber->encoding = (uint8_t)encoding;
    subscriber->alive = 1;
    return number;
}

/* A change. The subscriber must have no subscriptions, because the sets count it by its kind. */
static inline void pb_router_set_outbox(pb_router *router, uint32_t number, pb_outbox *outbox) {
    pb_subscriber *subscriber = pb_router_subscriber(router, number);
    if (subscriber->outbox != NULL) pb_outbox_set_reader(subscriber->outbox, NULL, NULL);
    if (outbox != NULL) pb_outbox_set_reader(outbox, &subscriber->full, &router->full_count);
    router->outbox_counts[subscriber->encoding] += (outbox != NULL) - (subscriber->outbox != NULL);
    subscriber->outbox = outbox;
}

static inline void pb_router_set_full(pb_router *router, pb_subscriber *subscriber, int full) {
    int was_full = atomic_exchange_explicit(&subscriber->full, full != 0, memory_order_relaxed);
    if (was_full != (full != 0))
        atomic_fetch_add_explicit(&router->full_count, full ? 1 : UINT32_MAX, memory_order_relaxed);
}

/* A change, after the subscriber's subscriptions have ended. Its number may be given out again. */
static inline void pb_router_remove_subscriber(pb_router *router, uint32_t number) {
    pb_subscriber *subscriber = pb_router_subscriber(router, number);
    pb_router_set_outbox(router, number, NULL);
    pb_router_set_full(router, subscriber, 0);
    subscriber->alive = 0;
    subscriber->next_free = router->free;
    router->free = number + 1;
}

/* A change: adds the subscriber, who is not in it, to the topic's set. Returns 0, or -1 without
   memory. */
static inline int pb_router_link(
    pb_router *router, uint32_t number, const unsigned char *name, size_t size) {
    pb_topic *topic = pb_topics_find_or_add(&router->topics, name, size);
    uint32_t kind = pb_subscriber_kind(pb_router_subscriber(router, number));
    uint32_t set;
    int was_idle;
    if (topic == NULL) return -1;
    was_idle = pb_topic_is_idle(topic);
    set = pb_sets_add(&router->sets, topic->subscribers, number, kind);
    if (set != 0) topic->subscribers = set;
    /* Also without memory: the topic may have been added above and still be idle. */
    pb_topics_update_idle(&router->topics, topic, was_idle);
    return set == 0 ? -1 : 0;
}

/* A change: removes the subscriber, who is in it, from the topic's set. Returns 0, or -1 without
   memory. */
static inline int pb_router_unlink(
    pb_router *router, uint32_t number, const unsigned char *name, size_t size) {
    pb_topic *topic = pb_topics_find(&router->topics, name, size);
    uint32_t kind = pb_subscriber_kind(pb_router_subscriber(router, number));
    if (pb_sets_remove(&router->sets, &topic->subscribers, number, kind) < 0) return -1;
    pb_topics_update_idle(&router->topics, topic, 0);
    return 0;
}

/* --- the scan ------------------------------------------------------------- */

/* Prepares the worker for one buffer. Raw frames take at most `room` bytes: as many as were
   received, so the output needs no second measure. */
static inline void pb_route_begin(
    pb_worker *worker, uint32_t own_bit, int skip, size_t room, int plain_only) {
    worker->own_bit = own_bit;
    worker->skip = skip;
    worker->room = room;
    worker->filled = 0;
    worker->plain_only = plain_only;
    worker->open_raw = NULL;
    worker->last = NULL;
}

static inline int pb_is_blocked(
    const pb_router *router, const pb_worker *worker, const pb_topic *topic, pb_routed *routed) {
    const pb_set *readers = pb_router_set(router, topic->subscribers);
    uint32_t at;
    for (at = 0; at < readers->size; at++) {
        pb_subscriber *reader = pb_router_subscriber(router, readers->members[at]);
        if (atomic_load_explicit(&reader->full, memory_order_relaxed)
            && reader->encoding != worker->skip) {
            routed->blocker = readers->members[at];
            return 1;
        }
    }
    return 0;
}

/* Whether a plain route can give the topic's messages to all its readers. */
static inline int pb_is_plain(
    const pb_router *router, const pb_worker *worker, const pb_topic *topic) {
    /* Readers with an outbox in Python have a bit that is never the own one. */
    return !topic->collect
        && !(pb_router_set(router, topic->subscribers)->kinds & ~(uint64_t)worker->own_bit);
}

/* Returns PB_STOP_END with the outcome of the topic's messages in `last_outcome`, or the reason
   to stop before this one. */
static inline pb_stop pb_admit(
    pb_router *router, pb_worker *worker, const pb_source *source, const pb_frame *frame,
    pb_routed *routed) {
    pb_topic *topic = pb_topics_find(&router->topics, frame->topic, (size_t)frame->topic_size);
    pb_verdict verdict = PB_ALLOW;
    worker->last = NULL;
    worker->last_outcome = PB_UNHEARD;
    /* An unknown topic has no reader. The policy is asked only if it has rules about producing,
       because then the message counts as denied and not as unheard. */
    if (topic == NULL && (source->trusted || !router->has_produce_rules)) return PB_STOP_END;
    if (!source->trusted)
        verdict = topic == NULL
            ? PB_UNKNOWN
            : pb_topic_verdict(topic, pb_source_identity(source), router->generation);
    if (verdict == PB_UNKNOWN) {
        routed->topic = frame->topic;
        routed->topic_size = (size_t)frame->topic_size;
        return PB_STOP_JUDGE;
    }
    if (verdict == PB_DENY) {
        worker->last_outcome = PB_DENIED;
    } else if (topic->durable && !source->trusted) {
        if (worker->plain_only) return PB_STOP_GENERAL;
        worker->last_outcome = PB_KEPT;
    } else if (topic->subscribers != 0 || topic->collect) {
        if (worker->plain_only && !pb_is_plain(router, worker, topic)) return PB_STOP_GENERAL;
        if (atomic_load_explicit(&router->full_count, memory_order_relaxed)
            && pb_is_blocked(router, worker, topic, routed))
            return PB_STOP_BLOCKED;
        worker->last_outcome = PB_HEARD;
    }
    worker->last = topic;
    return PB_STOP_END;
}

static inline int pb_start_run(pb_worker *worker, uint32_t subscribers) {
    if (pb_make_room((void **)&worker->runs, worker->run_count, &worker->run_capacity,
            sizeof(pb_run)) < 0)
        return -1;
    worker->runs[worker->run_count++] =
        (pb_run){subscribers, worker->filled, worker->filled, 0, 0};
    return 0;
}

static inline int pb_open_raw(pb_worker *worker) {
    if (worker->open_raw != NULL) {
        worker->raw = worker->open_raw(worker->owner, worker->room);
    } else {
        worker->raw_chunk = pb_worker_chunk(worker, worker->room);
        worker->raw = worker->raw_chunk == NULL ? NULL : worker->raw_chunk->data;
    }
    return worker->raw == NULL ? -1 : 0;
}

/* Copies the raw frame into the last run. */
static inline int pb_copy_raw(pb_worker *worker, const pb_frame *frame) {
    pb_run *run = &worker->runs[worker->run_count - 1];
    if (worker->raw == NULL && pb_open_raw(worker) < 0) return -1;
    polybus_copy(worker->raw + worker->filled, frame->raw, (size_t)frame->raw_size);
    worker->filled += (size_t)frame->raw_size;
    run->end = worker->filled;
    run->count++;
    return 0;
}

/* Records a fragment for the session, which reassembles it for readers of other dialects. */
static inline int pb_add_fragment(pb_worker *worker, const pb_frame *frame) {
    if (pb_make_room((void **)&worker->fragments, worker->fragment_count,
            &worker->fragment_capacity, sizeof(pb_frame)) < 0)
        return -1;
    worker->fragments[worker->fragment_count++] = *frame;
    return 0;
}

static inline int pb_add_column(pb_worker *worker, pb_topic *topic) {
    if (pb_make_room((void **)&worker->columns, worker->column_count, &worker->column_capacity,
            sizeof(pb_column)) < 0)
        return -1;
    worker->columns[worker->column_count] =
        (pb_column){topic, pb_topic_next_id(topic), 0, 0, NULL, NULL};
    topic->collected = (int)worker->column_count++;
    return 0;
}

/* Records a message that is needed as a column or in another encoding. */
static inline int pb_add_piece(
    pb_worker *worker, pb_topic *topic, const pb_frame *frame, int relayed, int collected) {
    if (pb_make_room((void **)&worker->pieces, worker->piece_count, &worker->piece_capacity,
            sizeof(pb_piece)) < 0)
        return -1;
    if (collected && topic->collected < 0 && pb_add_column(worker, topic) < 0) return -1;
    /* The run is used only if the piece is relayed; then there is one. */
    worker->pieces[worker->piece_count++] =
        (pb_piece){*frame, worker->run_count - 1, topic->collected, relayed};
    if (topic->collected >= 0) {
        worker->columns[topic->collected].count++;
        worker->columns[topic->collected].size += (size_t)frame->body_size;
    }
    return 0;
}

static inline int pb_relay(
    pb_router *router, pb_worker *worker, pb_topic *topic, const pb_frame *frame) {
    uint32_t encodings = pb_set_encodings(pb_router_set(router, topic->subscribers));
    uint32_t others = encodings & ~worker->own_bit;
    /* Whether the message is needed in any form but its raw frame. */
    int beyond = topic->collect || others;
    if (topic->subscribers) {
        /* Sets are interned, so comparing numbers finds topics with the same readers. */
        if (worker->run_count == 0
            || worker->runs[worker->run_count - 1].subscribers != topic->subscribers)
            if (pb_start_run(worker, topic->subscribers) < 0) return -1;
        if ((encodings & worker->own_bit) && pb_copy_raw(worker, frame) < 0) return -1;
    }
    if (frame->kind == PB_FRAGMENT)
        return beyond ? pb_add_fragment(worker, frame) : 0;
    if (beyond && pb_add_piece(worker, topic, frame, others != 0, topic->collect) < 0) return -1;
    /* A fragment starts no streak: messages within a streak are not checked against fragments
       (PB_STOP_FRAGMENTS). */
    worker->is_streak = !beyond;
    pb_topic_advance(topic, 1, router->worker_count > 1);
    return 0;
}

/* Routes one message or fragment. Returns PB_STOP_END, or the reason to stop before it. */
static inline pb_stop pb_accept(
    pb_router *router, pb_worker *worker, pb_source *source, const pb_frame *frame,
    pb_routed *routed) {
    int done = 0;
    worker->is_streak = 0;
    /* Consecutive messages usually have the same topic; its outcome holds for the whole buffer,
       because the tables cannot change while it is routed. */
    if (worker->last == NULL
        || !pb_topic_is_named(worker->last, frame->topic, (size_t)frame->topic_size)) {
        pb_stop stop = pb_admit(router, worker, source, frame, routed);
        if (stop != PB_STOP_END) return stop;
    }
    pb_counter_add(&source->messages, 1);
    pb_counter_add(&source->bytes, (uint64_t)frame->body_size);
    pb_counter_add(&worker->messages, 1);
    pb_counter_add(&worker->bytes, (uint64_t)frame->body_size);
    if (worker->last_outcome == PB_HEARD) {
        done = pb_relay(router, worker, worker->last, frame);
    } else if (worker->last_outcome == PB_KEPT) {
        /* Readers must not see a message of a durable topic before it is committed. */
        done = frame->kind == PB_FRAGMENT ? pb_add_fragment(worker, frame)
                                          : pb_add_piece(worker, worker->last, frame, 0, 1);
    } else if (worker->last_outcome == PB_DENIED) {
        pb_counter_add(&source->denied, 1);
        pb_counter_add(&worker->denied, 1);
    } else {
        pb_counter_add(&source->unheard, 1);
        pb_counter_add(&worker->unheard, 1);
    }
    return done < 0 ? PB_STOP_NO_MEMORY : PB_STOP_END;
}

/* The hottest lines of the bus: more messages for the same readers. Topic lookup, verdict and run
   stay the same, so only bytes and counters change. Returns the kind of the first other frame,
   and sets `done` to its start. Not inlined: the loop then has the registers to itself. */
static __attribute__((noinline, unused)) pb_frame_kind pb_scan_streak(
    const pb_router *router, pb_worker *worker, pb_source *source, const pb_framing *framing,
    const unsigned char *at, size_t size, size_t *done, pb_frame *frame) {
    pb_frame_kind (*next)(const pb_framing *, const unsigned char *, ssize_t, pb_frame *) =
        framing->next;
    pb_topic *topic = worker->last;
    pb_run *run = &worker->runs[worker->run_count - 1];
    unsigned char *out = worker->raw + worker->filled;
    const unsigned char *from = at + *done;
    const unsigned char *end = at + size;
    uint64_t count = 0, bytes = 0;
    pb_frame_kind kind;
    while ((kind = next(framing, from, end - from, frame)) == PB_MESSAGE
           && pb_topic_is_named(topic, frame->topic, (size_t)frame->topic_size)) {
        polybus_copy(out, frame->raw, (size_t)frame->raw_size);
        out += frame->raw_size;
        count++;
        bytes += (uint64_t)frame->body_size;
        from += frame->size;
    }
    *done = (size_t)(from - at);
    if (count) {
        worker->filled = (size_t)(out - worker->raw);
        run->end = worker->filled;
        run->count += count;
        pb_topic_advance(topic, count, router->worker_count > 1);
        pb_counter_add(&source->messages, count);
        pb_counter_add(&source->bytes, bytes);
        pb_counter_add(&worker->messages, count);
        pb_counter_add(&worker->bytes, bytes);
    }
    return kind;
}

/* Scans at[0:size], the rest of the worker's buffer. The caller has called pb_worker_begin and
   pb_route_begin. It may scan on behind `consumed` after a stop that it has resolved. */
static inline void pb_scan(
    pb_router *router, pb_worker *worker, pb_source *source, const pb_framing *framing,
    const unsigned char *at, size_t size, pb_routed *routed) {
    pb_frame frame;
    pb_frame_kind kind;
    size_t done = 0;
    *routed = (pb_routed){0};
    worker->is_streak = 0;
    for (;;) {
        kind = worker->is_streak
            ? pb_scan_streak(router, worker, source, framing, at, size, &done, &frame)
            : framing->next(framing, at + done, (ssize_t)(size - done), &frame);
        if (kind != PB_MESSAGE && kind != PB_FRAGMENT) break;
        /* The session must reassemble and publish the fragments first, or this message would
           overtake the larger one at readers of other dialects. */
        if (kind == PB_MESSAGE && worker->fragment_count) {
            routed->stop = PB_STOP_FRAGMENTS;
            break;
        }
        routed->stop = pb_accept(router, worker, source, &frame, routed);
        if (routed->stop != PB_STOP_END) break;
        done += (size_t)frame.size;
    }
    if (kind == PB_CONTROL) {
        /* After a plain route the session finds the frame itself. */
        done += worker->plain_only ? 0 : (size_t)frame.size;
        routed->stop = PB_STOP_CONTROL;
        routed->code = frame.code;
        routed->topic = frame.topic;
        routed->topic_size = (size_t)frame.topic_size;
    } else if (kind == PB_BAD) {
        routed->stop = PB_STOP_BAD;
        routed->code = frame.code;
    }
    routed->consumed = done;
}

/* --- outputs -------------------------------------------------------------- */

static inline void pb_count_delivered(
    pb_worker *worker, uint64_t readers, uint64_t messages, uint64_t bytes) {
    pb_counter_add(&worker->delivered, readers * messages);
    pb_counter_add(&worker->delivered_bytes, readers * bytes);
}

static inline void pb_count_sent(pb_subscriber *reader, uint64_t messages, size_t bytes) {
    if (reader->outbox != NULL) return;
    pb_counter_add(&reader->messages, messages);
    pb_counter_add(&reader->bytes, bytes);
}

/* Adds an output for each reader of the only run. */
static inline int pb_measure_only_run(
    const pb_router *router, pb_worker *worker, uint32_t encoding) {
    const pb_run *run = &worker->runs[0];
    const pb_set *readers = pb_router_set(router, run->subscribers);
    size_t size = run->end - run->start;
    pb_output *output;
    uint32_t at;
    if (pb_make_room_for(readers->size, (void **)&worker->outputs, worker->output_count,
            &worker->output_capacity, sizeof(pb_output)) < 0)
        return -1;
    output = worker->outputs + worker->output_count;
    for (at = 0; at < readers->size; at++) {
        pb_subscriber *reader = pb_router_subscriber(router, readers->members[at]);
        if (reader->encoding != encoding) continue;
        *output++ =
            (pb_output){readers->members[at], reader->outbox, NULL, size, run->count, NULL};
        pb_count_sent(reader, run->count, size);
    }
    pb_count_delivered(
        worker, (size_t)(output - worker->outputs) - worker->output_count, run->count, size);
    worker->output_count = (size_t)(output - worker->outputs);
    return 0;
}

/* Makes `output_of` as long as there are subscribers. */
static inline int pb_fit_output_of(const pb_router *router, pb_worker *worker) {
    uint32_t *grown;
    if (router->used <= worker->output_of_capacity) return 0;
    grown = realloc(worker->output_of, router->page_count * PB_SUBSCRIBER_PAGE * sizeof(uint32_t));
    if (grown == NULL) return -1;
    worker->output_of = grown;
    memset(grown + worker->output_of_capacity, 0,
        (router->page_count * PB_SUBSCRIBER_PAGE - worker->output_of_capacity) * sizeof(uint32_t));
    worker->output_of_capacity = router->page_count * PB_SUBSCRIBER_PAGE;
    return 0;
}

/* Adds the run to the outputs of its readers. */
static inline int pb_measure_run(
    const pb_router *router, pb_worker *worker, const pb_run *run, uint32_t encoding) {
    const pb_set *readers = pb_router_set(router, run->subscribers);
    size_t size = run->end - run->start;
    uint32_t at;
    for (at = 0; at < readers->size; at++) {
        uint32_t member = readers->members[at];
        pb_subscriber *reader = pb_router_subscriber(router, member);
        pb_output *output;
        if (reader->encoding != encoding) continue;
        if (worker->output_of[member] == 0) {
            if (pb_make_room((void **)&worker->outputs, worker->output_count,
                    &worker->output_capacity, sizeof(pb_output)) < 0)
                return -1;
            worker->outputs[worker->output_count++] =
                (pb_output){member, reader->outbox, NULL, 0, 0, NULL};
            worker->output_of[member] = (uint32_t)worker->output_count;
        }
        output = &worker->outputs[worker->output_of[member] - 1];
        output->size += size;
        output->messages += run->count;
    }
    return 0;
}

static inline int pb_measure_runs(const pb_router *router, pb_worker *worker, uint32_t encoding) {
    size_t first = worker->output_count;
    size_t at;
    if (pb_fit_output_of(router, worker) < 0) return -1;
    for (at = 0; at < worker->run_count; at++) {
        const pb_run *run = &worker->runs[at];
        if (run->end > run->start && pb_measure_run(router, worker, run, encoding) < 0) return -1;
    }
    for (at = first; at < worker->output_count; at++) {
        const pb_output *output = &worker->outputs[at];
        pb_count_sent(pb_router_subscriber(router, output->subscriber), output->messages,
            output->size);
        pb_count_delivered(worker, 1, output->messages, output->size);
    }
    return 0;
}

/* Adds an output for each reader of the encoding: its size and messages, no bytes yet. Counts
   them as delivered. Returns the index of the first, or -1 without memory. */
static inline ssize_t pb_measure_outputs(
    const pb_router *router, pb_worker *worker, uint32_t encoding) {
    ssize_t first = (ssize_t)worker->output_count;
    int done = worker->run_count == 1 ? pb_measure_only_run(router, worker, encoding)
                                      : pb_measure_runs(router, worker, encoding);
    return done < 0 ? -1 : first;
}

/* Copies the runs in `bytes` to the cursors of the outputs from `first` on. */
static inline void pb_copy_runs(
    const pb_router *router, pb_worker *worker, uint32_t encoding, size_t first,
    const unsigned char *bytes) {
    size_t at;
    uint32_t index;
    for (at = 0; at < worker->run_count; at++) {
        const pb_run *run = &worker->runs[at];
        const pb_set *readers = pb_router_set(router, run->subscribers);
        for (index = 0; run->end > run->start && index < readers->size; index++) {
            uint32_t member = readers->members[index];
            pb_output *output;
            if (pb_router_subscriber(router, member)->encoding != encoding) continue;
            output = &worker->outputs[worker->output_of[member] - 1];
            polybus_copy(output->cursor, bytes + run->start, run->end - run->start);
            output->cursor += run->end - run->start;
        }
    }
    /* The next encoding of the same buffer measures again. */
    for (at = first; at < worker->output_count; at++)
        worker->output_of[worker->outputs[at].subscriber] = 0;
}

/* Returns a chunk with the raw bytes and one reference for the caller; NULL without memory. */
static inline pb_chunk *pb_take_raw_chunk(pb_worker *worker) {
    pb_chunk *chunk = worker->raw_chunk;
    if (chunk != NULL && pb_chunk_fits(chunk->capacity, worker->filled)) {
        pb_chunk_retain(chunk);
        return chunk;
    }
    chunk = pb_chunk_new(worker->filled);
    if (chunk != NULL) memcpy(chunk->data, worker->raw, worker->filled);
    return chunk;
}

/* Gives the output a chunk of its own, to be filled at its cursor. */
static inline int pb_open_output(pb_output *output) {
    output->chunk = pb_chunk_new(output->size);
    if (output->chunk == NULL) return -1;
    output->cursor = output->chunk->data;
    return 0;
}

/* Makes the outputs of a plain route. Returns 0, or -1 without memory. */
static inline int pb_make_outputs(pb_router *router, pb_worker *worker, uint32_t encoding) {
    ssize_t first;
    size_t at;
    pb_chunk *chunk;
    if (worker->filled == 0) return 0;
    first = pb_measure_outputs(router, worker, encoding);
    if (first < 0) return -1;
    if (worker->run_count > 1) {
        for (at = (size_t)first; at < worker->output_count; at++)
            if (pb_open_output(&worker->outputs[at]) < 0) return -1;
        pb_copy_runs(router, worker, encoding, (size_t)first, worker->raw);
        return 0;
    }
    chunk = pb_take_raw_chunk(worker);
    if (chunk == NULL) return -1;
    for (at = (size_t)first; at < worker->output_count; at++) {
        pb_chunk_retain(chunk);
        worker->outputs[at].chunk = chunk;
    }
    pb_chunk_release(chunk);
    return 0;
}

/* Pushes the outputs to the outboxes in C. */
static inline void pb_deliver(pb_worker *worker) {
    size_t at;
    for (at = 0; at < worker->output_count; at++) {
        pb_output *output = &worker->outputs[at];
        pb_chunk *chunk = output->chunk;
        if (chunk == NULL) continue;
        output->chunk = NULL; /* the outbox takes over the reference */
        pb_outbox_push(output->outbox, worker->turn, chunk, chunk->data, output->size, output->messages);
    }
    worker->output_count = 0;
}

/* Routes one buffer plainly: the caller calls pb_worker_begin before, pb_deliver and
   pb_worker_end after. Returns 0, or -1 without memory: then messages of the buffer are lost, and
   the connection must be closed. */
static inline int pb_route(
    pb_router *router, pb_worker *worker, pb_source *source, const pb_framing *framing,
    uint32_t own_encoding, const unsigned char *buf, size_t size, pb_routed *out) {
    pb_route_begin(worker, (uint32_t)1 << own_encoding, -1, size, 1);
    pb_scan(router, worker, source, framing, buf, size, out);
    if (pb_make_outputs(router, worker, own_encoding) < 0) {
        pb_worker_reset(worker); /* some chunks are not filled yet: nothing is delivered */
        out->stop = PB_STOP_NO_MEMORY;
    }
    out->outputs = worker->outputs;
    out->output_count = worker->output_count;
    return out->stop == PB_STOP_NO_MEMORY ? -1 : 0;
}

#endif
