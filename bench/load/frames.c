/* Modes frames and turns: many publishers, one frame in each send, one subscriber.
 *
 *   frames   the publishers take turns sending without waiting; one thread sends, one reads
 *   turns    a publisher sends its next frame only when the one before has reached the subscriber
 *
 * The order between publishers is free, so a received frame is compared with the next one due from
 * its own publisher, whose number stands in the frame as four digits. The subscriber's stream in
 * the plan is all frames of publisher 0, then all of publisher 1, and so on; all frames are
 * equally long.
 */
#include "plan.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK (256 * 1024)

typedef struct {
    const Plan *plan;
    size_t frames;            /* in one cycle of one publisher */
    long due[MAX_PARTIES];    /* frames received from each publisher */
    long sent[MAX_PARTIES];
    char buffer[CHUNK];
    size_t have;
    long long received;
} Crowd;

static Crowd crowd;

static void send_frame(int publisher) {
    const Party *party = &crowd.plan->publishers[publisher];
    size_t frame = (size_t)crowd.sent[publisher]++ % crowd.frames;
    send_all(party->socket, party->stream.data + frame * crowd.plan->frame_out,
             crowd.plan->frame_out);
}

static int number_of(const char *digits) {
    int number = 0;
    for (int i = 0; i < 4; ++i)
        number = number * 10 + (digits[i] - '0');
    if (number < 0 || number >= crowd.plan->publisher_count)
        fail("a frame from nobody after %lld right ones", crowd.received);
    return number;
}

static int check_frame(const char *frame) {
    const Plan *plan = crowd.plan;
    int publisher = number_of(frame + plan->tag);
    size_t due = (size_t)publisher * crowd.frames + (size_t)crowd.due[publisher]++ % crowd.frames;
    if (memcmp(frame, plan->subscribers[0].stream.data + due * plan->frame_in, plan->frame_in))
        fail("publisher %d: wrong frame after %lld right ones", publisher, crowd.received);
    ++crowd.received;
    return publisher;
}

static int is_aside(const char *data) {
    const Bytes aside = crowd.plan->aside;
    return aside.size && !memcmp(data, aside.data, aside.size);
}

/* Receives once; each whole frame is checked and, in turns, answered by its publisher's next. */
static void read_some(long each, int in_turns) {
    const size_t size = crowd.plan->frame_in;
    size_t at = 0;
    crowd.have += receive_some(crowd.plan->subscribers[0].socket, crowd.buffer + crowd.have,
                               CHUNK - crowd.have);
    while (crowd.have - at >= size) { /* an aside is shorter than a frame, so it is whole here */
        if (is_aside(crowd.buffer + at)) {
            at += crowd.plan->aside.size;
            continue;
        }
        int publisher = check_frame(crowd.buffer + at);
        at += size;
        if (in_turns && crowd.sent[publisher] < each)
            send_frame(publisher);
    }
    crowd.have -= at;
    memmove(crowd.buffer, crowd.buffer + at, crowd.have);
}

static void *send_everything(void *each) {
    for (long i = 0; i < *(long *)each; ++i)
        for (int publisher = 0; publisher < crowd.plan->publisher_count; ++publisher)
            send_frame(publisher);
    return NULL;
}

static void run_crowd(Plan *plan, int in_turns) {
    pthread_t thread;
    crowd.plan = plan;
    crowd.frames = plan->publishers[0].stream.size / plan->frame_out;
    long each = plan->cycles * (long)crowd.frames;
    double started_s = now_s();
    if (!in_turns)
        pthread_create(&thread, NULL, send_everything, &each);
    for (int publisher = 0; in_turns && publisher < plan->publisher_count; ++publisher)
        send_frame(publisher);
    while (crowd.received < each * plan->publisher_count)
        read_some(each, in_turns);
    double ended_s = now_s(), cpu_s = cpu_since_connect_s();
    check_silence(plan);
    printf("{\"seconds\": %.6f, \"cpu_s\": %.6f, \"received_bytes\": %lld, \"cycles\": %ld}\n",
           ended_s - started_s, cpu_s, crowd.received * (long long)plan->frame_in, plan->cycles);
}

void run_frames(Plan *plan) {
    run_crowd(plan, 0);
}

void run_turns(Plan *plan) {
    run_crowd(plan, 1);
}
