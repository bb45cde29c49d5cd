/* A client of pump_stress.c: subscribes, publishes, naps, leaves and comes back at random, and
   checks all that it receives.

   The oracle. A reader knows the last number that it has seen of each publisher and topic, and
   since when its own subscription holds: since a message that it published behind SUBSCRIBE came
   back. Then the next number must be the last one plus 1; the first number must be at most one
   more than the publisher had sent at that moment. At the end each subscription must have
   seen the last number of every publisher. */
#ifndef STRESS_CLIENT_H
#define STRESS_CLIENT_H

#include <poll.h>
#include <sched.h>

#include "board.h"

enum subscription_state { OFF, JOINING, ON, LEAVING };

typedef struct subscription {
    enum subscription_state state;
    bool has_snapshot;
    uint32_t epoch; /* of this subscription among those of the connection; never 0 */
    uint64_t token; /* the probe that ends JOINING or LEAVING */
    uint64_t snapshot[PUBLISHERS]; /* the board when the subscription was known to hold */
} subscription;

typedef struct seen {
    uint32_t epoch; /* of the subscription that received it */
    uint32_t incarnation;
    uint64_t number;
} seen;

typedef struct client_counts {
    uint64_t published, received, subscribes, removes, connections, leaves, cuts;
    uint64_t lost, reordered, foreign, corrupt, refused;
} client_counts;

typedef struct client {
    board *board;
    uint32_t number, incarnation;
    uint64_t chance;
    int socket; /* -1: not connected */
    bool is_leaving; /* reads until the server closes */
    int arrived_at;  /* the last stage that it has finished */
    connection_record *record;
    connection_record *records; /* of all its connections */
    unsigned char *out, *in;
    size_t out_size, out_sent, in_size;
    uint64_t tokens_sent, tokens_back;
    uint64_t last_number[TOPICS]; /* published */
    subscription subscriptions[TOPICS];
    seen seen[PUBLISHERS][TOPICS];
    client_counts counts;
    uint32_t reports;
    pthread_t thread;
} client;

enum { OUT_ROOM = 2 * LARGE_BODY, IN_ROOM = 2 * LARGE_BODY, ENOUGH_PENDING = 64 * 1024, MAX_REPORTS = 5 };

static inline uint32_t own_topic(const client *client) {
    return SHARED_TOPICS + client->number;
}

/* The loop gives this client's outbox a low bound, and cuts the connection beyond it. */
static inline bool may_be_cut(unsigned client) {
    return client % 8 == 7;
}

/* --- the oracle ------------------------------------------------------------------- */

static inline void report(client *client, const char *error, const message *head, const seen *last) {
    if (client->reports++ < MAX_REPORTS)
        fprintf(stderr,
        "client %u: %s: topic %u, publisher %u, incarnation %u, number %llu after %u/%llu\n",
        client->number, error, head->topic, head->publisher, head->incarnation,
        (unsigned long long)head->number, last->incarnation, (unsigned long long)last->number);
}

/* Whether no message of this subscription is missing before this one. */
static inline bool is_next(const subscription *mine, const seen *last, const message *head) {
    if (last->epoch == mine->epoch)
        return head->number == (last->incarnation == head->incarnation ? last->number + 1 : 1);
    if (!mine->has_snapshot)
        return true;
    uint64_t snapshot = mine->snapshot[head->publisher];
    uint32_t incarnation = (uint32_t)(snapshot >> 40);
    uint64_t number = snapshot & (((uint64_t)1 << 40) - 1);
    if (head->incarnation > incarnation)
        return head->number == 1;
    return head->incarnation < incarnation || head->number <= number + 1;
}

static inline void check_message(client *client, const message *head) {
    subscription *mine = &client->subscriptions[head->topic];
    seen *last = &client->seen[head->publisher][head->topic];
    bool is_denied = is_closed_topic(head->topic) && head->publisher < BUS && head->publisher % 2;
    if (mine->state == OFF || is_denied) {
        client->counts.foreign++;
        report(client, "foreign", head, last);
    } else if (head->incarnation < last->incarnation
               || (head->incarnation == last->incarnation && head->number <= last->number)) {
        client->counts.reordered++;
        report(client, "reordered", head, last);
    } else if (!is_changing_topic(head->topic) && !is_next(mine, last, head)) {
        client->counts.lost++;
        report(client, "lost", head, last);
    }
    *last = (seen){mine->epoch, head->incarnation, head->number};
}

