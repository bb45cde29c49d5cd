/* One thread of the pump: receives, routes and sends for its sockets, without Python.

   A thread handles plain publishes. Everything else is the loop's: a stream whose next frame
   needs the loop is *parked* (its socket is not read) and reported; the loop lets the session work
   and *resumes* the stream. So a stream's received bytes belong to one thread at a time:

       on the thread ──park──▶ on the loop ──resume──▶ on the thread
            └───────────── end (by the loop) ─────────▶ released

   The loop asks by requests, each of which a stream can have once, so both queues are bounded by
   the number of streams. Events of outboxes travel to the loop in the same list as parked streams.

   The mailbox of the loop and the requests of a thread each have a lock and an eventfd; the
   reader takes the whole list in one step. */
#ifndef POLYBUS_PUMP_THREAD_H
#define POLYBUS_PUMP_THREAD_H

#include <signal.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "delayed_ack.h"
#include "outbox.h"
#include "router.h"

enum {
    PB_THREAD_EVENTS = 64,
    PB_RETRY_MS = 10,
    PB_THREAD_BUFFER = 256 * 1024, /* like the loop's: smaller is slower, larger not faster */
};

enum pb_request { PB_ADOPT = 1, PB_RESUME = 2, PB_END = 4 };

enum {
    /* Only a stream's own thread reports these, when it has parked the stream: with them the
       received bytes are the loop's. PB_BROKEN is not one, because any thread that writes may
       report it, while the stream's thread uses the bytes. */
    PB_HANDED_OVER = PB_RECEIVED | PB_HUNG_UP | PB_RELEASED,
};

typedef struct pb_stream pb_stream;

/* Outboxes with events, for the loop. */
typedef struct pb_mailbox {
    pthread_mutex_t lock;
    pb_outbox_list list;
    int event;
} pb_mailbox;

typedef struct pb_thread {
    pthread_t handle;
    unsigned number; /* of its worker; at least 1 */
    int epoll, event;
    pb_router *router;
    pb_worker *worker;
    pb_turn turn;
    pb_mailbox *mailbox;
    unsigned char *buffer; /* received bytes of one stream at a time */
    pthread_mutex_t lock;  /* guards the list of requests */
    pb_outbox_list requests, taken;
    atomic_bool is_stopping;
    atomic_uint streams; /* for the choice of a thread; written by the loop */
} pb_thread;

struct pb_stream {
    pb_outbox out; /* first: an event names the outbox, and so the stream */
    pb_thread *thread;
    pb_source *source;
    const pb_framing *framing;
    uint32_t encoding;
    bool is_parked;    /* written by the thread, or by the loop while it has the stream */
    uint32_t requests; /* guarded by the thread's lock */
    /* Received bytes that are not consumed. The thread and the loop pass them on by requests and
       the mailbox; the outbox's lock lets the loop look at them meanwhile. */
    unsigned char *held;
    size_t held_size, held_capacity;
    _Atomic uint64_t takes; /* receives that consumed bytes */
    pb_delayed_ack ack;     /* of the side that receives */
};

/* --- lists that wake their reader ------------------------------------------- */

static inline void pb_wake(int event) {
    uint64_t one = 1;
    /* Fails only if the counter is full, and then the reader is awake. */
    if (write(event, &one, sizeof(one)) < 0)
        return;
}

static inline void pb_clear(int event) {
    uint64_t count;
    if (read(event, &count, sizeof(count)) < 0)
        return;
}

/* Move all items of `from` behind those of `to`. Without memory they stay, for a later try. */
static inline void pb_list_move(pb_outbox_list *to, pb_outbox_list *from) {
    size_t at = 0;
    while (at < from->count && pb_list_add(to, from->items[at]))
        at++;
    memmove(from->items, from->items + at, (from->count - at) * sizeof(*from->items));
    from->count -= at;
}

static inline bool pb_mailbox_init(pb_mailbox *mailbox) {
    memset(mailbox, 0, sizeof(*mailbox));
    pthread_mutex_init(&mailbox->lock, NULL);
    mailbox->event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return mailbox->event >= 0;
}

