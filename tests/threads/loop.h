/* The loop of pump_stress.c, worker 0. It plays the part of Python: sessions, control frames,
   the policy, blocked publishers, and the end of connections.

   A session's stream is with its thread, or parked and with the loop. The loop ends it in three
   steps: remove the subscriber in a change, so that nothing is pushed again; send or drop what is
   held; request PB_END and wait for PB_RELEASED. Then it closes the socket and drops its
   reference. */
#ifndef STRESS_LOOP_H
#define STRESS_LOOP_H

#include <poll.h>

#include "board.h"
#include "pump_thread.h"
#include "rqueue_framing.h"

enum {
    MAX_THREADS = 16,
    IDENTITIES = 6,
    HIGH_WATER = 48 * 1024,
    CUT_BYTES = 64 * 1024,
    BUS_BURST = 30,
};

enum session_state { SERVING, WAITING, DRAINING, ENDING };

typedef struct session {
    struct session *next;
    pb_stream *stream;
    pb_source source;
    connection_record *record;
    enum session_state state;
    uint32_t subscriber, blocker; /* numbers; the blocker of a WAITING session */
    bool topics[TOPICS];
} session;

typedef struct loop {
    board *board;
    pb_router router;
    pb_mailbox mailbox;
    pb_turn turn;
    pb_thread *threads[MAX_THREADS];
    unsigned thread_count;
    pb_rqueue_framing framing;
    session *sessions;
    uint64_t chance, epoch; /* the policy's */
    pb_source bus;
    uint64_t bus_numbers[TOPICS];
    bool has_settled;
    atomic_bool is_over; /* all clients are gone */
    uint64_t blocked, policies, errors, held_max, over_bound;
    uint64_t pushed, dropped, routed; /* by ended connections */
    uint64_t left; /* bytes that threads have handed over */
    pthread_t handle;
} loop;

/* --- tables -------------------------------------------------------------------------- */

static inline bool is_allowed(const loop *loop, uint32_t topic, uint32_t identity) {
    uint64_t chance = loop->epoch * 64 + topic * 2 + identity % 2;
    if (is_closed_topic(topic))
        return identity % 2 == 0;
    return !is_changing_topic(topic) || draw(&chance) % 4 != 0;
}

static inline void judge(loop *loop, session *session, const pb_routed *routed) {
    uint32_t topic = read_topic(routed->topic, routed->topic_size);
    uint32_t identity = pb_source_identity(&session->source);
    pb_router_change_begin(&loop->router);
    pb_topic_table *topics = &loop->router.topics;
    if (topics->idle >= PB_MAX_IDLE_TOPICS)
        pb_topics_sweep_idle(topics);
    pb_topic *found = pb_topics_find_or_add(topics, routed->topic, routed->topic_size);
    pb_verdict verdict = is_allowed(loop, topic, identity) ? PB_ALLOW : PB_DENY;
    if (pb_topic_remember_verdict(found, identity, loop->router.generation, verdict) < 0)
        abort();
    pb_router_change_end(&loop->router);
}

static inline void change_policy(loop *loop) {
    pb_router_change_begin(&loop->router);
    loop->epoch++;
    loop->router.generation++;
    if (draw_chance(&loop->chance, 300))
        pb_topics_sweep_idle(&loop->router.topics);
    pb_router_change_end(&loop->router);
    loop->policies++;
}

static inline void hold_topics(loop *loop) {
    unsigned char name[MAX_NAME];
    for (uint32_t topic = 0; topic < TOPICS; topic++) {
        size_t size = write_topic(name, topic);
        pb_topic *held = pb_topics_find_or_add(&loop->router.topics, name, size);
        held->hold = 1;
        pb_topics_update_idle(&loop->router.topics, held, 1);
    }
}

static inline void set_subscribed(loop *loop, session *session, uint32_t topic, bool is_on) {
    unsigned char name[MAX_NAME];
    size_t size = write_topic(name, topic);
    if (session->topics[topic] == is_on)
        return;
    session->topics[topic] = is_on;
    int failed = is_on ? pb_router_link(&loop->router, session->subscriber, name, size)
                       : pb_router_unlink(&loop->router, session->subscriber, name, size);
    if (failed)
        abort();
}

/* --- sessions ------------------------------------------------------------------------ */

static inline void request(session *session, enum pb_request request) {
    if (!pb_stream_request(session->stream, request))
        abort();
}