/* A message that was sent behind earlier SUBSCRIBEs and REMOVEs has come back: they hold. */
static inline void on_probe(client *client, uint64_t token) {
    client->tokens_back = token;
    for (uint32_t topic = 0; topic < TOPICS; topic++) {
        subscription *mine = &client->subscriptions[topic];
        if (mine->token > token)
            continue;
        if (mine->state == LEAVING)
            mine->state = OFF;
        if (mine->state != JOINING)
            continue;
        mine->state = ON;
        mine->has_snapshot = true;
        for (uint32_t publisher = 0; publisher < PUBLISHERS; publisher++)
            mine->snapshot[publisher] = sent_by(client->board, publisher, topic);
    }
}

/* Of the bytes behind the head. */
static inline bool is_filled(const unsigned char *at, size_t size, unsigned char fill) {
    return size == 0 || (at[0] == fill && memcmp(at, at + 1, size - 1) == 0);
}

static inline void on_frame(client *client, const unsigned char *frame, size_t size) {
    size_t name_size = frame[5];
    size_t head_at = 6 + name_size + (frame[4] == 8 ? PART_HEADER : 0);
    message head;
    client->counts.received++;
    client->record->received++;
    if ((frame[4] != 7 && frame[4] != 8) || head_at + sizeof(head) > size) {
        client->counts.corrupt++;
        return;
    }
    memcpy(&head, frame + head_at, sizeof(head));
    if (head.publisher >= PUBLISHERS || head.topic != read_topic(frame + 6, name_size)
        || head.topic >= TOPICS || head.size != size - head_at
        || !is_filled(frame + head_at + sizeof(head), head.size - sizeof(head), fill_of(&head))) {
        client->counts.corrupt++;
        return;
    }
    check_message(client, &head);
    if (head.token != 0 && head.publisher == client->number)
        on_probe(client, head.token);
}

/* Whether the last message of each publisher has come, while all are silent. */
static inline void check_last(client *client, uint32_t topic) {
    subscription *mine = &client->subscriptions[topic];
    if (mine->state != ON || is_changing_topic(topic))
        return;
    for (uint32_t publisher = 0; publisher < PUBLISHERS; publisher++) {
        uint64_t sent = sent_by(client->board, publisher, topic);
        message head = {.publisher = publisher, .topic = topic, .incarnation = (uint32_t)(sent >> 40)};
        seen *last = &client->seen[publisher][topic];
        head.number = sent & (((uint64_t)1 << 40) - 1);
        if (head.number == 0 || (is_closed_topic(topic) && publisher < BUS && publisher % 2))
            continue;
        if (last->epoch == mine->epoch
                ? last->incarnation == head.incarnation && last->number == head.number
                : mine->snapshot[publisher] >= sent)
            continue;
        client->counts.lost++;
        report(client, "lost at the end", &head, last);
    }
}

/* --- the connection ----------------------------------------------------------------- */

static inline void reserve_out(client *client, size_t size) {
    if (client->out_size + size <= OUT_ROOM)
        return;
    memmove(client->out, client->out + client->out_sent, client->out_size - client->out_sent);
    client->out_size -= client->out_sent;
    client->out_sent = 0;
    if (client->out_size + size > OUT_ROOM)
        abort();
}

static inline void publish(client *client, uint32_t topic, size_t size, uint64_t token) {
    message head = {client->number, client->incarnation, topic, (uint32_t)size, 0, token};
    bool is_part = client->board->has_parts && token == 0 && draw_chance(&client->chance, 100);
    head.number = ++client->last_number[topic];
    reserve_out(client, FRAME_ROOM + size);
    note_sent(client->board, &head);
    client->out_size += write_publish(client->out + client->out_size, &head, is_part);
    client->counts.published++;
    client->record->published++;
}

static inline void control(client *client, int type, uint32_t topic) {
    reserve_out(client, FRAME_ROOM);
    client->out_size += write_control(client->out + client->out_size, type, topic);
}

static inline void subscribe(client *client, uint32_t topic) {
    subscription *mine = &client->subscriptions[topic];
    if (mine->state == LEAVING)
        return; /* messages of two subscriptions would look the same */
    control(client, 1, topic);
    client->counts.subscribes++;
    if (mine->state != OFF)
        return; /* sent twice: changes nothing */
    mine->state = JOINING;
    mine->has_snapshot = false;
    mine->epoch++;
    mine->token = client->tokens_sent + 1;
}