static inline void pb_list_release(pb_outbox_list *list) {
    for (size_t at = 0; at < list->count; at++)
        pb_outbox_release(list->items[at]);
    free(list->items);
}

static inline void pb_mailbox_free(pb_mailbox *mailbox) {
    pb_list_release(&mailbox->list);
    pthread_mutex_destroy(&mailbox->lock);
    close(mailbox->event);
}

/* Hand the turn's events to the loop. */
static inline void pb_mailbox_post(pb_mailbox *mailbox, pb_turn *turn) {
    if (turn->changed.count == 0)
        return;
    pthread_mutex_lock(&mailbox->lock);
    bool was_empty = mailbox->list.count == 0;
    pb_list_move(&mailbox->list, &turn->changed);
    pthread_mutex_unlock(&mailbox->lock);
    /* A list that is not empty has an event that the loop has yet to see. */
    if (was_empty)
        pb_wake(mailbox->event);
}

/* For the loop: take all outboxes with events. `list` must be empty. */
static inline void pb_mailbox_take(pb_mailbox *mailbox, pb_outbox_list *list) {
    pb_clear(mailbox->event);
    pthread_mutex_lock(&mailbox->lock);
    pb_outbox_list taken = mailbox->list;
    mailbox->list = *list;
    *list = taken;
    pthread_mutex_unlock(&mailbox->lock);
}

/* --- streams ---------------------------------------------------------------- */

static inline void pb_stream_free(pb_outbox *box) {
    pb_stream *stream = (pb_stream *)box;
    pb_outbox_destroy(box);
    free(stream->held);
    free(stream);
}

/* Returns NULL without memory. */
static inline pb_stream *pb_stream_new(int descriptor, int epoll) {
    pb_stream *stream = calloc(1, sizeof(*stream));
    if (stream == NULL)
        return NULL;
    pb_outbox_init(&stream->out, pb_stream_free);
    stream->out.descriptor = descriptor;
    stream->out.epoll = epoll;
    pb_delayed_ack_init(&stream->ack);
    stream->is_parked = true; /* a push may watch the socket for room before the thread adopts it */
    return stream;
}

/* For the loop: ask the stream's thread. Returns false without memory. */
static inline bool pb_stream_request(pb_stream *stream, uint32_t request) {
    pb_thread *thread = stream->thread;
    bool is_done = true;
    pthread_mutex_lock(&thread->lock);
    bool was_empty = thread->requests.count == 0;
    if (stream->requests == 0) {
        is_done = pb_list_add(&thread->requests, &stream->out);
        if (is_done)
            pb_outbox_retain(&stream->out);
    }
    if (is_done)
        stream->requests |= request;
    pthread_mutex_unlock(&thread->lock);
    if (is_done && was_empty)
        pb_wake(thread->event);
    return is_done;
}

/* Stop reading, and report why. */
static inline void pb_stream_park(pb_stream *stream, pb_turn *turn, uint32_t event) {
    stream->is_parked = true;
    pthread_mutex_lock(&stream->out.lock);
    pb_outbox_set_interest(&stream->out, stream->out.interest & ~(uint32_t)EPOLLIN);
    pb_outbox_report(&stream->out, turn, event);
    pthread_mutex_unlock(&stream->out.lock);
}

/* Keep bytes that were not consumed; they may lie within `held`. Returns false without memory. */
static inline bool pb_stream_hold(pb_stream *stream, const unsigned char *data, size_t size) {
    bool is_held = true;
    pthread_mutex_lock(&stream->out.lock);
    if (size > 0 && size >= stream->held_capacity) {
        /* Twice the size: there must be room for the next read. */
        unsigned char *held = malloc(2 * size);
        is_held = held != NULL;
        if (is_held) {
            memcpy(held, data, size);
            free(stream->held);
            stream->held = held;
            stream->held_capacity = 2 * size;
        }
    } else if (size > 0) {
        memmove(stream->held, data, size);
    }
    if (is_held)
        stream->held_size = size;
    /* An idle connection costs nothing. */
    if (is_held && size == 0 && stream->held != NULL) {
        free(stream->held);
        stream->held = NULL;
        stream->held_capacity = 0;
    }
    pthread_mutex_unlock(&stream->out.lock);
    return is_held;
}