static inline void open_session(loop *loop, connection_record *record) {
    session *session = allocate(sizeof(*session));
    pb_thread *thread = loop->threads[draw_below(&loop->chance, loop->thread_count)];
    pb_stream *stream = pb_stream_new(record->server_socket, thread->epoll);
    if (stream == NULL)
        abort();
    stream->thread = thread;
    stream->source = &session->source;
    stream->framing = &loop->framing.framing;
    stream->out.owner = session;
    stream->out.reports_stalls = true;
    stream->out.high_water = HIGH_WATER;
    stream->out.low_water = HIGH_WATER / 2;
    /* Below the mark where publishers would wait. */
    if (record->client % 8 == 7) {
        stream->out.high_water = 2 * CUT_BYTES;
        stream->out.max_bytes = CUT_BYTES;
    }
    pb_source_reclassify(&session->source, record->client % 2);
    session->stream = stream;
    session->record = record;
    session->next = loop->sessions;
    loop->sessions = session;
    pb_router_change_begin(&loop->router);
    session->subscriber = pb_router_add_subscriber(&loop->router, 0);
    pb_router_set_outbox(&loop->router, session->subscriber, &stream->out);
    pb_router_change_end(&loop->router);
    request(session, PB_ADOPT);
}

static inline void serve(loop *loop, session *session);

/* Let publishers continue that wait for this subscriber. */
static inline void wake_publishers(loop *loop, uint32_t subscriber) {
    for (session *session = loop->sessions; session != NULL; session = session->next) {
        if (session->state != WAITING || session->blocker != subscriber)
            continue;
        session->state = SERVING;
        if (draw_chance(&loop->chance, 500))
            request(session, PB_RESUME);
        else
            serve(loop, session);
    }
}

/* Only behind pb_outbox_close: until then another thread may push. */
static inline void release_if_sent(session *session) {
    pb_outbox *box = &session->stream->out;
    pthread_mutex_lock(&box->lock);
    bool is_sent = box->held == 0 || box->failed;
    pthread_mutex_unlock(&box->lock);
    if (is_sent) {
        session->state = ENDING;
        request(session, PB_END);
    }
}

/* Accept no more output for the session, and end it when the rest is sent, or now. */
static inline void end_session(loop *loop, session *session, bool keep_held) {
    pb_outbox *box = &session->stream->out;
    if (session->state == ENDING || (session->state == DRAINING && keep_held))
        return;
    if (session->state != DRAINING) {
        session->state = DRAINING;
        pb_router_change_begin(&loop->router);
        for (uint32_t topic = 0; topic < TOPICS; topic++)
            set_subscribed(loop, session, topic, false);
        pb_router_remove_subscriber(&loop->router, session->subscriber);
        pb_router_change_end(&loop->router);
        wake_publishers(loop, session->subscriber);
    }
    pb_outbox_close(box, &loop->turn, keep_held);
    release_if_sent(session);
}

/* Its thread has let go of the stream. */
static inline void free_session(loop *loop, session *session) {
    connection_record *record = session->record;
    struct session **link = &loop->sessions;
    pb_outbox *box = &session->stream->out;
    while (*link != session)
        link = &(*link)->next;
    *link = session->next;
    pthread_mutex_lock(&box->lock);
    record->pushed = box->messages;
    record->dropped = box->dropped;
    box->owner = NULL;
    pthread_mutex_unlock(&box->lock);
    record->routed = pb_counter_get(&session->source.messages);
    loop->pushed += record->pushed;
    loop->dropped += record->dropped;
    loop->routed += record->routed;
    close(record->server_socket);
    pb_outbox_release(box);
    free(session);
    sem_post(&record->ended);
}

/* --- received bytes -------------------------------------------------------------------- */

/* Returns whether the session goes on. */
static inline bool handle_control(loop *loop, session *session, const pb_frame *frame) {
    uint32_t topic;
    if (frame->code == PB_RQUEUE_DEREGISTER) {
        end_session(loop, session, true);
        return false;
    }
    topic = read_topic(frame->topic, (size_t)frame->topic_size);
    pb_router_change_begin(&loop->router);
    set_subscribed(loop, session, topic, frame->code == PB_RQUEUE_SUBSCRIBE);
    pb_router_change_end(&loop->router);
    return true;
}

