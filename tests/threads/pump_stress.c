/* A stress test of the pump's threads, without Python: N threads, a loop in the place of Python,
   and clients that check what they receive.

       pump_stress THREADS SECONDS SEED

   The seed's bits choose variants: 1 large messages, 2 parts of messages, 4 topics that are never
   dropped. Prints one line of JSON. Exit code: 0; 1 if an invariant was broken; 3 if the program
   hung. */
#include "board.h"
#include "client.h"
#include "loop.h"

enum { HANG_S = 60 };

#if defined(__SANITIZE_THREAD__)
/* Bytes that pass through a socket order nothing: each thread of the server must be ordered by
   its own locks, and not by a client that answers. */
const char *__tsan_default_options(void) {
    return "io_sync=0";
}
#endif

static void add_counts(client_counts *sum, const client_counts *more) {
    uint64_t *to = (uint64_t *)sum;
    const uint64_t *from = (const uint64_t *)more;
    for (size_t at = 0; at < sizeof(*sum) / sizeof(*to); at++)
        to[at] += from[at];
}

static void describe_hang(const loop *loop) {
    for (const session *session = loop->sessions; session != NULL; session = session->next) {
        const pb_stream *stream = session->stream;
        fprintf(stderr, "client %u: state %d, blocker %u, held in %zu out %zu, parked %d, "
            "stalled %d, full %d, interest %u, events %u, requests %u\n",
            session->record->client, session->state, session->blocker, stream->held_size,
            stream->out.held, stream->is_parked, stream->out.stalled, (int)stream->out.full,
            stream->out.interest, stream->out.events, stream->requests);
    }
}

/* Returns false if a participant did not finish the stage. */
static bool pass_stage(board *board, int stage, unsigned participants) {
    double deadline_s = now_s() + HANG_S;
    atomic_store(&board->arrived, 0);
    atomic_store(&board->stage, stage);
    while (atomic_load(&board->arrived) < participants) {
        if (now_s() > deadline_s)
            return false;
        usleep(1000);
    }
    return true;
}

/* Each connection's counters of both sides. Returns the number of differences. */
static uint64_t check_records(client **clients, uint64_t *unread) {
    uint64_t differences = 0;
    for (unsigned at = 0; at < CLIENTS; at++) {
        for (connection_record *record = clients[at]->records; record != NULL; record = record->next) {
            *unread += record->pushed - record->received;
            if (record->received > record->pushed || record->routed > record->published)
                differences++;
            else if (record->is_polite
                     && (record->received < record->pushed || record->routed < record->published))
                differences++;
            else
                continue;
            fprintf(stderr, "client %u: polite %d, published %llu, routed %llu, pushed %llu, received %llu\n",
                at, record->is_polite, (unsigned long long)record->published,
                (unsigned long long)record->routed, (unsigned long long)record->pushed,
                (unsigned long long)record->received);
        }
    }
    return differences;
}

/* The counters of the workers against those of the connections. Returns the number of
   differences. */
static uint64_t check_workers(loop *loop, uint64_t *delivered) {
    uint64_t messages = 0, unheard = 0, denied = 0, advanced = 0;
    pb_router *router = &loop->router;
    for (unsigned at = 0; at < router->worker_count; at++) {
        messages += pb_counter_get(&router->workers[at]->messages);
        unheard += pb_counter_get(&router->workers[at]->unheard);
        denied += pb_counter_get(&router->workers[at]->denied);
        *delivered += pb_counter_get(&router->workers[at]->delivered);
    }
    for (size_t at = 0; at < router->topics.capacity; at++)
        if (router->topics.slots[at] != NULL)
            advanced += pb_topic_next_id(router->topics.slots[at]);
    uint64_t heard = messages - unheard - denied;
    uint64_t differences = messages != loop->routed + pb_counter_get(&loop->bus.messages);
    differences += *delivered != loop->pushed + loop->dropped;
    /* A part takes no id, and a topic that is dropped forgets its next one. */
    if (loop->board->holds_topics && !loop->board->has_parts)
        differences += heard != advanced;
    if (differences > 0)
        fprintf(stderr, "messages %llu, routed %llu, heard %llu, ids %llu, delivered %llu, pushed %llu, dropped %llu\n",
            (unsigned long long)messages, (unsigned long long)loop->routed,
            (unsigned long long)heard, (unsigned long long)advanced,
            (unsigned long long)*delivered, (unsigned long long)loop->pushed,
            (unsigned long long)loop->dropped);
    return differences;
}

