/* Requests that are answered: each publisher sends its stream, waits for all of its answers, and
 * sends it again. One thread plays all publishers, as an event loop would.
 *
 * Answers are lines, and what stands in them (ids, times) is not known beforehand, so they are
 * distinguished by how they begin: a line that begins with `good` counts as an answer, one that begins with
 * `bad` is a refusal and a fault, all others are passed over.
 */
#include "plan.h"

#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>

#define CHUNK (64 * 1024)
#define WAIT_MS 15000 /* no answer for so long is a fault; real pauses are far below */

/* How far the line at hand agrees with the two beginnings; -1: it does not. */
typedef struct {
    int good, bad;
    long answers, turns;
} Wait;

static int advance(int at, const char *beginning, char byte) {
    return at >= 0 && beginning[at] && beginning[at] == byte ? at + 1 : -1;
}

static void take_byte(const Plan *plan, Wait *wait, char byte) {
    if (byte == '\n') {
        wait->good = wait->bad = 0;
        return;
    }
    wait->good = advance(wait->good, plan->good, byte);
    wait->bad = advance(wait->bad, plan->bad, byte);
    if (wait->good > 0 && !plan->good[wait->good])
        ++wait->answers;
    if (wait->bad > 0 && !plan->bad[wait->bad])
        fail("the server refused a request");
}

static void take_answers(const Plan *plan, const Party *party, Wait *wait) {
    static char chunk[CHUNK];
    size_t size = receive_some(party->socket, chunk, sizeof chunk);
    for (size_t i = 0; i < size; ++i)
        take_byte(plan, wait, chunk[i]);
    if (wait->answers > plan->answers)
        fail("more answers than requests");
}

/* Whether all its turns are done; if not, and this one is, the next is begun. */
static int go_on(const Plan *plan, const Party *party, Wait *wait) {
    if (wait->answers < plan->answers)
        return 0;
    wait->answers = 0;
    if (++wait->turns == plan->cycles)
        return 1;
    send_all(party->socket, party->stream.data, party->stream.size);
    return 0;
}

static int watch_all(const Plan *plan) {
    int watch = epoll_create1(EPOLL_CLOEXEC);
    for (int i = 0; i < plan->publisher_count; ++i) {
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = (unsigned)i};
        if (epoll_ctl(watch, EPOLL_CTL_ADD, plan->publishers[i].socket, &event))
            fail("cannot watch a connection");
    }
    return watch;
}

void run_answered(Plan *plan) {
    static Wait waits[MAX_PARTIES];
    struct epoll_event events[MAX_PARTIES];
    int watch = watch_all(plan), left = plan->publisher_count;
    double started = now_s();
    for (int i = 0; i < plan->publisher_count; ++i)
        send_all(plan->publishers[i].socket, plan->publishers[i].stream.data,
                 plan->publishers[i].stream.size);
    while (left) {
        int ready = epoll_wait(watch, events, MAX_PARTIES, WAIT_MS);
        if (ready <= 0)
            fail("no answer for 15 s");
        for (int i = 0; i < ready; ++i) {
            unsigned who = events[i].data.u32;
            take_answers(plan, &plan->publishers[who], &waits[who]);
            left -= go_on(plan, &plan->publishers[who], &waits[who]);
        }
    }
    printf("{\"seconds\": %.9f}\n", now_s() - started);
}
