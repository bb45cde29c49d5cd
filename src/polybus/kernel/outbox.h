/* The bounded queue of bytes before one reader.

   An outbox is open (the socket accepts output), stalled (the socket is full, output is held
   here) and possibly full (held output exceeds the high-water mark: publishers wait until it
   has fallen to the low-water mark).

   The first push of a turn goes straight to the socket, which keeps the latency of a single
   message low. Later pushes of the same turn are gathered and sent at its end in one system
   call, unless they grow large enough for a call of their own.

   Any thread may push. The lock orders pushes of one thread as that thread made them, and
   guards every field but `full`, which a scan reads without it: a publisher that finds the mark
   late adds at most one buffer more. What the owner in Python must know (full, room, over the
   bound, broken) is recorded in `events` and in the turn's list of outboxes with events. */
#ifndef POLYBUS_OUTBOX_H
#define POLYBUS_OUTBOX_H

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "chunk.h"

enum {
    /* Beyond this size, gathering more before the write saves nothing. */
    PB_WORTH_A_WRITE = 32 * 1024,
    /* Entries per system call; one of rqueue's buffers is one entry. */
    PB_WRITE_ENTRIES = 64,
};

enum pb_event {
    PB_FILLED = 1,     /* held bytes exceed the high-water mark */
    PB_ROOM = 2,       /* and have fallen to the low-water mark */
    PB_OVERFLOW = 4,   /* held bytes exceed the bound, or there is no memory to hold more */
    PB_BROKEN = 8,     /* a write failed */
    PB_STALLED = 16,   /* the socket accepted only a part */
    PB_DRAINED = 32,   /* the socket has accepted everything */
    PB_WRITE = 64,     /* Python writes this outbox, and it has output for the pipe */
    PB_RECEIVED = 128, /* of a stream: Python must read its bytes */
    PB_HUNG_UP = 256,  /* of a stream: the peer sends no more */
    PB_RELEASED = 512, /* of a stream: its thread has let go of it */
};

typedef struct pb_entry {
    pb_chunk *chunk;
    size_t offset;
    size_t size;
} pb_entry;

typedef struct pb_outbox pb_outbox;

typedef struct pb_outbox_list {
    pb_outbox **items;
    size_t count, capacity;
} pb_outbox_list;

/* One turn of a thread's loop: all its pushes between two waits. */
typedef struct pb_turn {
    uint64_t id; /* never 0, and never that of another thread */
    uint64_t step;
    pb_outbox_list gathered; /* with output to be sent at the end of the turn */
    pb_outbox_list changed;  /* with events */
} pb_turn;

struct pb_outbox {
    pthread_mutex_t lock;
    atomic_uint references;
    void (*free)(pb_outbox *); /* called with the last reference */
    void *owner;               /* the Python object of the outbox, or NULL */
    int descriptor;            /* -1: Python writes it, or it is closed */
    int epoll;
    uint32_t interest; /* events that the epoll set reports; 0: the socket is not in it */
    bool by_pipe; /* Python writes it */
    bool stalled, gathering, closed, failed;
    bool reports_stalls;
    pb_entry *entries; /* a ring */
    size_t first, count, capacity;
    size_t first_sent; /* bytes of the first entry that the socket has accepted */
    size_t held;       /* bytes that the socket, or the pipe, has not accepted */
    size_t handed;     /* bytes that the pipe holds: of a pipe that stalled */
    size_t high_water, low_water, max_bytes;
    uint64_t pushed; /* bytes */
    uint64_t messages, message_bytes; /* pushed by the fan-out */
    uint64_t dropped; /* messages pushed after the outbox was closed or has failed */
    uint64_t written_in; /* the turn of the last write */
    uint32_t events;
    atomic_bool full;
    /* The same for the scan: the mark of the subscriber, and the number of full ones. */
    _Atomic uint8_t *reader_full;
    _Atomic uint32_t *full_count;
};

/* --- lists ---------------------------------------------------------------- */

