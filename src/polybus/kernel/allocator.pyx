"""Settings of the C allocator for the bus's buffers.

By default glibc returns large freed blocks to the system at once, and the next buffer
faults the same pages in again: with buffers of 256 KiB that took a tenth of the bus's
time. With these settings blocks of up to `KEEP_BYTES` come from the heap, and the heap
keeps that much free memory at its top.

glibc has up to eight heaps ("arenas") per processor, and each keeps its own free memory: clients
that make gRPC start many threads made the bus hold hundreds of megabytes. So there is one per
processor, and two at least.
"""
import os

cdef extern from *:
    """
    #ifdef __GLIBC__
    #include <malloc.h>
    static int polybus_keep(int bytes, int arenas) {
        return mallopt(M_MMAP_THRESHOLD, bytes) && mallopt(M_TRIM_THRESHOLD, bytes)
            && mallopt(M_ARENA_MAX, arenas);
    }
    static int polybus_trim(void) { return malloc_trim(0); }
    #else
    static int polybus_keep(int bytes, int arenas) { (void)bytes; (void)arenas; return 0; }
    static int polybus_trim(void) { return 0; }
    #endif
    """
    int polybus_keep(int bytes, int arenas)
    int polybus_trim() nogil

KEEP_BYTES = 16 * 1024 * 1024


def keep_freed_buffers() -> bool:
    """Apply the settings to the process. Returns False if the allocator is not glibc's."""
    return bool(polybus_keep(KEEP_BYTES, max(2, os.cpu_count() or 0)))


def trim_heap() -> bool:
    """Return freed memory of all arenas to the system. Returns whether there was any."""
    cdef int released
    with nogil:
        released = polybus_trim()
    return bool(released)
