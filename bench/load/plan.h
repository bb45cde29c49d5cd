/* The plan of one measurement: who connects, what each sends, what each must receive.
 *
 * The load generator knows no protocol. Every wire format is a stream of bytes that can be
 * computed beforehand, so the Python side writes them all into a plan, and this program only sends
 * bytes and compares bytes. That makes the load the same for every server, and the check complete:
 * a subscriber compares every received byte with what it should be (one memcmp per recv, far from
 * the bottleneck).
 *
 * A plan is read from standard input, lines of a word and numbers, each followed by raw bytes
 * where the numbers are lengths:
 *
 *   mode stream|frames|turns|latency|pairs|answered|numbered
 *   cycles N                      how often each publisher sends its stream (stream, pairs) or its frames
 *   warmup N                      latency: the first N frames are sent but not counted
 *   seconds S                     stream: send until S seconds have passed, whole cycles only
 *   bytes_per_s N                 stream: each subscriber reads no faster than this
 *   frame OUT IN TAG              lengths of a frame sent and received; where its sender's number is
 *   answers N GOOD BAD            answered: so many answers a turn; how good ones and refusals begin
 *   numbered AT SIZE IN MORE      numbered: where the number is in a request; how long an answer is,
 *                                 where its number is (0: nowhere), and how much more than
 *                                 the request's it is
 *   beginning LEN                 numbered: how a good answer begins
 *   aside LEN                     bytes the server may put between messages (the PING of NATS)
 *   publisher PORT HELLO SKIP THEN UNTIL STREAM
 *   subscriber PORT HELLO SKIP THEN UNTIL STREAM
 *
 * After connecting, HELLO is sent, SKIP bytes are read and dropped, THEN is sent, and all is read
 * up to and with the bytes UNTIL. STREAM is one cycle of what is sent or must be received; 0 means
 * the stream of the party before, so that equal streams are in the cache once. SKIP is a plain
 * number.
 */
#ifndef BENCH_PLAN_H
#define BENCH_PLAN_H

#include <stddef.h>

#define MAX_PARTIES 256 /* enough for every case; a bound so that a bad plan cannot ask for more */

typedef struct {
    char *data;
    size_t size;
} Bytes;

typedef struct {
    int port, socket;
    Bytes hello, then, until, stream;
    size_t skip;
} Party;

typedef struct {
    char mode[16];
    long cycles, warmup;
    double seconds, bytes_per_s;
    size_t frame_out, frame_in, tag;
    long answers;
    char good[16], bad[16];
    size_t number_at, answer_size, answer_at;
    long answer_more;
    Bytes aside, beginning;
    Party publishers[MAX_PARTIES], subscribers[MAX_PARTIES];
    int publisher_count, subscriber_count;
} Plan;

void read_plan(Plan *plan);
void connect_all(Plan *plan);

void run_stream(Plan *plan);
void run_frames(Plan *plan);
void run_turns(Plan *plan);
void run_latency(Plan *plan);
void run_pairs(Plan *plan);
void run_answered(Plan *plan);
void run_numbered(Plan *plan);

/* What one subscriber has received: `at` in its stream's cycle, `aside` inside an aside. */
typedef struct {
    const Party *party;
    const Bytes *asides;
    size_t at, aside;
    long long received;
} Reader;

void check_bytes(Reader *reader, const char *data, size_t size);
void check_silence(const Plan *plan);

double now_s(void);
double cpu_since_connect_s(void); /* of this program, all its threads */
void send_all(int socket, const char *data, size_t size);
size_t receive_some(int socket, char *data, size_t size);
void fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

#endif