static inline bool pb_list_add(pb_outbox_list *list, pb_outbox *box) {
    if (list->count == list->capacity) {
        size_t capacity = list->capacity ? 2 * list->capacity : 64;
        pb_outbox **items = realloc(list->items, capacity * sizeof(*items));
        if (items == NULL)
            return false;
        list->items = items;
        list->capacity = capacity;
    }
    list->items[list->count++] = box;
    return true;
}

static inline void pb_outbox_retain(pb_outbox *box) {
    atomic_fetch_add_explicit(&box->references, 1, memory_order_relaxed);
}

static inline void pb_outbox_release(pb_outbox *box) {
    if (atomic_fetch_sub_explicit(&box->references, 1, memory_order_acq_rel) == 1)
        box->free(box);
}

static inline void pb_turn_init(pb_turn *turn, unsigned thread) {
    memset(turn, 0, sizeof(*turn));
    turn->step = 64; /* more than there are threads */
    turn->id = turn->step + thread;
}

static inline void pb_turn_free(pb_turn *turn) {
    for (size_t at = 0; at < turn->gathered.count; at++)
        pb_outbox_release(turn->gathered.items[at]);
    for (size_t at = 0; at < turn->changed.count; at++)
        pb_outbox_release(turn->changed.items[at]);
    free(turn->gathered.items);
    free(turn->changed.items);
}

/* Record an event. With the lock held. */
static inline void pb_outbox_report(pb_outbox *box, pb_turn *turn, uint32_t event) {
    /* The list has each outbox once, so it is bounded by the number of connections. */
    if (box->events == 0) {
        if (!pb_list_add(&turn->changed, box))
            return; /* without memory the next event of this outbox tries again */
        pb_outbox_retain(box);
    }
    box->events |= event;
}

/* --- the queue ------------------------------------------------------------ */

static inline void pb_outbox_init(pb_outbox *box, void (*free_box)(pb_outbox *)) {
    memset(box, 0, sizeof(*box));
    pthread_mutex_init(&box->lock, NULL);
    atomic_init(&box->references, 1);
    atomic_init(&box->full, false);
    box->free = free_box;
    box->descriptor = -1;
    box->epoll = -1;
    box->high_water = box->max_bytes = SIZE_MAX;
}

/* Append an entry; it takes over the reference to the chunk. */
static inline bool pb_outbox_hold(pb_outbox *box, pb_chunk *chunk, size_t offset, size_t size) {
    if (box->count == box->capacity) {
        size_t capacity = box->capacity ? 2 * box->capacity : 4;
        pb_entry *entries = malloc(capacity * sizeof(*entries));
        if (entries == NULL)
            return false;
        for (size_t at = 0; at < box->count; at++)
            entries[at] = box->entries[(box->first + at) % box->capacity];
        free(box->entries);
        box->entries = entries;
        box->first = 0;
        box->capacity = capacity;
    }
    box->entries[(box->first + box->count++) % box->capacity] = (pb_entry){chunk, offset, size};
    box->held += size;
    return true;
}

static inline pb_entry *pb_outbox_entry(pb_outbox *box, size_t at) {
    return &box->entries[(box->first + at) % box->capacity];
}

/* Remove `size` bytes from the front: the socket has accepted them. */
static inline void pb_outbox_drop_front(pb_outbox *box, size_t size) {
    box->held -= size;
    size += box->first_sent;
    while (box->count > 0 && size >= pb_outbox_entry(box, 0)->size) {
        pb_entry *entry = pb_outbox_entry(box, 0);
        size -= entry->size;
        pb_chunk_release(entry->chunk);
        box->first = (box->first + 1) % box->capacity;
        box->count--;
    }
    box->first_sent = size;
}

static inline void pb_outbox_drop_all(pb_outbox *box) {
    while (box->count > 0) {
        pb_chunk_release(pb_outbox_entry(box, 0)->chunk);
        box->first = (box->first + 1) % box->capacity;
        box->count--;
    }
    box->held = box->first_sent = 0;
}