/* Route received bytes; parks the stream at the first frame that is not a plain publish. */
static inline void pb_stream_route(
    pb_thread *thread, pb_stream *stream, const unsigned char *data, size_t size
) {
    pb_routed routed;
    pb_worker_begin(thread->router, thread->worker);
    int failed = pb_route(
        thread->router, thread->worker, stream->source, stream->framing, stream->encoding, data,
        size, &routed
    );
    pb_deliver(thread->worker);
    pb_worker_end(thread->worker);
    if (routed.consumed > 0)
        atomic_fetch_add_explicit(&stream->takes, 1, memory_order_relaxed);
    if (!pb_stream_hold(stream, data + routed.consumed, size - routed.consumed) || failed)
        pb_stream_park(stream, &thread->turn, PB_OVERFLOW);
    else if (routed.stop != PB_STOP_END)
        pb_stream_park(stream, &thread->turn, PB_RECEIVED);
}

/* Receive once. A frame larger than half the shared buffer gets memory of its own, which doubles
   as the bytes arrive; the framing rejects frames over its limit. */
static inline void pb_stream_receive(pb_thread *thread, pb_stream *stream) {
    unsigned char *start = thread->buffer;
    size_t capacity = PB_THREAD_BUFFER;
    if (stream->held_size > PB_THREAD_BUFFER / 2) {
        start = stream->held;
        capacity = stream->held_capacity;
    } else if (stream->held_size > 0) {
        memcpy(start, stream->held, stream->held_size);
    }
    size_t held = stream->held_size;
    ssize_t count = recv(stream->out.descriptor, start + held, capacity - held, MSG_DONTWAIT);
    if (count > 0) {
        pb_delayed_ack_received(&stream->ack, stream->out.descriptor);
        pb_stream_route(thread, stream, start, held + (size_t)count);
    } else if (count == 0) {
        pb_stream_park(stream, &thread->turn, PB_HUNG_UP);
    } else if (!pb_is_full_socket(errno) && errno != EINTR) {
        pb_stream_park(stream, &thread->turn, PB_BROKEN);
    }
}

/* --- the thread ------------------------------------------------------------- */

/* Adopted, or back from the loop. */
static inline void pb_stream_resume(pb_thread *thread, pb_stream *stream) {
    stream->is_parked = false;
    /* The loop may have left complete frames, for which the socket is not ready again. */
    if (stream->held_size > 0)
        pb_stream_route(thread, stream, stream->held, stream->held_size);
    if (stream->is_parked)
        return;
    pthread_mutex_lock(&stream->out.lock);
    int failed = pb_outbox_set_interest(&stream->out, stream->out.interest | EPOLLIN);
    pthread_mutex_unlock(&stream->out.lock);
    if (failed)
        pb_stream_park(stream, &thread->turn, PB_BROKEN);
}

static inline void pb_stream_release(pb_thread *thread, pb_stream *stream) {
    stream->is_parked = true;
    pthread_mutex_lock(&stream->out.lock);
    stream->out.failed = true; /* nothing is written any more */
    pb_outbox_set_interest(&stream->out, 0);
    pb_outbox_report(&stream->out, &thread->turn, PB_RELEASED);
    pthread_mutex_unlock(&stream->out.lock);
}

static inline void pb_thread_serve_requests(pb_thread *thread) {
    pb_clear(thread->event);
    pthread_mutex_lock(&thread->lock);
    pb_outbox_list taken = thread->requests;
    thread->requests = thread->taken;
    thread->taken = taken;
    pthread_mutex_unlock(&thread->lock);
    for (size_t at = 0; at < thread->taken.count; at++) {
        pb_stream *stream = (pb_stream *)thread->taken.items[at];
        pthread_mutex_lock(&thread->lock);
        uint32_t requests = stream->requests;
        stream->requests = 0;
        pthread_mutex_unlock(&thread->lock);
        if (requests & PB_END)
            pb_stream_release(thread, stream);
        else
            pb_stream_resume(thread, stream);
        pb_outbox_release(&stream->out);
    }
    thread->taken.count = 0;
}

