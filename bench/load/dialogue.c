/* The client of the request and answer benchmarks: reads a dialogue (dialogue.h), runs it, prints
 * one JSON line.
 */
#include "dialogue.h"

#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>

#define SILENCE_MS 20 /* how long we wait for bytes that were not requested */

static Dialogue dialogue;

void set_counters(const Counters *counters, char *data, unsigned long long turn) {
    for (int i = 0; i < counters->count; ++i) {
        const Counter *one = &counters->each[i];
        unsigned long long value = one->first + turn;
        memcpy(data + one->offset, &value, one->width); /* this machine is little-endian */
    }
}

/* After the last answer there is silence: one more byte would be an answer without a request. */
void expect_silence(const int *sockets, int count) {
    struct pollfd polled[MAX_VOICES * MAX_STEPS];
    for (int i = 0; i < count; ++i)
        polled[i] = (struct pollfd){.fd = sockets[i], .events = POLLIN};
    if (poll(polled, (nfds_t)count, SILENCE_MS) > 0)
        fail("the server said more than it was asked");
}

int main(void) {
    static const struct {
        const char *name;
        void (*run)(Dialogue *);
    } modes[] = {{"turns", take_turns}, {"burst", run_burst}, {"flow", run_flow}};
    _Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "counters are little-endian");
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* never outlive the harness */
    read_dialogue(&dialogue);
    for (size_t i = 0; i < sizeof modes / sizeof *modes; ++i) {
        if (strcmp(dialogue.mode, modes[i].name))
            continue;
        modes[i].run(&dialogue);
        return 0;
    }
    fail("unknown mode: %s", dialogue.mode);
}