static inline void unsubscribe(client *client, uint32_t topic) {
    subscription *mine = &client->subscriptions[topic];
    if (mine->state != ON)
        return;
    control(client, 2, topic);
    client->counts.removes++;
    mine->state = LEAVING;
    mine->token = client->tokens_sent + 1;
}

/* A probe goes to the client's own topic, or to one that it subscribes to. */
static inline void probe(client *client) {
    uint32_t topic = draw_below(&client->chance, OPEN_TOPICS);
    enum subscription_state state = client->subscriptions[topic].state;
    if ((state != JOINING && state != ON) || stage_of(client->board) != RUN)
        topic = own_topic(client);
    publish(client, topic, sizeof(message), ++client->tokens_sent);
}

static inline void connect_client(client *client) {
    int sockets[2];
    int size = SOCKET_BUFFER;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, sockets) < 0)
        abort();
    setsockopt(sockets[0], SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
    setsockopt(sockets[1], SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
    client->socket = sockets[0];
    client->incarnation++;
    client->is_leaving = false;
    client->out_size = client->out_sent = client->in_size = 0;
    client->tokens_sent = client->tokens_back = 0;
    memset(client->last_number, 0, sizeof(client->last_number));
    memset(client->subscriptions, 0, sizeof(client->subscriptions));
    memset(client->seen, 0, sizeof(client->seen));
    for (uint32_t topic = 0; topic < TOPICS; topic++)
        note_sent(client->board, &(message){client->number, client->incarnation, topic, 0, 0, 0});
    client->record = allocate(sizeof(*client->record));
    sem_init(&client->record->ended, 0, 0);
    client->record->client = client->number;
    client->record->server_socket = sockets[1];
    client->counts.connections++;
    offer_connection(client->board, client->record);
    subscribe(client, own_topic(client));
    probe(client);
}

/* Close, and wait until the server has let go: then no message of this incarnation is left. */
static inline void disconnect_client(client *client) {
    close(client->socket);
    client->socket = -1;
    while (sem_wait(&client->record->ended) < 0)
        continue;
    client->record->next = client->records;
    client->records = client->record;
    client->record = NULL;
}

/* Write as much as the socket takes, or a random part, which may end within a frame. */
static inline void write_pending(client *client) {
    size_t pending = client->out_size - client->out_sent;
    if (pending > 1 && draw_chance(&client->chance, 100))
        pending = 1 + draw_below(&client->chance, (uint32_t)pending - 1);
    if (pending == 0)
        return;
    ssize_t count = send(client->socket, client->out + client->out_sent, pending, MSG_NOSIGNAL);
    if (count > 0)
        client->out_sent += (size_t)count;
    if (client->out_sent == client->out_size)
        client->out_sent = client->out_size = 0;
}

/* Returns false at the end of the connection. */
static inline bool read_frames(client *client) {
    ssize_t count = recv(client->socket, client->in + client->in_size, IN_ROOM - client->in_size, 0);
    size_t at = 0;
    if (count < 0)
        return errno == EAGAIN || errno == EINTR;
    client->in_size += (size_t)count;
    while (client->in_size - at >= 5) {
        uint32_t length;
        memcpy(&length, client->in + at, 4);
        size_t size = 5 + (size_t)__builtin_bswap32(length);
        if (size < 7 || size > IN_ROOM / 2 + FRAME_ROOM) {
            client->counts.corrupt++;
            return false;
        }
        if (client->in_size - at < size)
            break;
        on_frame(client, client->in + at, size);
        at += size;
    }
    memmove(client->in, client->in + at, client->in_size - at);
    client->in_size -= at;
    return count > 0;
}

/* The server has closed the connection. */
static inline void on_closed(client *client) {
    client->record->is_polite = client->is_leaving && !may_be_cut(client->number);
    if (may_be_cut(client->number))
        client->counts.cuts += !client->is_leaving;
    else if (!client->is_leaving || client->in_size > 0)
        client->counts.refused++; /* or it was closed within a frame */
    disconnect_client(client);
}

/* Exchange bytes once. */
static inline void serve_socket(client *client, int timeout_ms) {
    struct pollfd ready = {.fd = client->socket, .events = POLLIN};
    if (client->out_sent < client->out_size)
        ready.events |= POLLOUT;
    if (poll(&ready, 1, timeout_ms) <= 0)
        return;
    if (ready.revents & POLLOUT)
        write_pending(client);
    if (ready.revents & (POLLIN | POLLHUP | POLLERR) && !read_frames(client))
        on_closed(client);
}

/* --- behaviour ------------------------------------------------------------------------ */

static inline size_t draw_size(client *client) {
    size_t most = draw_chance(&client->chance, 100) ? SMALL_BODY : 200;
    if (client->board->has_large && draw_chance(&client->chance, 2))
        most = LARGE_BODY;
    return sizeof(message) + draw_below(&client->chance, (uint32_t)(most - sizeof(message)));
}

static inline void publish_burst(client *client) {
    uint32_t topic = draw_below(&client->chance, SHARED_TOPICS);
    for (uint32_t left = 1 + draw_below(&client->chance, 40); left > 0; left--) {
        if (client->out_size - client->out_sent > ENOUGH_PENDING)
            return;
        if (draw_chance(&client->chance, 200))
            topic = draw_below(&client->chance, SHARED_TOPICS);
        publish(client, topic, draw_size(client), 0);
    }
}

/* Say goodbye by DEREGISTER or by the end of the stream. Reads until the server closes. */
static inline void leave(client *client) {
    client->counts.leaves++;
    bool is_frame = draw_chance(&client->chance, 500);
    if (is_frame)
        control(client, 5, 0);
    while (client->out_sent < client->out_size && client->socket >= 0)
        serve_socket(client, 100);
    if (client->socket < 0)
        return; /* it was cut */
    client->is_leaving = true;
    if (!is_frame)
        shutdown(client->socket, SHUT_WR);
}

/* Publish on, while every write to this client fails. Then leave without a word. */
static inline void turn_deaf(client *client) {
    client->counts.leaves++;
    shutdown(client->socket, SHUT_RD);
    for (int bursts = 20; bursts > 0; bursts--) {
        publish_burst(client);
        write_pending(client);
        sched_yield();
    }
    disconnect_client(client);
}

static inline void act(client *client) {
    uint32_t dice = draw_below(&client->chance, 1000);
    if (dice < 600)
        publish_burst(client);
    else if (dice < 700)
        subscribe(client, draw_below(&client->chance, SHARED_TOPICS));
    else if (dice < 770)
        unsubscribe(client, draw_below(&client->chance, SHARED_TOPICS));
    else if (dice < 900)
        probe(client);
    else if (dice < 910)
        poll(NULL, 0, (int)draw_below(&client->chance, 20)); /* a slow reader */
    else if (dice < 913)
        leave(client);
    else if (dice < 916) {
        client->counts.leaves++;
        disconnect_client(client); /* without a word */
    } else if (dice < 919)
        turn_deaf(client);
}

/* Take part in a stage: everything that was sent has been routed when its last probe is back. */
static inline void finish_stage(client *client, int stage) {
    if (client->arrived_at >= stage)
        return;
    uint32_t incarnation = client->incarnation;
    probe(client);
    while (client->socket >= 0 && client->tokens_back < client->tokens_sent)
        serve_socket(client, 100);
    if (client->socket < 0 || client->incarnation != incarnation)
        return; /* it was cut: again, with the next connection */
    if (stage == VERIFY)
        for (uint32_t topic = 0; topic < TOPICS; topic++)
            check_last(client, topic);
    client->arrived_at = stage;
    arrive(client->board);
}

static inline void *run_client(void *argument) {
    client *client = argument;
    while (true) {
        int stage = stage_of(client->board);
        if (client->socket < 0 && stage == LEAVE)
            return NULL;
        if (client->socket < 0)
            connect_client(client);
        if (client->is_leaving || (stage != RUN && client->arrived_at == stage)) {
            serve_socket(client, 2);
            continue;
        }
        if (stage == RUN && client->out_size - client->out_sent < ENOUGH_PENDING)
            act(client);
        else if (stage == LEAVE)
            leave(client);
        else if (stage != RUN)
            finish_stage(client, stage);
        if (client->socket >= 0)
            serve_socket(client, stage == RUN ? (int)draw_below(&client->chance, 2) : 1);
    }
}

static inline client *start_client(board *board, uint32_t number) {
    client *client = allocate(sizeof(*client));
    client->board = board;
    client->number = number;
    client->chance = board->seed * 1000003 + number;
    client->socket = -1;
    client->out = allocate(OUT_ROOM);
    client->in = allocate(IN_ROOM);
    if (pthread_create(&client->thread, NULL, run_client, client) != 0)
        abort();
    return client;
}

#endif
