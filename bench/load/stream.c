/* Mode stream: one publisher sends its stream as fast as the server takes it, n subscribers read.
 *
 * One thread sends, one reads all subscribers with epoll; the sender hands over whole cycles.
 * Time runs from before the first byte sent to after the last byte received by the last
 * subscriber. With no publisher the subscribers read `cycles` of their streams, and time runs from
 * the first byte received; with no subscriber the publisher's own sending is timed.
 *
 * With `bytes_per_s` subscribers read at that pace, and with `seconds` the publisher decides by
 * the clock how many whole cycles it sends; the server must then hold it back, and lose nothing.
 */
#include "plan.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <time.h>

#define CHUNK (64 * 1024)  /* received at once; small enough for the nearest caches */
#define PACE_NS 1000000    /* a paced subscriber wakes every millisecond */
#define STALL_S 15         /* no byte for so long: the server has lost something */
#define EPOLL_MS 50        /* how soon a reader notices that the publisher has settled the total */

static double started_s, sent_s;
static atomic_long cycles_to_read = -1; /* unknown until the publisher has settled it */

static void *publish(void *argument) {
    const Plan *plan = argument;
    const Party *publisher = &plan->publishers[0];
    long cycles = 0;
    if (!plan->seconds)
        atomic_store(&cycles_to_read, plan->cycles);
    while (plan->seconds ? now_s() - started_s < plan->seconds : cycles < plan->cycles) {
        send_all(publisher->socket, publisher->stream.data, publisher->stream.size);
        ++cycles;
    }
    sent_s = now_s();
    atomic_store(&cycles_to_read, cycles);
    return NULL;
}

static long long missing(const Reader *readers, int count) {
    long cycles = atomic_load(&cycles_to_read);
    long long bytes = 0;
    if (cycles < 0)
        return 1;
    for (int i = 0; i < count; ++i)
        bytes += (long long)readers[i].party->stream.size * cycles - readers[i].received;
    return bytes;
}

/* How much may be read now: without a pace a whole chunk, with one what the clock has granted. */
static size_t allowance(const Plan *plan, const Reader *reader) {
    if (!plan->bytes_per_s)
        return CHUNK;
    double granted = (now_s() - started_s) * plan->bytes_per_s - (double)reader->received;
    return granted <= 0 ? 0 : granted < CHUNK ? (size_t)granted : CHUNK;
}

static int read_ready(const Plan *plan, int epoll, char *buffer) {
    struct epoll_event events[MAX_PARTIES];
    int ready = epoll_wait(epoll, events, MAX_PARTIES, EPOLL_MS), moved = 0;
    for (int i = 0; i < ready; ++i) {
        Reader *reader = events[i].data.ptr;
        size_t size = allowance(plan, reader);
        if (!size)
            continue;
        if (!started_s)
            started_s = now_s();
        check_bytes(reader, buffer, receive_some(reader->party->socket, buffer, size));
        moved = 1;
    }
    return moved;
}

static void read_all(const Plan *plan, Reader *readers) {
    const struct timespec pause = {.tv_nsec = PACE_NS};
    char *buffer = malloc(CHUNK);
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    for (int i = 0; i < plan->subscriber_count; ++i) {
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &readers[i]};
        readers[i] = (Reader){.party = &plan->subscribers[i], .asides = &plan->aside};
        epoll_ctl(epoll, EPOLL_CTL_ADD, plan->subscribers[i].socket, &event);
    }
    double idle_since_s = 0;
    while (missing(readers, plan->subscriber_count) > 0) {
        if (read_ready(plan, epoll, buffer))
            idle_since_s = 0;
        else if (!idle_since_s)
            idle_since_s = now_s();
        else if (now_s() - idle_since_s > STALL_S)
            fail("%lld bytes are missing", missing(readers, plan->subscriber_count));
        if (plan->bytes_per_s)
            nanosleep(&pause, NULL);
    }
}

void run_stream(Plan *plan) {
    Reader readers[MAX_PARTIES];
    pthread_t thread;
    long long received = 0;
    if (plan->publisher_count) {
        started_s = now_s();
        pthread_create(&thread, NULL, publish, plan);
    } else {
        atomic_store(&cycles_to_read, plan->cycles);
        printf("connected\n");
        fflush(stdout);
    }
    read_all(plan, readers);
    double ended_s = now_s(), cpu_s = cpu_since_connect_s();
    if (plan->publisher_count)
        pthread_join(thread, NULL);
    if (!plan->subscriber_count)
        ended_s = sent_s;
    check_silence(plan);
    for (int i = 0; i < plan->subscriber_count; ++i)
        received += readers[i].received;
    printf("{\"seconds\": %.6f, \"cpu_s\": %.6f, \"received_bytes\": %lld, \"cycles\": %ld}\n",
           ended_s - started_s, cpu_s, received, atomic_load(&cycles_to_read));
}
