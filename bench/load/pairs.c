/* Mode pairs: publisher i sends its stream, as fast as the server takes it, to subscriber i alone.
 *
 * Each connection has a thread of its own with blocking calls, so that the load grows with the
 * machine and has as many system calls as bytes need: no thread watches several sockets. Time runs
 * from before the first byte sent to after the last byte received by the last subscriber.
 * `busiest_s` is the CPU time of the busiest thread: near `seconds`, the load was the limit.
 */
#include "plan.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define CHUNK (64 * 1024) /* received at once; small enough for the nearest caches */

typedef struct {
    const Plan *plan;
    Party *party;
    long long received;
    double cpu_s;
    pthread_t thread;
} End;

static double thread_cpu_s(void) {
    struct timespec used;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return (double)used.tv_sec + (double)used.tv_nsec * 1e-9;
}

static void *publish(void *argument) {
    End *end = argument;
    for (long cycle = 0; cycle < end->plan->cycles; ++cycle)
        send_all(end->party->socket, end->party->stream.data, end->party->stream.size);
    end->cpu_s = thread_cpu_s();
    return NULL;
}

static void *subscribe(void *argument) {
    End *end = argument;
    Reader reader = {.party = end->party, .asides = &end->plan->aside};
    long long wanted = (long long)end->party->stream.size * end->plan->cycles;
    char *buffer = malloc(CHUNK);
    while (reader.received < wanted)
        check_bytes(&reader, buffer, receive_some(end->party->socket, buffer, CHUNK));
    free(buffer);
    end->received = reader.received;
    end->cpu_s = thread_cpu_s();
    return NULL;
}

void run_pairs(Plan *plan) {
    static End ends[2 * MAX_PARTIES];
    const int pairs = plan->publisher_count;
    double busiest_s = 0;
    long long received = 0;
    if (!pairs || pairs != plan->subscriber_count)
        fail("pairs need as many subscribers as publishers");
    for (int i = 0; i < pairs; ++i) {
        ends[i] = (End){.plan = plan, .party = &plan->subscribers[i]};
        ends[pairs + i] = (End){.plan = plan, .party = &plan->publishers[i]};
    }
    double started_s = now_s();
    for (int i = 0; i < 2 * pairs; ++i)
        if (pthread_create(&ends[i].thread, NULL, i < pairs ? subscribe : publish, &ends[i]))
            fail("cannot start a thread");
    for (int i = 0; i < 2 * pairs; ++i) {
        pthread_join(ends[i].thread, NULL);
        received += ends[i].received;
        busiest_s = ends[i].cpu_s > busiest_s ? ends[i].cpu_s : busiest_s;
    }
    double ended_s = now_s(), cpu_s = cpu_since_connect_s();
    check_silence(plan);
    printf("{\"seconds\": %.6f, \"cpu_s\": %.6f, \"busiest_s\": %.6f, \"received_bytes\": %lld, "
           "\"cycles\": %ld}\n", ended_s - started_s, cpu_s, busiest_s, received, plan->cycles);
}