/* Route bytes that the loop has, as worker 0. */
static inline pb_stop route(loop *loop, session *session, size_t *consumed) {
    pb_worker *worker = loop->router.workers[0];
    pb_stream *stream = session->stream;
    bool judges_within = draw_chance(&loop->chance, 500);
    pb_routed routed;
    pb_worker_begin(&loop->router, worker);
    int failed = pb_route(&loop->router, worker, &session->source, stream->framing,
        stream->encoding, stream->held, stream->held_size, &routed);
    pb_deliver(worker);
    if (!failed && routed.stop == PB_STOP_JUDGE && judges_within)
        judge(loop, session, &routed);
    pb_worker_end(worker);
    if (!failed && routed.stop == PB_STOP_JUDGE && !judges_within)
        judge(loop, session, &routed);
    session->blocker = routed.blocker;
    *consumed = routed.consumed;
    return routed.stop;
}

static inline void consume(session *session, size_t size) {
    pb_stream *stream = session->stream;
    if (!pb_stream_hold(stream, stream->held + size, stream->held_size - size))
        abort();
}

/* Work on a parked stream until it can go back to its thread, or cannot go on. */
static inline void serve(loop *loop, session *session) {
    pb_stream *stream = session->stream;
    while (true) {
        pb_frame frame;
        size_t consumed;
        pb_stop stop;
        pb_frame_kind kind =
            stream->framing->next(stream->framing, stream->held, (ssize_t)stream->held_size, &frame);
        if (kind == PB_CONTROL) {
            if (!handle_control(loop, session, &frame))
                return;
            consume(session, (size_t)frame.size);
            if (draw_chance(&loop->chance, 500))
                break;
            continue;
        }
        stop = route(loop, session, &consumed);
        consume(session, consumed);
        if (stop == PB_STOP_BLOCKED) {
            session->state = WAITING;
            loop->blocked++;
            return;
        }
        if (stop == PB_STOP_END)
            break;
        if (stop == PB_STOP_JUDGE && draw_chance(&loop->chance, 500))
            break;
        if (stop != PB_STOP_CONTROL && stop != PB_STOP_JUDGE) {
            loop->errors++;
            end_session(loop, session, false);
            return;
        }
    }
    request(session, PB_RESUME);
}

/* --- events ------------------------------------------------------------------------------ */

static inline void on_events(loop *loop, pb_outbox *box) {
    session *session = box->owner;
    pthread_mutex_lock(&box->lock);
    uint32_t events = box->events;
    box->events = 0;
    pthread_mutex_unlock(&box->lock);
    if (session == NULL)
        return;
    if (events & PB_HANDED_OVER)
        loop->left += session->stream->held_size;
    if (events & PB_RELEASED) {
        free_session(loop, session);
        return;
    }
    if (events & (PB_OVERFLOW | PB_BROKEN))
        end_session(loop, session, false);
    if (events & PB_HUNG_UP)
        end_session(loop, session, true);
    if (events & PB_RECEIVED && session->state == SERVING) {
        pb_router_changes_begin(&loop->router);
        serve(loop, session);
        pb_router_changes_end(&loop->router);
    }
    if (events & PB_ROOM && session->state < DRAINING)
        wake_publishers(loop, session->subscriber);
    if (events & PB_DRAINED && session->state == DRAINING)
        release_if_sent(session);
}

static inline void take_events(loop *loop, pb_outbox_list *list) {
    for (size_t at = 0; at < list->count; at++) {
        on_events(loop, list->items[at]);
        pb_outbox_release(list->items[at]);
    }
    list->count = 0;
}

/* Events that the loop has caused itself; handling them may cause more. */
static inline void take_own_events(loop *loop) {
    while (loop->turn.changed.count > 0) {
        pb_outbox *box = loop->turn.changed.items[--loop->turn.changed.count];
        on_events(loop, box);
        pb_outbox_release(box);
    }
}

/* --- the loop's own work ------------------------------------------------------------------- */

/* Publish for the bus itself. A full reader ends the burst; the rest was never sent. */
static inline void publish_burst_of_bus(loop *loop) {
    unsigned char buffer[BUS_BURST * (FRAME_ROOM + sizeof(message))];
    uint32_t topic = draw_below(&loop->chance, SHARED_TOPICS);
    pb_worker *worker = loop->router.workers[0];
    message head = {BUS, 1, topic, sizeof(message), loop->bus_numbers[topic], 0};
    size_t size = 0;
    pb_routed routed;
    for (int left = BUS_BURST; left > 0; left--) {
        head.number++;
        size += write_publish(buffer + size, &head, false);
    }
    note_sent(loop->board, &head);
    pb_worker_begin(&loop->router, worker);
    pb_route(&loop->router, worker, &loop->bus, &loop->framing.framing, 0, buffer, size, &routed);
    pb_deliver(worker);
    pb_worker_end(worker);
    head.number = loop->bus_numbers[topic] += routed.consumed / (size / BUS_BURST);
    note_sent(loop->board, &head);
}

