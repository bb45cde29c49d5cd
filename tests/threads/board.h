/* What the clients, the loop and the main thread of pump_stress.c share: the plan of the topics,
   the messages, and the board on which publishers note what they have sent.

   Clients and the server meet at their sockets and at the queue of new connections. The board is
   read and written by relaxed atomics alone, so it orders nothing that ThreadSanitizer could
   take for a lock of the server. */
#ifndef STRESS_BOARD_H
#define STRESS_BOARD_H

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    CLIENTS = 16,
    BUS = CLIENTS, /* the loop publishes, too */
    PUBLISHERS = CLIENTS + 1,
    OPEN_TOPICS = 12,     /* everyone may publish */
    CLOSED_TOPICS = 4,    /* the policy denies publishers with odd numbers */
    CHANGING_TOPICS = 4,  /* each policy decides again */
    SHARED_TOPICS = OPEN_TOPICS + CLOSED_TOPICS + CHANGING_TOPICS,
    TOPICS = SHARED_TOPICS + CLIENTS, /* each client has one of its own */
    MAX_NAME = 16,
    SOCKET_BUFFER = 32 * 1024, /* small, so that sockets are full often; Linux doubles it */
    SMALL_BODY = 4 * 1024,
    LARGE_BODY = 300 * 1024, /* more than a thread's receive buffer */
};

enum stage { RUN, SETTLE, VERIFY, LEAVE };

/* The first bytes of each message. Bytes of `fill_of` follow. */
typedef struct message {
    uint32_t publisher, incarnation, topic, size;
    uint64_t number; /* of the publisher's messages for this topic: 1, 2, ... */
    uint64_t token;  /* of a probe, or 0 */
} message;

/* One connection, as its client saw it and as the loop did. Each side writes its own fields; the
   other reads them after `ended`, or after the threads were joined. */
typedef struct connection_record {
    struct connection_record *next;
    sem_t ended;
    unsigned client;
    int server_socket;
    bool is_polite; /* the client read to the end, and everything it wrote was to be routed */
    uint64_t published, received;
    uint64_t routed, pushed, dropped; /* by the server */
} connection_record;

typedef struct board {
    uint64_t seed;
    bool has_large, has_parts, holds_topics;
    atomic_int stage;
    atomic_uint arrived;        /* participants that are done with the stage */
    _Atomic uint64_t sent[PUBLISHERS][TOPICS]; /* incarnation << 40 | number */
    pthread_mutex_t lock; /* guards the list of new connections */
    connection_record *fresh;
    int event;
} board;

/* --- chance ------------------------------------------------------------------ */

static inline uint64_t draw(uint64_t *state) {
    uint64_t mixed = *state += 0x9e3779b97f4a7c15ULL;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ULL;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebULL;
    return mixed ^ (mixed >> 31);
}

static inline uint32_t draw_below(uint64_t *state, uint32_t bound) {
    return (uint32_t)(draw(state) % bound);
}

static inline bool draw_chance(uint64_t *state, uint32_t of_thousand) {
    return draw_below(state, 1000) < of_thousand;
}

static inline double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static inline void *allocate(size_t size) {
    void *memory = calloc(1, size);
    if (memory == NULL)
        abort();
    return memory;
}

/* --- topics and messages ------------------------------------------------------- */

static inline bool is_open_topic(uint32_t topic) {
    return topic < OPEN_TOPICS || topic >= SHARED_TOPICS;
}

static inline bool is_closed_topic(uint32_t topic) {
    return topic >= OPEN_TOPICS && topic < OPEN_TOPICS + CLOSED_TOPICS;
}

static inline bool is_changing_topic(uint32_t topic) {
    return !is_open_topic(topic) && !is_closed_topic(topic);
}

/* Every other message of a publisher's run is for the same readers only if they subscribe alike;
   names differ in length, so that frames do. */
static inline size_t write_topic(unsigned char *name, uint32_t topic) {
    return (size_t)sprintf((char *)name, topic % 2 ? "topic-%u" : "t%u", topic);
}

