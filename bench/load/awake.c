// Keeps one core awake and yields to every other process; bench/harness/awake.py has the reason.
//
//     awake CORE

#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>

static void breathe(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause(); // leaves the core's other thread what it needs
#endif
}

int main(int count, char **arguments) {
    struct sched_param lowest = {0};
    cpu_set_t core;
    if (count != 2)
        return 2;
    CPU_ZERO(&core);
    CPU_SET(atoi(arguments[1]), &core);
    prctl(PR_SET_PDEATHSIG, SIGKILL); // a benchmark that was killed leaves nothing behind
    if (sched_setscheduler(0, SCHED_IDLE, &lowest) || sched_setaffinity(0, sizeof core, &core)) {
        perror("awake");
        return 1;
    }
    for (;;)
        breathe();
}
