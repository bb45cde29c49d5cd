/* The load generator: reads a plan (plan.h), connects everyone, runs it, prints one JSON line. */
#include "plan.h"

#include <signal.h>
#include <string.h>
#include <sys/prctl.h>

static Plan plan;

int main(void) {
    static const struct {
        const char *name;
        void (*run)(Plan *);
    } modes[] = {{"stream", run_stream},
                 {"frames", run_frames},
                 {"turns", run_turns},
                 {"latency", run_latency},
                 {"pairs", run_pairs},
                 {"answered", run_answered},
                 {"numbered", run_numbered}};
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* never outlive the harness */
    read_plan(&plan);
    for (size_t i = 0; i < sizeof modes / sizeof *modes; ++i) {
        if (strcmp(plan.mode, modes[i].name))
            continue;
        connect_all(&plan);
        modes[i].run(&plan);
        return 0;
    }
    fail("unknown mode: %s", plan.mode);
}