/* Returns TOPICS if it is no topic of this test. */
static inline uint32_t read_topic(const unsigned char *name, size_t size) {
    uint32_t topic = 0;
    unsigned char same[MAX_NAME];
    for (size_t at = 0; at < size; at++)
        if (name[at] >= '0' && name[at] <= '9')
            topic = topic * 10 + name[at] - '0';
    if (topic >= TOPICS || write_topic(same, topic) != size || memcmp(same, name, size) != 0)
        return TOPICS;
    return topic;
}

static inline unsigned char fill_of(const message *head) {
    return (unsigned char)(head->number * 31 + head->publisher * 7 + head->topic);
}

static inline void store_u32_be(unsigned char *at, uint32_t value) {
    value = __builtin_bswap32(value);
    memcpy(at, &value, 4);
}

enum { FRAME_ROOM = 64, PART_HEADER = 20 };

/* Write a PUBLISH of a NOTIFICATION, or of a PART. Returns its size. `head->size` is that of the
   body without a PART's header. */
static inline size_t write_publish(unsigned char *at, const message *head, bool is_part) {
    unsigned char name[MAX_NAME];
    size_t name_size = write_topic(name, head->topic);
    size_t inner = 1 + name_size + (is_part ? PART_HEADER : 0) + head->size;
    unsigned char *body = at + 11 + name_size;
    store_u32_be(at, (uint32_t)(5 + inner));
    at[4] = 0;
    store_u32_be(at + 5, (uint32_t)inner);
    at[9] = is_part ? 8 : 7;
    at[10] = (unsigned char)name_size;
    memcpy(at + 11, name, name_size);
    if (is_part) {
        memset(body, 0, PART_HEADER);
        body[PART_HEADER - 1] = 2; /* index 0 of 2 */
        body += PART_HEADER;
    }
    memcpy(body, head, sizeof(*head));
    memset(body + sizeof(*head), fill_of(head), head->size - sizeof(*head));
    return 10 + inner;
}

/* Write a SUBSCRIBE (1), a REMOVE (2) or a DEREGISTER (5, without a topic). Returns its size. */
static inline size_t write_control(unsigned char *at, int type, uint32_t topic) {
    size_t name_size = type == 5 ? 0 : write_topic(at + 6, topic);
    store_u32_be(at, (uint32_t)(type == 5 ? 0 : 1 + name_size));
    at[4] = (unsigned char)type;
    if (type == 5)
        return 5;
    at[5] = (unsigned char)name_size;
    return 6 + name_size;
}

/* --- the board ------------------------------------------------------------------ */

static inline void note_sent(board *board, const message *head) {
    uint64_t sent = (uint64_t)head->incarnation << 40 | head->number;
    atomic_store_explicit(&board->sent[head->publisher][head->topic], sent, memory_order_relaxed);
}

static inline uint64_t sent_by(board *board, uint32_t publisher, uint32_t topic) {
    return atomic_load_explicit(&board->sent[publisher][topic], memory_order_relaxed);
}

static inline int stage_of(board *board) {
    return atomic_load_explicit(&board->stage, memory_order_relaxed);
}

static inline void arrive(board *board) {
    atomic_fetch_add_explicit(&board->arrived, 1, memory_order_relaxed);
}

/* Give a connected socket to the loop. */
static inline void offer_connection(board *board, connection_record *record) {
    uint64_t one = 1;
    pthread_mutex_lock(&board->lock);
    record->next = board->fresh;
    board->fresh = record;
    pthread_mutex_unlock(&board->lock);
    if (write(board->event, &one, sizeof(one)) < 0)
        abort();
}

static inline connection_record *take_connections(board *board) {
    uint64_t count;
    if (read(board->event, &count, sizeof(count)) < 0 && errno != EAGAIN)
        abort();
    pthread_mutex_lock(&board->lock);
    connection_record *fresh = board->fresh;
    board->fresh = NULL;
    pthread_mutex_unlock(&board->lock);
    return fresh;
}

#endif
