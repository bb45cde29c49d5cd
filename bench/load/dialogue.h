/* Requests and answers on connections that are open already.
 *
 * The Python side connects, introduces itself, and hands its sockets over; this program only sends
 * bytes and compares bytes, as load.c does. What is new here is that answers depend on how often
 * was asked: message ids and serial numbers grow. So a piece of bytes may have counters, integers
 * in little-endian order at fixed places that grow by one each time; everything else is fixed.
 *
 * A plan is read from standard input, lines of a word and numbers, raw bytes after those with sizes:
 *
 *   mode turns|burst|flow
 *   count N                       turns: how many turns; burst and flow: how many messages
 *   warmup N                      turns: the first N are not counted
 *   ahead N                       burst: messages in one burst; flow: see flow.c
 *   voice                         turns: the steps that follow are done by a process of its own
 *   send SOCKET SIZE COUNTERS     one step of a turn; the bytes follow
 *   expect SOCKET SIZE COUNTERS
 *   channel SOCKET MESSAGES REQUESTS ANSWERS COUNTERS
 *                                 burst and flow: one cycle of requests, and of their answers; the
 *                                 counters are in each answer. First the producer, then the reader
 *
 * COUNTERS is how many there are, then OFFSET WIDTH FIRST for each.
 */
#ifndef BENCH_DIALOGUE_H
#define BENCH_DIALOGUE_H

#include "plan.h"

/* Bounds, so that a bad plan cannot ask for more. */
#define MAX_COUNTERS 8
#define MAX_STEPS 8
#define MAX_VOICES 2
#define CHANNELS 2

typedef struct {
    size_t offset, width;
    unsigned long long first;
} Counter;

typedef struct {
    int count;
    Counter each[MAX_COUNTERS];
} Counters;

typedef struct {
    int sends, socket;
    Bytes bytes;
    Counters counters;
} Step;

typedef struct {
    Step steps[MAX_STEPS];
    int count;
} Voice;

/* `sent` and `received` are bytes, over all cycles. */
typedef struct {
    int socket;
    long messages; /* in one cycle */
    Bytes requests, answers;
    Counters counters;
    long long sent, received;
} Channel;

typedef struct {
    char mode[16];
    long count, warmup, ahead;
    Voice voices[MAX_VOICES];
    int voice_count;
    Channel channels[CHANNELS];
    int channel_count;
} Dialogue;

void read_dialogue(Dialogue *dialogue);
void take_turns(Dialogue *dialogue);
void run_burst(Dialogue *dialogue);
void run_flow(Dialogue *dialogue);

/* Sets the counters of a piece of bytes to their values at its `turn`. */
void set_counters(const Counters *counters, char *data, unsigned long long turn);
void expect_silence(const int *sockets, int count);

#endif
