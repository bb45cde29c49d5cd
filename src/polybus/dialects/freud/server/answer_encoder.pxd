from libc.stdint cimport uint32_t, uint64_t

cpdef bytes encode_produced(uint64_t first_id, Py_ssize_t count)
cdef bytes encode_columns(
    const unsigned char* offsets,
    const unsigned char* bodies,
    const unsigned char* times,
    uint64_t first_id,
    uint32_t flags,
    Py_ssize_t start,
    Py_ssize_t count,
)
