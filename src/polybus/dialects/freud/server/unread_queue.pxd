from cpython.array cimport array
from libc.stdint cimport int32_t, int64_t, uint64_t

from polybus.kernel.quota_account cimport QuotaAccount

cdef enum:
    GATHERED = 65536

cdef class Chunk:
    cdef readonly uint64_t first_id
    cdef readonly bint notice
    cdef readonly object bodies  # bytes, or a bytearray while it may grow
    cdef readonly array offsets  # int32: where each body starts, and the last ends
    cdef readonly array times  # uint64
    cdef Py_ssize_t count(self) noexcept
    cdef int check(self, Py_ssize_t start, Py_ssize_t end) except -1
    cdef const int32_t* places(self) noexcept
    cdef const unsigned char* body(self) except NULL
    cdef int add(self, const unsigned char* body, Py_ssize_t size, uint64_t stamp) except -1
    cdef bint is_open(self) noexcept

cdef class Range:
    cdef readonly Chunk chunk
    cdef public Py_ssize_t start
    cdef public Py_ssize_t end
    cdef int64_t body_bytes(self) noexcept
    cdef uint64_t id(self) noexcept
    cdef int let_go(self) except -1
    cdef bint is_reserved(self, Py_ssize_t place) except -1

cdef Range new_range(Chunk chunk, Py_ssize_t start, Py_ssize_t end)

cdef class ChunkWriter:
    cdef Chunk open
    cdef uint64_t last_ns
    cdef uint64_t stamp(self, uint64_t now_ns) noexcept
    cdef Chunk open_at(self, uint64_t first_id)
    cdef Range store(
        self, uint64_t first_id, const int32_t* ends, Py_ssize_t count, bytes bodies, uint64_t now_ns
    )

cdef class UnreadQueue:
    cdef public QuotaAccount account
    cdef public bint is_owned
    cdef public bint gone
    cdef readonly int64_t held_bytes
    cdef readonly int64_t held_messages
    cdef readonly object ranges
    cdef readonly dict waiters
    cpdef put(self, Range messages)
    cpdef Range take(self, Py_ssize_t count, Py_ssize_t max_bytes, bint bare=*)
    cpdef confirm(self, Range taken)
    cdef bint try_charge(self, int64_t size) except -1
    cdef void count_held(self, Range messages, int sign) noexcept

cdef int put_to(list readers, Range messages) except -1