static inline void reclassify(loop *loop) {
    uint32_t skip = draw_below(&loop->chance, CLIENTS);
    session *session = loop->sessions;
    while (session != NULL && skip-- > 0)
        session = session->next;
    if (session != NULL) {
        uint32_t identity = session->record->client % 2 + 2 * draw_below(&loop->chance, IDENTITIES / 2);
        pb_source_reclassify(&session->source, identity);
    }
}

/* An outbox may hold the mark, and one received buffer of each thread that scanned before the mark
   was reached; or its bound, and the buffer that exceeded it. */
static inline void check_memory(loop *loop) {
    size_t frame = FRAME_ROOM + (loop->board->has_large ? LARGE_BODY : SMALL_BODY);
    size_t buffer = 2 * SOCKET_BUFFER + frame;
    for (session *session = loop->sessions; session != NULL; session = session->next) {
        pb_outbox *box = &session->stream->out;
        pthread_mutex_lock(&box->lock);
        size_t held = box->held;
        bool is_cut = box->max_bytes < box->high_water;
        pthread_mutex_unlock(&box->lock);
        if (held > loop->held_max)
            loop->held_max = held;
        if (held > (is_cut ? CUT_BYTES + buffer : HIGH_WATER + (loop->thread_count + 1) * buffer))
            loop->over_bound++;
    }
}

static inline void do_own_work(loop *loop) {
    int stage = stage_of(loop->board);
    if (stage == RUN) {
        if (draw_chance(&loop->chance, 100))
            change_policy(loop);
        if (draw_chance(&loop->chance, 100))
            reclassify(loop);
        if (draw_chance(&loop->chance, 200))
            publish_burst_of_bus(loop);
    } else if (!loop->has_settled) {
        loop->has_settled = true;
        arrive(loop->board);
    }
    check_memory(loop);
}

static inline void *run_loop(void *argument) {
    loop *loop = argument;
    pb_outbox_list events = {0};
    struct pollfd ready[] = {
        {.fd = loop->mailbox.event, .events = POLLIN},
        {.fd = loop->board->event, .events = POLLIN},
    };
    while (!atomic_load(&loop->is_over) || loop->sessions != NULL) {
        poll(ready, 2, 2);
        connection_record *record = take_connections(loop->board);
        while (record != NULL) {
            connection_record *next = record->next;
            open_session(loop, record);
            record = next;
        }
        pb_mailbox_take(&loop->mailbox, &events);
        take_events(loop, &events);
        do_own_work(loop);
        pb_turn_end(&loop->turn);
        take_own_events(loop);
    }
    pb_list_release(&events);
    return NULL;
}

static inline loop *start_loop(board *board, unsigned thread_count) {
    loop *loop = allocate(sizeof(*loop));
    loop->board = board;
    loop->chance = board->seed * 31 + 7;
    loop->framing.framing.next = pb_rqueue_next;
    loop->framing.max_payload = LARGE_BODY + FRAME_ROOM;
    loop->bus.trusted = 1;
    pb_turn_init(&loop->turn, 0);
    if (pb_router_init(&loop->router, draw(&loop->chance)) < 0 || !pb_mailbox_init(&loop->mailbox))
        abort();
    loop->router.workers[0]->turn = &loop->turn;
    loop->router.has_produce_rules = 1;
    if (board->holds_topics)
        hold_topics(loop);
    while (loop->thread_count < thread_count) {
        pb_thread *thread = pb_thread_start(&loop->router, &loop->mailbox);
        if (thread == NULL)
            abort();
        loop->threads[loop->thread_count++] = thread;
    }
    if (pthread_create(&loop->handle, NULL, run_loop, loop) != 0)
        abort();
    return loop;
}

static inline void stop_loop(loop *loop) {
    atomic_store(&loop->is_over, true);
    pthread_join(loop->handle, NULL);
    for (unsigned at = 0; at < loop->thread_count; at++)
        pb_thread_stop(loop->threads[at]);
}

static inline void free_loop(loop *loop) {
    pb_router_free(&loop->router);
    pb_mailbox_free(&loop->mailbox);
    pb_turn_free(&loop->turn);
    free(loop);
}

#endif
