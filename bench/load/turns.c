/* Mode turns: one turn after another, each the same few steps of sending and expecting.
 *
 * A voice is a process that takes its own steps in order, with blocking calls, as a program that
 * waits for an answer does. With one voice, that process plays all the parties; with two, the second
 * answers the first. A turn is timed by the first voice, from the end of the turn before it to its
 * own end. Reported are all counted turns together, their median and their 99th percentile.
 */
#include "dialogue.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define LARGEST (64 * 1024) /* what one step may expect */

static void expect(const Step *step, long turn, char *buffer) {
    size_t have = 0, same = 0;
    while (have < step->bytes.size)
        have += receive_some(step->socket, buffer + have, step->bytes.size - have);
    if (!memcmp(buffer, step->bytes.data, have))
        return;
    while (buffer[same] == step->bytes.data[same])
        ++same;
    fail("turn %ld: byte %zu of %zu is wrong", turn, same, have);
}

static void take(Step *step, long turn, char *buffer) {
    set_counters(&step->counters, step->bytes.data, (unsigned long long)turn);
    if (step->sends)
        send_all(step->socket, step->bytes.data, step->bytes.size);
    else
        expect(step, turn, buffer);
}

/* All turns of one voice; with `ended_s`, when each was done. */
static void speak(Voice *voice, long count, double *ended_s) {
    char *buffer = malloc(LARGEST);
    for (long turn = 0; turn < count; ++turn) {
        for (int i = 0; i < voice->count; ++i)
            take(&voice->steps[i], turn, buffer);
        if (ended_s)
            ended_s[turn] = now_s();
    }
    free(buffer);
}

static void start_others(Dialogue *dialogue) {
    for (int i = 1; i < dialogue->voice_count; ++i) {
        if (fork())
            continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        speak(&dialogue->voices[i], dialogue->count, NULL);
        _exit(0);
    }
}

static void wait_for_others(const Dialogue *dialogue) {
    for (int i = 1, status; i < dialogue->voice_count; ++i)
        if (wait(&status) < 0 || status)
            fail("another voice did not get to its end");
}

static int by_size(const void *left, const void *right) {
    double difference = *(const double *)left - *(const double *)right;
    return (difference > 0) - (difference < 0);
}

static void report(const double *ended_s, long count, long warmup) {
    long kept = count - warmup;
    double *took_s = malloc((size_t)kept * sizeof *took_s);
    for (long i = 0; i < kept; ++i)
        took_s[i] = ended_s[warmup + i] - ended_s[warmup + i - 1];
    qsort(took_s, (size_t)kept, sizeof *took_s, by_size);
    printf("{\"seconds\": %.6f, \"counted\": %ld, \"p50_us\": %.3f, \"p99_us\": %.3f}\n",
           ended_s[count - 1] - ended_s[warmup - 1], kept, took_s[kept / 2] * 1e6,
           took_s[kept * 99 / 100] * 1e6);
}

static void check(const Dialogue *dialogue) {
    if (!dialogue->voice_count)
        fail("nobody speaks");
    if (dialogue->warmup < 1 || dialogue->count <= dialogue->warmup)
        fail("the warm-up needs a turn, and must leave some");
    for (int i = 0; i < dialogue->voice_count; ++i)
        for (int j = 0; j < dialogue->voices[i].count; ++j)
            if (dialogue->voices[i].steps[j].bytes.size > LARGEST)
                fail("a step is larger than %d bytes", LARGEST);
}

static void listen_for_more(const Dialogue *dialogue) {
    int sockets[MAX_VOICES * MAX_STEPS], count = 0;
    for (int i = 0; i < dialogue->voice_count; ++i)
        for (int j = 0; j < dialogue->voices[i].count; ++j)
            sockets[count++] = dialogue->voices[i].steps[j].socket;
    expect_silence(sockets, count);
}

void take_turns(Dialogue *dialogue) {
    check(dialogue);
    double *ended_s = malloc((size_t)dialogue->count * sizeof *ended_s);
    start_others(dialogue);
    speak(&dialogue->voices[0], dialogue->count, ended_s);
    wait_for_others(dialogue);
    listen_for_more(dialogue);
    report(ended_s, dialogue->count, dialogue->warmup);
}
