from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef enum Verdict:
    UNKNOWN
    ALLOW
    DENY

cdef struct Topic:
    uint64_t hash
    uint64_t next_id
    uint64_t generation  # of the policy that the verdicts below belong to
    uint8_t* verdicts  # by identity class
    uint32_t verdict_count
    uint32_t subscribers  # number of the interned set; 0 is the empty set
    uint8_t collect
    uint8_t durable  # committed first; the bus then publishes it from a trusted source
    uint8_t hold
    uint8_t name_size
    int collected  # scratch of one routing: index into Fanout.collecting, or -1
    unsigned char name[255]

cdef inline bint is_idle(const Topic* topic) noexcept nogil:
    return topic.subscribers == 0 and not topic.collect and not topic.hold and not topic.durable

cdef class TopicTable:
    cdef Topic** slots
    cdef size_t capacity  # a power of two
    cdef size_t count
    cdef size_t idle  # entries that exist only for their verdicts
    cdef uint64_t seed
    cdef Topic* find(self, const unsigned char* name, Py_ssize_t size) noexcept nogil
    cdef Topic* find_or_add(self, const unsigned char* name, Py_ssize_t size) except NULL
    cdef int drop(self, Topic* topic) except -1
    cdef int sweep_idle(self) except -1
    cdef int grow(self) except -1
    cdef Verdict verdict(self, const Topic* topic, uint32_t identity, uint64_t generation) noexcept nogil
    cdef int remember_verdict(self, Topic* topic, uint32_t identity, uint64_t generation, Verdict verdict) except -1