/* Release all memory; for the function that frees the outbox. */
static inline void pb_outbox_destroy(pb_outbox *box) {
    pb_outbox_drop_all(box);
    free(box->entries);
    pthread_mutex_destroy(&box->lock);
}

/* --- events of the socket --------------------------------------------------- */

/* Change the events that epoll reports; 0 removes the socket, because epoll would report a broken
   one even so. Returns 0 or an error number. With the lock held. */
static inline int pb_outbox_set_interest(pb_outbox *box, uint32_t interest) {
    struct epoll_event event = {.events = interest, .data.ptr = box};
    int change = interest == 0 ? EPOLL_CTL_DEL : box->interest == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
    if (box->interest == interest)
        return 0;
    if (epoll_ctl(box->epoll, change, box->descriptor, &event) < 0 && interest != 0)
        return errno;
    box->interest = interest;
    return 0;
}

static inline void pb_outbox_fail(pb_outbox *box, pb_turn *turn) {
    if (box->failed)
        return;
    box->failed = true;
    /* Otherwise epoll would report it again and again until its owner ends the connection. */
    pb_outbox_set_interest(box, 0);
    pb_outbox_report(box, turn, PB_BROKEN);
}

static inline void pb_outbox_set_stalled(pb_outbox *box, pb_turn *turn, bool stalled) {
    if (box->stalled == stalled)
        return;
    box->stalled = stalled;
    uint32_t others = box->interest & ~(uint32_t)EPOLLOUT;
    if (pb_outbox_set_interest(box, stalled ? others | EPOLLOUT : others) != 0)
        pb_outbox_fail(box, turn); /* it would wait for room forever */
    if (box->reports_stalls)
        pb_outbox_report(box, turn, stalled ? PB_STALLED : PB_DRAINED);
}

static inline bool pb_is_full_socket(int error) {
    return error == EAGAIN || error == EWOULDBLOCK;
}

/* Send held entries until the socket is full. With the lock held. */
static inline void pb_outbox_send(pb_outbox *box, pb_turn *turn) {
    struct iovec parts[PB_WRITE_ENTRIES];
    while (box->count > 0 && !box->failed) {
        struct msghdr message = {.msg_iov = parts};
        size_t size = 0, count = 0;
        for (; count < box->count && count < PB_WRITE_ENTRIES; count++) {
            pb_entry *entry = pb_outbox_entry(box, count);
            size_t skip = count == 0 ? box->first_sent : 0;
            parts[count].iov_base = entry->chunk->data + entry->offset + skip;
            parts[count].iov_len = entry->size - skip;
            size += entry->size - skip;
        }
        message.msg_iovlen = count;
        ssize_t sent = sendmsg(box->descriptor, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && !pb_is_full_socket(errno)) {
            pb_outbox_fail(box, turn);
            return;
        }
        if (sent > 0)
            pb_outbox_drop_front(box, (size_t)sent);
        /* A part only: the socket is full, which another call would only confirm. */
        if (sent < (ssize_t)size) {
            pb_outbox_set_stalled(box, turn, true);
            return;
        }
    }
    if (box->count == 0)
        pb_outbox_set_stalled(box, turn, false);
}

