"""How soon a thread gets a processor that another one is using.

Linux lets a thread run for a slice, some milliseconds, before others get their turn. One that
wakes up takes over at once only if it has the shorter slice (since Linux 6.12): so whoever does
little at a time, and is waited for, asks for a short one. It gets no more of the processor than
before, only in smaller pieces, and needs no privilege for that.
"""

cdef extern from *:
    """
    #include <string.h>
    #include <unistd.h>
    #ifdef __linux__
    #include <sys/syscall.h>
    #endif
    #include <stdint.h>

    #if defined(SYS_sched_setattr) && defined(SYS_sched_getattr)
    struct polybus_attributes {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    };
    enum { POLYBUS_RESET_ON_FORK = 1 };

    /* Threads of another policy, or preferred by their owner, are left as they are: those that
       they start would lose that. */
    static int polybus_shorten(uint64_t nanoseconds) {
        struct polybus_attributes now;
        memset(&now, 0, sizeof now);
        if (syscall(SYS_sched_getattr, 0, &now, (unsigned)sizeof now, 0)) return 0;
        if (now.policy != 0 || now.nice < 0) return 0;
        now.size = sizeof now;
        now.flags = POLYBUS_RESET_ON_FORK;
        now.runtime = nanoseconds;
        return syscall(SYS_sched_setattr, 0, &now, 0) == 0;
    }
    static uint64_t polybus_slice(void) {
        struct polybus_attributes now;
        memset(&now, 0, sizeof now);
        return syscall(SYS_sched_getattr, 0, &now, (unsigned)sizeof now, 0) ? 0 : now.runtime;
    }
    #else
    static int polybus_shorten(uint64_t nanoseconds) { (void)nanoseconds; return 0; }
    static uint64_t polybus_slice(void) { return 0; }
    #endif
    """
    int polybus_shorten(unsigned long long nanoseconds)
    unsigned long long polybus_slice()


def set_time_slice_us(unsigned long long microseconds) -> bool:
    """For the calling thread, and none that it starts. False if the system would not have it."""
    return bool(polybus_shorten(microseconds * 1000))


def get_time_slice_us() -> int:
    """The calling thread's slice; 0 where nobody says."""
    return polybus_slice() // 1000
