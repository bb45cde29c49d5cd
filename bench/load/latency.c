/* Mode latency: one frame at a time, from before its send to after its last byte is received.
 *
 * One thread sends on the publisher's connection and then blocks on the subscriber's, as a program
 * that waits for an answer does. Reported are the median and the 99th percentile of all frames.
 */
#include "plan.h"

#include <stdio.h>
#include <stdlib.h>

#define BUFFER (64 * 1024)

static int by_size(const void *left, const void *right) {
    double difference = *(const double *)left - *(const double *)right;
    return (difference > 0) - (difference < 0);
}

static double send_and_wait(const Plan *plan, Reader *reader, size_t frame, char *buffer) {
    const Party *publisher = &plan->publishers[0];
    long long wanted = reader->received + (long long)plan->frame_in;
    double started_s = now_s();
    send_all(publisher->socket, publisher->stream.data + frame * plan->frame_out, plan->frame_out);
    while (reader->received < wanted)
        check_bytes(reader, buffer, receive_some(reader->party->socket, buffer, BUFFER));
    return now_s() - started_s;
}

void run_latency(Plan *plan) {
    size_t frames = plan->publishers[0].stream.size / plan->frame_out;
    long count = plan->cycles * (long)frames, kept = count - plan->warmup;
    if (kept < 1)
        fail("the warm-up leaves nothing to measure");
    double *took_s = malloc((size_t)count * sizeof *took_s), started_s = now_s();
    char *buffer = malloc(BUFFER);
    Reader reader = {.party = &plan->subscribers[0], .asides = &plan->aside};
    for (long i = 0; i < count; ++i)
        took_s[i] = send_and_wait(plan, &reader, (size_t)i % frames, buffer);
    double ended_s = now_s(), cpu_s = cpu_since_connect_s();
    check_silence(plan);
    took_s += plan->warmup;
    qsort(took_s, (size_t)kept, sizeof *took_s, by_size);
    printf("{\"seconds\": %.6f, \"cpu_s\": %.6f, \"received_bytes\": %lld, \"cycles\": %ld, "
           "\"p50_us\": %.3f, \"p99_us\": %.3f}\n",
           ended_s - started_s, cpu_s, reader.received, plan->cycles, took_s[kept / 2] * 1e6,
           took_s[kept * 99 / 100] * 1e6);
}