/* Send bytes that are not queued. Returns the number of accepted bytes. With the lock held. */
static inline size_t pb_outbox_send_first(
    pb_outbox *box, pb_turn *turn, const unsigned char *data, size_t size
) {
    ssize_t sent;
    do
        sent = send(box->descriptor, data, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    if (sent < 0 && !pb_is_full_socket(errno))
        pb_outbox_fail(box, turn);
    else if (sent < (ssize_t)size)
        pb_outbox_set_stalled(box, turn, true);
    return sent > 0 ? (size_t)sent : 0;
}

/* --- marks ------------------------------------------------------------------ */

static inline void pb_outbox_mark_reader(pb_outbox *box, bool full) {
    if (box->reader_full == NULL)
        return;
    atomic_store_explicit(box->reader_full, full, memory_order_release);
    atomic_fetch_add_explicit(box->full_count, full ? 1 : UINT32_MAX, memory_order_release);
}

/* Mark a subscriber of the fan-out whenever this outbox is full; NULL: no longer. */
static inline void pb_outbox_set_reader(
    pb_outbox *box, _Atomic uint8_t *reader_full, _Atomic uint32_t *full_count
) {
    pthread_mutex_lock(&box->lock);
    bool is_full = atomic_load_explicit(&box->full, memory_order_relaxed);
    if (is_full)
        pb_outbox_mark_reader(box, false);
    box->reader_full = reader_full;
    box->full_count = full_count;
    if (is_full)
        pb_outbox_mark_reader(box, true);
    pthread_mutex_unlock(&box->lock);
}

static inline void pb_outbox_set_full(pb_outbox *box, pb_turn *turn, bool full) {
    if (atomic_load_explicit(&box->full, memory_order_relaxed) == full)
        return;
    atomic_store_explicit(&box->full, full, memory_order_release);
    pb_outbox_mark_reader(box, full);
    if (turn != NULL)
        pb_outbox_report(box, turn, full ? PB_FILLED : PB_ROOM);
}

/* The reader must be cut. Until its owner does so, it gets nothing more: other threads would push
   without a bound, and after a push that failed a frame would be missing. */
static inline void pb_outbox_overflow(pb_outbox *box, pb_turn *turn) {
    box->closed = true;
    pb_outbox_report(box, turn, PB_OVERFLOW);
}

static inline void pb_outbox_check_marks(pb_outbox *box, pb_turn *turn) {
    size_t owed = box->held + box->handed;
    if (owed > box->max_bytes)
        pb_outbox_overflow(box, turn);
    else if (owed > box->high_water)
        pb_outbox_set_full(box, turn, true);
}

static inline void pb_outbox_check_room(pb_outbox *box, pb_turn *turn) {
    if (!box->closed && box->held + box->handed <= box->low_water)
        pb_outbox_set_full(box, turn, false);
}

/* --- pushes ------------------------------------------------------------------ */

static inline void pb_outbox_write_held(pb_outbox *box, pb_turn *turn) {
    box->written_in = turn->id;
    if (box->by_pipe)
        pb_outbox_report(box, turn, PB_WRITE);
    else
        pb_outbox_send(box, turn);
}

/* Hold bytes of which the socket has accepted the first `sent`. Takes over the chunk; NULL: the
   bytes are copied. Returns false without memory. */
static inline bool pb_outbox_keep(
    pb_outbox *box, pb_chunk *chunk, const unsigned char *data, size_t size, size_t sent
) {
    size_t offset = 0;
    if (chunk != NULL) {
        offset = (size_t)(data - chunk->data);
    } else {
        chunk = pb_chunk_new(size);
        if (chunk == NULL)
            return false;
        memcpy(chunk->data, data, size);
    }
    if (!pb_outbox_hold(box, chunk, offset, size)) {
        pb_chunk_release(chunk);
        return false;
    }
    if (sent > 0) { /* then it is the only entry */
        box->first_sent = sent;
        box->held -= sent;
    }
    return true;
}

/* Decide whether held bytes are written now or at the end of the turn. */
static inline void pb_outbox_schedule(pb_outbox *box, pb_turn *turn, bool is_first) {
    if (!box->stalled && (is_first || box->held >= PB_WORTH_A_WRITE))
        pb_outbox_write_held(box, turn);
    else if (!box->stalled && !box->gathering) {
        /* Without memory for the list the bytes are written now. */
        box->gathering = pb_list_add(&turn->gathered, box);
        if (box->gathering)
            pb_outbox_retain(box);
        else
            pb_outbox_write_held(box, turn);
    }
    if (box->stalled)
        pb_outbox_check_marks(box, turn);
}

/* Queue bytes for the reader. Takes over the caller's reference to the chunk, in which `data` lies;
   without a chunk the bytes that the socket does not accept now are copied. */
static inline void pb_outbox_push(
    pb_outbox *box, pb_turn *turn, pb_chunk *chunk, const unsigned char *data, size_t size,
    uint64_t messages
) {
    pthread_mutex_lock(&box->lock);
    bool is_first = !box->stalled && box->written_in != turn->id;
    bool is_done = box->closed || box->failed;
    size_t sent = 0;
    if (is_done) {
        box->dropped += messages;
    } else {
        box->pushed += size;
        box->messages += messages;
        box->message_bytes += messages > 0 ? size : 0;
        if (is_first && box->count == 0 && !box->by_pipe) {
            box->written_in = turn->id;
            sent = pb_outbox_send_first(box, turn, data, size);
            is_done = sent == size;
        }
    }
    if (is_done) {
        if (chunk != NULL)
            pb_chunk_release(chunk);
    } else if (pb_outbox_keep(box, chunk, data, size, sent)) {
        if (!box->failed)
            pb_outbox_schedule(box, turn, is_first && sent == 0);
    } else {
        pb_outbox_overflow(box, turn);
    }
    pthread_mutex_unlock(&box->lock);
}

/* Write bytes at once, behind all that is held. They count for no mark: their writer watches its
   own backlog. Returns false without memory. */
static inline bool pb_outbox_write(
    pb_outbox *box, pb_turn *turn, const unsigned char *data, size_t size
) {
    bool is_kept = true;
    pthread_mutex_lock(&box->lock);
    if (!box->failed) {
        size_t sent = 0;
        if (box->count > 0 && !box->stalled)
            pb_outbox_send(box, turn);
        if (box->count == 0 && !box->failed)
            sent = pb_outbox_send_first(box, turn, data, size);
        if (sent < size)
            is_kept = pb_outbox_keep(box, NULL, data, size, sent);
    }
    pthread_mutex_unlock(&box->lock);
    return is_kept;
}

/* Send held bytes now, unless the socket is full. */
static inline void pb_outbox_flush(pb_outbox *box, pb_turn *turn) {
    pthread_mutex_lock(&box->lock);
    if (box->count > 0 && !box->stalled && !box->failed) {
        pb_outbox_write_held(box, turn);
        if (box->stalled)
            pb_outbox_check_marks(box, turn);
    }
    pthread_mutex_unlock(&box->lock);
}

/* Send everything that the turn has gathered, and begin the next turn. */
static inline void pb_turn_end(pb_turn *turn) {
    turn->id += turn->step;
    for (size_t at = 0; at < turn->gathered.count; at++) {
        pb_outbox *box = turn->gathered.items[at];
        pthread_mutex_lock(&box->lock);
        box->gathering = false;
        pthread_mutex_unlock(&box->lock);
        pb_outbox_flush(box, turn);
        pb_outbox_release(box);
    }
    turn->gathered.count = 0;
}

/* The socket accepts output again. */
static inline void pb_outbox_on_writable(pb_outbox *box, pb_turn *turn) {
    pthread_mutex_lock(&box->lock);
    if (box->stalled && !box->failed) {
        box->written_in = turn->id;
        pb_outbox_send(box, turn);
        pb_outbox_check_room(box, turn);
    }
    pthread_mutex_unlock(&box->lock);
}

/* Accept no more pushes. Held bytes are sent if `keep_held`, else dropped. */
static inline void pb_outbox_close(pb_outbox *box, pb_turn *turn, bool keep_held) {
    pthread_mutex_lock(&box->lock);
    box->closed = true;
    pb_outbox_set_full(box, NULL, false);
    if (!keep_held)
        pb_outbox_drop_all(box);
    pthread_mutex_unlock(&box->lock);
    pb_outbox_flush(box, turn);
}

#endif
