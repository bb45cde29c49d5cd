"""How the C allocator treats the bus's buffers.

By default glibc gives large freed blocks back to the system at once, and the
next buffer pays for the same pages again, one fault each: with buffers of a
quarter of a megabyte that was a tenth of the bus's time. So blocks up to
`KEEP_BYTES` come from the heap, and the heap keeps that much at its top.
"""

cdef extern from *:
    """
    #ifdef __GLIBC__
    #include <malloc.h>
    static int polybus_keep(int bytes) {
        return mallopt(M_MMAP_THRESHOLD, bytes) && mallopt(M_TRIM_THRESHOLD, bytes);
    }
    static int polybus_trim(void) { return malloc_trim(0); }
    #else
    static int polybus_keep(int bytes) { (void)bytes; return 0; }
    static int polybus_trim(void) { return 0; }
    #endif
    """
    int polybus_keep(int bytes)
    int polybus_trim() nogil

KEEP_BYTES = 16 * 1024 * 1024


def keep_freed_buffers() -> bool:
    """For the whole process, once at start. False where the allocator is not glibc's."""
    return bool(polybus_keep(KEEP_BYTES))


def trim_heap() -> bool:
    """What all threads have freed goes back to the system; whether there was anything."""
    cdef int found
    with nogil:
        found = polybus_trim()
    return bool(found)
