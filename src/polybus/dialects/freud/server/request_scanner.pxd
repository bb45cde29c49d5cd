from libc.stdint cimport int32_t, int64_t, uint32_t

cdef class ProduceRun:
    cdef readonly bytes topic
    cdef readonly Py_ssize_t count
    cdef readonly bytes offsets  # int32, native order, count + 1 of them
    cdef readonly bytes bodies
    cdef const int32_t* ends(self) noexcept

cdef class GetRun:
    cdef readonly bytes subscriber  # the id, 16 bytes
    cdef readonly Py_ssize_t count
    cdef public Py_ssize_t unanswered  # the session counts it down
    cdef readonly int32_t max_blocking_s  # 0 polls, negative waits forever
    cdef readonly bint records

cdef class ScanResult:
    cdef readonly Py_ssize_t consumed
    cdef readonly list groups
    cdef readonly bint more
    cdef readonly bint bad

cdef class RequestScanner:
    cdef readonly Py_ssize_t max_frame_bytes
    cdef readonly bint with_header
    cdef object is_name
    cdef bytes name
    cdef bint name_is_good
    cdef bint scanning
    cdef int32_t* offsets  # scratch of one group; kept between scans
    cdef Py_ssize_t capacity
    cpdef ScanResult scan(self, buffer, Py_ssize_t start, Py_ssize_t end)
    cdef int walk(self, const unsigned char* start, Py_ssize_t size, ScanResult scanned) except -1
    cdef int64_t payload_length(self, const unsigned char* at) noexcept
    cdef Py_ssize_t take(
        self,
        const unsigned char* at,
        Py_ssize_t left,
        Py_ssize_t length,
        Py_ssize_t* room,
        list groups,
    ) except -1
    cdef object fault(self, uint32_t kind, const unsigned char* payload, Py_ssize_t length)
    cdef bint judge(self, const unsigned char* name, Py_ssize_t size) except -1
    cdef Py_ssize_t take_produces(
        self,
        const unsigned char* at,
        Py_ssize_t left,
        Py_ssize_t length,
        Py_ssize_t* room,
        list groups,
    ) except -1
    cdef ProduceRun gather(self, const unsigned char* at, Py_ssize_t head, Py_ssize_t count)
    cdef int widen(self) except -1