/* Returns whether every invariant held. */
static bool print_result(loop *loop, client **clients, double seconds) {
    client_counts sum = {0};
    uint64_t unread = 0, delivered = 0;
    for (unsigned at = 0; at < CLIENTS; at++)
        add_counts(&sum, &clients[at]->counts);
    uint64_t miscounted = check_records(clients, &unread) + check_workers(loop, &delivered);
    miscounted += delivered != sum.received + unread + loop->dropped;
    struct { const char *name; uint64_t count; } counts[] = {
        {"published", sum.published}, {"delivered", delivered}, {"received", sum.received},
        {"unread", unread}, {"dropped", loop->dropped}, {"subscribes", sum.subscribes},
        {"removes", sum.removes}, {"disconnects", sum.leaves}, {"cuts", sum.cuts},
        {"blocked", loop->blocked}, {"policies", loop->policies}, {"held_max", loop->held_max},
    };
    struct { const char *name; uint64_t count; } errors[] = {
        {"lost", sum.lost}, {"reordered", sum.reordered}, {"foreign", sum.foreign},
        {"corrupt", sum.corrupt}, {"refused", sum.refused + loop->errors},
        {"over_bound", loop->over_bound}, {"miscounted", miscounted},
    };
    uint64_t broken = 0;
    printf("{\"threads\": %u, \"seed\": %llu, \"seconds\": %.2f", loop->thread_count,
        (unsigned long long)loop->board->seed, seconds);
    for (size_t at = 0; at < sizeof(counts) / sizeof(*counts); at++)
        printf(", \"%s\": %llu", counts[at].name, (unsigned long long)counts[at].count);
    for (size_t at = 0; at < sizeof(errors) / sizeof(*errors); at++) {
        printf(", \"%s\": %llu", errors[at].name, (unsigned long long)errors[at].count);
        broken += errors[at].count;
    }
    printf("}\n");
    return broken == 0;
}

static void free_clients(client **clients) {
    for (unsigned at = 0; at < CLIENTS; at++) {
        client *client = clients[at];
        while (client->records != NULL) {
            connection_record *record = client->records;
            client->records = record->next;
            sem_destroy(&record->ended);
            free(record);
        }
        free(client->out);
        free(client->in);
        free(client);
    }
}

static void run_for(double seconds) {
    struct timespec left = {(time_t)seconds, (long)(1e9 * (seconds - (double)(time_t)seconds))};
    while (nanosleep(&left, &left) < 0)
        continue;
}

int main(int count, char **arguments) {
    client *clients[CLIENTS];
    board *board = allocate(sizeof(*board));
    if (count != 4) {
        fprintf(stderr, "usage: pump_stress THREADS SECONDS SEED\n");
        return 2;
    }
    board->seed = strtoull(arguments[3], NULL, 10);
    board->has_large = board->seed & 1;
    board->has_parts = board->seed & 2;
    board->holds_topics = board->seed & 4;
    board->event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    pthread_mutex_init(&board->lock, NULL);
    double started_s = now_s();
    loop *loop = start_loop(board, (unsigned)strtoul(arguments[1], NULL, 10));
    for (unsigned at = 0; at < CLIENTS; at++)
        clients[at] = start_client(board, at);
    run_for(strtod(arguments[2], NULL));
    if (!pass_stage(board, SETTLE, CLIENTS + 1) || !pass_stage(board, VERIFY, CLIENTS)) {
        fprintf(stderr, "pump_stress: hung in stage %d\n", stage_of(board));
        describe_hang(loop);
        _exit(3);
    }
    atomic_store(&board->stage, LEAVE);
    for (unsigned at = 0; at < CLIENTS; at++)
        pthread_join(clients[at]->thread, NULL);
    stop_loop(loop);
    bool is_intact = print_result(loop, clients, now_s() - started_s);
    free_loop(loop);
    free_clients(clients);
    close(board->event);
    free(board);
    return is_intact ? 0 : 1;
}
