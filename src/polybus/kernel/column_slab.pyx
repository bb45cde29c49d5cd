"""Memory of large columns, kept for the next read.

A read fills some ten megabytes that live until its batch has been used; then the next read
does the same. The allocator returns memory of such sizes to the system each time, and
faulting the pages in again took as long as filling them. So a large column lies in a slab,
and a slab without references is kept for another column of about its size. The kept slabs
are bounded by `KEEP_BYTES`. Slabs of 2 MiB and more ask for huge pages.
"""
cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize

cdef extern from *:
    """
    #include <stdlib.h>
    #ifdef __linux__
    #include <sys/mman.h>
    #endif
    #define POLYBUS_HUGE ((size_t)2 << 20)
    /* Rounded up so that reads of about the same size can use the same slabs. */
    static size_t polybus_room(size_t size) {
        size_t unit = size < POLYBUS_HUGE ? 16384 : POLYBUS_HUGE;
        return (size + unit - 1) / unit * unit;
    }
    static unsigned char *polybus_slab(size_t room) {
        void *data = NULL;
        if (posix_memalign(&data, room < POLYBUS_HUGE ? 64 : POLYBUS_HUGE, room)) return NULL;
    #ifdef MADV_HUGEPAGE
        if (room >= POLYBUS_HUGE) (void)madvise(data, room, MADV_HUGEPAGE);
    #endif
        return (unsigned char *)data;
    }
    """
    size_t polybus_room(size_t size)
    unsigned char* polybus_slab(size_t room)
    void free(void* data)

cdef enum:
    MAX_KEPT = 64

# Smaller columns are bytes objects: the allocator reuses small blocks by itself.
MIN_SLAB_BYTES = 32 * 1024
# Two reads of the usual size: one in use, one being filled.
KEEP_BYTES = 64 * 1024 * 1024

cdef size_t smallest = MIN_SLAB_BYTES
cdef size_t most = KEEP_BYTES

cdef struct Kept:
    unsigned char* data
    size_t room

# Changed only with the GIL held.
cdef Kept[MAX_KEPT] waiting
cdef int waiting_count = 0
cdef size_t waiting_bytes = 0


@cython.final
cdef class Slab:
    """The memory of one column, exported as a read-only buffer."""

    cdef unsigned char* data
    cdef size_t room
    cdef Py_ssize_t size

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.data, self.size, 1, flags)

    def __dealloc__(self):
        if self.data is not NULL:
            keep(self.data, self.room)


cdef void keep(unsigned char* data, size_t room) noexcept:
    global waiting_count, waiting_bytes
    if waiting_count == MAX_KEPT or room > most - waiting_bytes:
        free(data)
        return
    waiting[waiting_count] = Kept(data, room)
    waiting_count += 1
    waiting_bytes += room


cdef unsigned char* take(size_t* room) noexcept:
    """Take a kept slab of `room` to 1.5 × `room` bytes, newest first, or return NULL."""
    global waiting_count, waiting_bytes
    cdef int number
    cdef Kept found
    for number in range(waiting_count - 1, -1, -1):
        found = waiting[number]
        if room[0] <= found.room <= room[0] + room[0] // 2:
            waiting_count -= 1
            waiting[number] = waiting[waiting_count]
            waiting_bytes -= found.room
            room[0] = found.room
            return found.data
    return NULL


cdef object new_column(unsigned char** place, Py_ssize_t size):
    """Return a new column. The caller may write its bytes at `place` until it hands it out."""
    cdef Slab slab
    cdef bytes data
    if <size_t>size < smallest:
        data = PyBytes_FromStringAndSize(NULL, size)
        place[0] = <unsigned char*>PyBytes_AS_STRING(data)
        return data
    slab = Slab.__new__(Slab)
    slab.size = size
    slab.room = polybus_room(size)
    slab.data = take(&slab.room)
    if slab.data is NULL:
        slab.data = polybus_slab(slab.room)
    if slab.data is NULL:
        raise MemoryError
    place[0] = slab.data
    return memoryview(slab)


def kept_bytes() -> int:
    """Return the bytes of all kept slabs."""
    return waiting_bytes


def free_kept_slabs() -> None:
    """Return all kept slabs to the allocator."""
    global waiting_count, waiting_bytes
    while waiting_count:
        waiting_count -= 1
        free(waiting[waiting_count].data)
    waiting_bytes = 0
