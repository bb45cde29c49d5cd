"""The time slice of a thread: how soon it gets a processor that another thread is using.

Linux lets a thread run for a slice of some milliseconds before others get a turn. Since
Linux 6.12 a thread that wakes up preempts at once only if its slice is shorter. So a thread
that does little work at a time, and on which others wait, asks for a short slice. Its share
of the processor stays the same, in smaller pieces, and it needs no privilege.
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

    /* A thread with another policy or a negative nice value is left unchanged: the reset-on-fork
       flag below would take that from the threads that it starts. */
    static int polybus_set_slice(uint64_t nanoseconds) {
        struct polybus_attributes now;
        memset(&now, 0, sizeof now);
        if (syscall(SYS_sched_getattr, 0, &now, (unsigned)sizeof now, 0)) return 0;
        if (now.policy != 0 || now.nice < 0) return 0;
        now.size = sizeof now;
        now.flags = POLYBUS_RESET_ON_FORK;
        now.runtime = nanoseconds;
        return syscall(SYS_sched_setattr, 0, &now, 0) == 0;
    }
    static uint64_t polybus_get_slice(void) {
        struct polybus_attributes now;
        memset(&now, 0, sizeof now);
        return syscall(SYS_sched_getattr, 0, &now, (unsigned)sizeof now, 0) ? 0 : now.runtime;
    }
    #else
    static int polybus_set_slice(uint64_t nanoseconds) { (void)nanoseconds; return 0; }
    static uint64_t polybus_get_slice(void) { return 0; }
    #endif
    """
    int polybus_set_slice(unsigned long long nanoseconds)
    unsigned long long polybus_get_slice()


def set_time_slice_us(unsigned long long microseconds) -> bool:
    """Set the slice of the calling thread, not of threads that it starts.

    Returns False if the system refused.
    """
    return bool(polybus_set_slice(microseconds * 1000))


def get_time_slice_us() -> int:
    """Return the slice of the calling thread, or 0 if the system does not report it."""
    return polybus_get_slice() // 1000
