from libc.stdint cimport int64_t

cdef enum:
    QUOTA_COUNT = 4
    BYTES = 0  # index of quota_bytes in bus.quotas.QUOTAS; the fast path charges it directly

cdef class QuotaAccount:
    cdef readonly object key
    cdef int64_t used[QUOTA_COUNT]
    cdef int64_t limits[QUOTA_COUNT]
    cdef bint has_room(self, int quota, int64_t amount) noexcept
    cdef bint try_charge(self, int quota, int64_t amount) noexcept
    cdef int refund(self, int quota, int64_t amount) except -1
