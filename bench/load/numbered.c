/* Requests with a number that rises: each publisher sends its request, waits for the answer, adds
 * one to the number, and sends it again. One thread plays all publishers, as an event loop would.
 *
 * The number has eight bytes, the highest first. An answer has a known size and a known beginning,
 * and mostly the request's number in it, plus a constant; the rest (ids, times) is not looked at.
 */
#include "plan.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

#define WAIT_MS 15000   /* no answer for so long is a fault; real pauses are far below */
#define MAX_ANSWER 4096 /* enough for every case */
#define NUMBER 8

typedef struct {
    char *request;
    long turns;
    size_t got;
    char answer[MAX_ANSWER];
} Turn;

static uint64_t read_number(const char *at) {
    uint64_t value = 0;
    for (int i = 0; i < NUMBER; ++i)
        value = value << 8 | (unsigned char)at[i];
    return value;
}

static void raise_number(char *at) {
    for (int i = NUMBER - 1; i >= 0 && !++at[i]; --i)
        ;
}

/* Whether the whole answer is there. What begins otherwise is a refusal. */
static int take_answer(const Plan *plan, const Party *party, Turn *turn) {
    size_t begins = plan->beginning.size;
    char *rest = turn->answer + turn->got;
    turn->got += receive_some(party->socket, rest, sizeof turn->answer - turn->got);
    if (turn->got >= begins && memcmp(turn->answer, plan->beginning.data, begins))
        fail("the server refused a request");
    if (turn->got > plan->answer_size)
        fail("an answer is longer than it should be");
    if (turn->got < plan->answer_size)
        return 0;
    uint64_t asked = read_number(turn->request + plan->number_at);
    if (plan->answer_at && read_number(turn->answer + plan->answer_at) != asked + (uint64_t)plan->answer_more)
        fail("an answer to something else");
    return 1;
}

/* Whether all its turns are done; if not, and this one is, the next is begun. */
static int go_on(const Plan *plan, const Party *party, Turn *turn) {
    if (!take_answer(plan, party, turn))
        return 0;
    turn->got = 0;
    if (++turn->turns == plan->cycles)
        return 1;
    raise_number(turn->request + plan->number_at);
    send_all(party->socket, turn->request, party->stream.size);
    return 0;
}

static int begin_all(const Plan *plan, Turn *turns) {
    int watch = epoll_create1(EPOLL_CLOEXEC);
    for (int i = 0; i < plan->publisher_count; ++i) {
        const Party *party = &plan->publishers[i];
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = (unsigned)i};
        if (epoll_ctl(watch, EPOLL_CTL_ADD, party->socket, &event))
            fail("cannot watch a connection");
        turns[i].request = malloc(party->stream.size);
        if (!turns[i].request || plan->number_at + NUMBER > party->stream.size)
            fail("a request without its number");
        memcpy(turns[i].request, party->stream.data, party->stream.size);
    }
    return watch;
}

void run_numbered(Plan *plan) {
    static Turn turns[MAX_PARTIES];
    struct epoll_event events[MAX_PARTIES];
    if (plan->answer_size > MAX_ANSWER || plan->answer_at + NUMBER > plan->answer_size)
        fail("answers of such a size are not foreseen");
    int watch = begin_all(plan, turns), left = plan->publisher_count;
    double started = now_s();
    for (int i = 0; i < plan->publisher_count; ++i)
        send_all(plan->publishers[i].socket, turns[i].request, plan->publishers[i].stream.size);
    while (left) {
        int ready = epoll_wait(watch, events, MAX_PARTIES, WAIT_MS);
        if (ready <= 0)
            fail("no answer for 15 s");
        for (int i = 0; i < ready; ++i) {
            unsigned who = events[i].data.u32;
            left -= go_on(plan, &plan->publishers[who], &turns[who]);
        }
    }
    printf("{\"seconds\": %.9f}\n", now_s() - started);
}
