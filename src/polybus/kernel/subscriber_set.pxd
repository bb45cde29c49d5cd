from libc.stdint cimport uint32_t

cdef struct SubscriberSet:
    uint32_t references  # topics that point here
    uint32_t size
    uint32_t encodings  # bit mask over the members
    uint32_t* members  # subscriber numbers, ascending

cdef class SubscriberSetTable:
    cdef SubscriberSet* sets
    cdef uint32_t capacity
    cdef uint32_t used
    cdef list free
    cdef dict numbers  # bytes of the member array -> number of the set
    cdef uint32_t with_member(self, uint32_t number, uint32_t member, uint32_t encoding) except 0
    cdef long without_member(self, uint32_t number, uint32_t member, uint32_t encodings) except -1
    cdef int contains(self, uint32_t number, uint32_t member) noexcept nogil
    cdef int release(self, uint32_t number) except -1
    cdef uint32_t intern(self, const uint32_t* members, uint32_t size, uint32_t encodings) except 0
    cdef uint32_t allocate_number(self) except 0
