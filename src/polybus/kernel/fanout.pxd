from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

from polybus.kernel.framing cimport Encoding, Framing
from polybus.kernel.outbox cimport pb_chunk
from polybus.kernel.router cimport pb_column, pb_routed, pb_source
from polybus.kernel.subscriber_table cimport SubscriberTable

cdef class Source:
    cdef pb_source publisher

cdef class CollectedBatch:
    cdef readonly bytes topic
    cdef readonly uint64_t first_id
    cdef readonly Py_ssize_t count
    cdef readonly bytes offsets  # int32, native order, count + 1 of them
    cdef readonly bytes bodies

cdef class RouteResult:
    cdef readonly Py_ssize_t consumed
    cdef readonly int stop
    cdef readonly int code
    cdef readonly bytes topic
    cdef readonly object blocker
    cdef readonly list outputs
    cdef readonly object collected  # of CollectedBatch, one per topic
    cdef readonly object fragments  # of (topic, body)

cdef class Fanout(SubscriberTable):
    cdef object judge
    # The encoded messages of one call: in a bytes object, in a chunk, or in both.
    cdef PyObject* out
    cdef pb_chunk* chunk
    cdef unsigned char* encoded
    cdef Py_ssize_t size
    cdef int report_events(self) except -1
    cdef int add_pieces(self, bytes topic, const Py_buffer* index, const Py_buffer* view) except -1
    cdef int begin(self, int own, int skip, Py_ssize_t room) except -1
    cdef void reset_scratch(self) noexcept
    cdef int scan(
        self, Framing framing, Source source, const unsigned char* at, Py_ssize_t size, RouteResult routed
    ) except -1
    cdef int route_columns(
        self, Source source, bytes topic, const Py_buffer* index, const Py_buffer* view, RouteResult routed
    ) except -1
    cdef int request_verdict(self, Source source, const pb_routed* found) except -1
    cdef int finish(self, RouteResult routed, int own) except -1
    cdef int encode(self, Encoding encoding) except -1
    cdef void count_unfit(self, int encoding) noexcept
    cdef int distribute(self, int encoding, RouteResult routed) except -1
    cdef int share(self, size_t first, RouteResult routed) except -1
    cdef int divide(self, size_t first, int encoding, RouteResult routed) except -1
    cdef object as_bytes(self)
    cdef pb_chunk* as_chunk(self) except NULL
    cdef void drop_encoded(self) noexcept
    cdef int add_fragments(self, RouteResult routed) except -1
    cdef int collect(self, RouteResult routed) except -1
    cdef int open_column(self, pb_column* column, RouteResult routed) except -1

cdef class PlainRoute:
    cdef Fanout fanout
    cdef Source source
    cdef Framing framing
    cdef bint needs_session
    cdef Py_ssize_t route(self, const unsigned char* data, Py_ssize_t size) except -1
