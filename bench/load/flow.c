/* Modes burst and flow: requests as fast as the server takes them, on two connections.
 *
 *   burst   all messages of a burst are produced, then all are read, and so on
 *   flow    both at once; the producer is at most `ahead` messages ahead of the reader
 *
 * Nothing waits for an answer before the next request is sent; the sockets' buffers alone hold the
 * sender back. One thread moves both connections, whichever is ready, and so leaves the server a
 * core of its own on a machine with two. Answers are compared with a cycle of right ones, whose
 * counters are moved on whenever it starts again.
 */
#include "dialogue.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#define CHUNK (256 * 1024) /* received at once */
#define STALL_MS 15000     /* no progress for so long is a fault; real pauses are far below */

static Channel *producer, *reader;

static size_t answer_size(const Channel *channel) {
    return channel->answers.size / (size_t)channel->messages;
}

static size_t request_size(const Channel *channel) {
    return channel->requests.size / (size_t)channel->messages;
}

static long answered(const Channel *channel) {
    return (long)(channel->received / (long long)answer_size(channel));
}

/* The cycle of answers that begins now: its ids go on from those of the cycle before. */
static void begin_cycle(Channel *channel) {
    const size_t size = answer_size(channel);
    for (long i = 0; channel->counters.count && i < channel->messages; ++i)
        set_counters(&channel->counters, channel->answers.data + (size_t)i * size,
                     (unsigned long long)(answered(channel) + i));
}

/* Bytes that may be sent for `allowed` messages in all, in one piece of the cycle. */
static size_t sendable(const Channel *channel, long allowed) {
    long long left = (long long)allowed * (long long)request_size(channel) - channel->sent;
    size_t at = (size_t)channel->sent % channel->requests.size;
    size_t piece = channel->requests.size - at;
    return left <= 0 ? 0 : (size_t)left < piece ? (size_t)left : piece;
}

static void send_some(Channel *channel, size_t size) {
    const char *data = channel->requests.data + (size_t)channel->sent % channel->requests.size;
    ssize_t sent = send(channel->socket, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno != EAGAIN)
        fail("cannot send: %s", strerror(errno));
    channel->sent += sent > 0 ? sent : 0;
}

static void refuse(const Channel *channel, const char *found, const char *right) {
    size_t same = 0;
    while (found[same] == right[same])
        ++same;
    fail("wrong byte after %lld right ones", channel->received + (long long)same);
}

static void check_answers(Channel *channel, const char *data, size_t size) {
    while (size) {
        size_t at = (size_t)channel->received % channel->answers.size;
        size_t piece = channel->answers.size - at;
        piece = piece < size ? piece : size;
        if (!at)
            begin_cycle(channel);
        if (memcmp(data, channel->answers.data + at, piece))
            refuse(channel, data, channel->answers.data + at);
        channel->received += (long long)piece;
        data += piece;
        size -= piece;
    }
}

static void move(Channel *channel, short ready, size_t size) {
    static char buffer[CHUNK];
    if (ready & ~POLLOUT) /* also at a hang-up: receiving tells what it was */
        check_answers(channel, buffer, receive_some(channel->socket, buffer, CHUNK));
    if (ready & POLLOUT)
        send_some(channel, size);
}

static long producer_may_send(const Dialogue *dialogue, long goal) {
    long furthest = answered(reader) + dialogue->ahead;
    return furthest < goal ? furthest : goal;
}

/* Until so many messages in all are produced, and so many are read. */
static void move_until(const Dialogue *dialogue, long produced, long read) {
    while (answered(producer) < produced || answered(reader) < read) {
        size_t sizes[] = {sendable(producer, producer_may_send(dialogue, produced)),
                          sendable(reader, read)};
        struct pollfd polled[] = {{.fd = producer->socket, .events = POLLIN},
                                  {.fd = reader->socket, .events = POLLIN}};
        for (int i = 0; i < CHANNELS; ++i)
            polled[i].events |= sizes[i] ? POLLOUT : 0;
        if (poll(polled, CHANNELS, STALL_MS) <= 0)
            fail("no progress for 15 s after %ld messages", answered(reader));
        for (int i = 0; i < CHANNELS; ++i)
            if (polled[i].revents)
                move(i ? reader : producer, polled[i].revents, sizes[i]);
    }
}

static void begin(Dialogue *dialogue) {
    if (dialogue->channel_count != CHANNELS || dialogue->ahead < 1)
        fail("two channels, and how far to be ahead");
    producer = &dialogue->channels[0];
    reader = &dialogue->channels[1];
}

static void end(double seconds, double produce_s, double drain_s) {
    int sockets[] = {producer->socket, reader->socket};
    expect_silence(sockets, CHANNELS);
    printf("{\"seconds\": %.6f, \"counted\": %ld, \"produce_s\": %.6f, \"drain_s\": %.6f}\n",
           seconds, answered(reader), produce_s, drain_s);
}

void run_burst(Dialogue *dialogue) {
    double produce_s = 0, drain_s = 0;
    begin(dialogue);
    for (long done = 0; done < dialogue->count; done = answered(reader)) {
        long left = dialogue->count - done;
        long goal = done + (left < dialogue->ahead ? left : dialogue->ahead);
        double started_s = now_s();
        move_until(dialogue, goal, done);
        double produced_s = now_s();
        move_until(dialogue, goal, goal);
        produce_s += produced_s - started_s;
        drain_s += now_s() - produced_s;
    }
    end(produce_s + drain_s, produce_s, drain_s);
}

void run_flow(Dialogue *dialogue) {
    begin(dialogue);
    double started_s = now_s();
    move_until(dialogue, dialogue->count, dialogue->count);
    double took_s = now_s() - started_s;
    end(took_s, took_s, took_s);
}