static inline void pb_stream_serve(pb_thread *thread, pb_stream *stream, uint32_t events) {
    if (events & EPOLLOUT)
        pb_outbox_on_writable(&stream->out, &thread->turn);
    /* A parked socket that has failed is found by its next write. */
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR) && !stream->is_parked)
        pb_stream_receive(thread, stream);
}

static inline void *pb_thread_main(void *argument) {
    pb_thread *thread = argument;
    struct epoll_event ready[PB_THREAD_EVENTS];
    char name[16];
    snprintf(name, sizeof(name), "pump-%u", thread->number);
    prctl(PR_SET_NAME, name);
    while (!atomic_load_explicit(&thread->is_stopping, memory_order_acquire)) {
        /* Without memory the last turn may have kept events back. */
        int timeout_ms = thread->turn.changed.count > 0 ? PB_RETRY_MS : -1;
        int count = epoll_wait(thread->epoll, ready, PB_THREAD_EVENTS, timeout_ms);
        bool has_requests = false;
        for (int at = 0; at < count; at++) {
            if (ready[at].data.ptr == NULL)
                has_requests = true;
            else
                pb_stream_serve(thread, ready[at].data.ptr, ready[at].events);
        }
        /* Behind the events: a request may end a stream that one of them names. */
        if (has_requests)
            pb_thread_serve_requests(thread);
        pb_turn_end(&thread->turn);
        pb_mailbox_post(thread->mailbox, &thread->turn);
    }
    return NULL;
}

static inline void pb_thread_free(pb_thread *thread) {
    pb_turn_free(&thread->turn);
    pb_list_release(&thread->requests);
    pb_list_release(&thread->taken);
    pthread_mutex_destroy(&thread->lock);
    if (thread->epoll >= 0)
        close(thread->epoll);
    if (thread->event >= 0)
        close(thread->event);
    free(thread->buffer);
    free(thread);
}

/* Start a thread with a worker of its own. Returns NULL with errno set. The router's owner must
   not route at this moment. */
static inline pb_thread *pb_thread_start(pb_router *router, pb_mailbox *mailbox) {
    struct epoll_event wake = {.events = EPOLLIN};
    sigset_t all, before;
    pb_thread *thread = calloc(1, sizeof(*thread));
    if (thread == NULL)
        return NULL;
    pthread_mutex_init(&thread->lock, NULL);
    thread->router = router;
    thread->mailbox = mailbox;
    thread->event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    thread->epoll = epoll_create1(EPOLL_CLOEXEC);
    thread->buffer = malloc(PB_THREAD_BUFFER);
    thread->worker = pb_router_add_worker(router);
    int error = thread->buffer == NULL || thread->worker == NULL ? ENOMEM : 0;
    if (error == 0 && (thread->event < 0 || thread->epoll < 0))
        error = errno;
    if (error == 0 && epoll_ctl(thread->epoll, EPOLL_CTL_ADD, thread->event, &wake) < 0)
        error = errno;
    if (error == 0) {
        thread->number = thread->worker->number;
        pb_turn_init(&thread->turn, thread->number);
        thread->worker->turn = &thread->turn;
        /* Signals are the loop's. */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        error = pthread_create(&thread->handle, NULL, pb_thread_main, thread);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    if (error == 0)
        return thread;
    pb_thread_free(thread);
    errno = error;
    return NULL;
}

/* Stop the thread and wait for it. All its streams must have been released. */
static inline void pb_thread_stop(pb_thread *thread) {
    atomic_store_explicit(&thread->is_stopping, true, memory_order_release);
    pb_wake(thread->event);
    pthread_join(thread->handle, NULL);
    pb_thread_free(thread);
}

#endif
