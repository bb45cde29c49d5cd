"""One received buffer in, at most one output per subscriber out.

    received bytes ──framing──▶ frames ──topic table──▶ subscriber sets
                                                             │ runs
    one bytes object per subscriber  ◀──copy or share────────┘

The scan in router.h gathers messages into *runs* of the same interned subscriber set, and copies
the raw frames for readers of the sender's own dialect. This module does what needs Python: it
asks the policy, calls encodings, and makes bytes objects.

For any encoding but the sender's, the run's messages are encoded once and distributed like the
raw frames: a buffer with one run is one bytes object that all its readers share, otherwise each
reader's bytes are copied into one object of exactly their size. Readers with an outbox in C get
chunks in the same way.

Topics with the *collect* flag are also gathered into one Arrow-shaped batch per topic for
the bus. Messages of *durable* topics are only gathered: the bus publishes them from a
trusted source once they are committed.

The policy judges a message once per (identity class, topic, policy generation); only an
unknown verdict calls Python. A full reader stops the scan at the first message that would
reach it. No message is routed partially, and the session delivers the rest again later.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_Clear
from cpython.object cimport PyObject
from cpython.ref cimport Py_XDECREF
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.string cimport memcpy

from polybus.kernel.framing cimport MESSAGE, Encoding, Frame, Framing
from polybus.kernel.outbox cimport pb_chunk, pb_chunk_new, pb_chunk_release, pb_chunk_retain
from polybus.kernel.router cimport (
    PB_ALLOW,
    PB_DENY,
    PB_MAX_IDLE_TOPICS,
    PB_STOP_BAD,
    PB_STOP_BLOCKED,
    PB_STOP_CONTROL,
    PB_STOP_END,
    PB_STOP_FRAGMENTS,
    PB_STOP_JUDGE,
    PB_STOP_NO_MEMORY,
    pb_accept,
    pb_add_piece,
    pb_column,
    pb_copy_runs,
    pb_counter_add,
    pb_counter_get,
    pb_deliver,
    pb_measure_outputs,
    pb_open_output,
    pb_output,
    pb_piece,
    pb_route,
    pb_route_begin,
    pb_routed,
    pb_router_change_begin,
    pb_router_change_end,
    pb_router_set,
    pb_router_subscriber,
    pb_run,
    pb_scan,
    pb_set,
    pb_set_encodings,
    pb_source,
    pb_source_identity,
    pb_source_reclassify,
    pb_start_run,
    pb_stop,
    pb_subscriber,
    pb_take_raw_chunk,
    pb_topic,
    pb_topic_remember_verdict,
    pb_topics_find,
    pb_topics_find_or_add,
    pb_topics_sweep_idle,
    pb_verdict,
    pb_worker,
    pb_worker_begin,
    pb_worker_end,
)
from polybus.kernel.subscriber_table cimport SubscriberTable

cdef extern from "bytes_inline.h":
    void copy "polybus_copy"(unsigned char* out, const unsigned char* source, size_t size) noexcept nogil

cdef extern from *:
    int lowest_bit "__builtin_ctz"(unsigned int word) noexcept nogil

cdef extern from "Python.h":
    int _PyBytes_Resize(PyObject** string, Py_ssize_t size) except -1
    PyObject* try_new_bytes "PyBytes_FromStringAndSize"(const char* content, Py_ssize_t size)
    PyObject* new_bytes "PyBytes_FromStringAndSize"(const char* content, Py_ssize_t size) except NULL
    char* bytes_of "PyBytes_AS_STRING"(PyObject* string)

cdef enum:
    MAX_IDENTITY_CLASSES = 65536  # a verdict is one byte per class and topic

END = PB_STOP_END
CONTROL_FRAME = PB_STOP_CONTROL
BLOCKED = PB_STOP_BLOCKED
BAD_FRAME = PB_STOP_BAD
FRAGMENTS_FIRST = PB_STOP_FRAGMENTS

NOTHING = ()  # most buffers collect nothing, so they share one empty tuple


@cython.final
cdef class Source:
    """A publisher: its identity class and the counters of its messages.

    Messages of a trusted source are not judged; the caller has done that.
    """

    def __init__(self, uint32_t identity, *, bint trusted=False):
        self.reclassify(identity)
        self.publisher.trusted = trusted

    def reclassify(self, uint32_t identity):
        """Set the identity class after the policy has changed."""
        if identity >= MAX_IDENTITY_CLASSES:
            raise ValueError(f"identity class must be below {MAX_IDENTITY_CLASSES}, got {identity}")
        pb_source_reclassify(&self.publisher, identity)

    @property
    def identity(self) -> int:
        return pb_source_identity(&self.publisher)

    @property
    def trusted(self) -> bool:
        return self.publisher.trusted

    @property
    def messages(self) -> int:
        return pb_counter_get(&self.publisher.messages)

    @property
    def bytes(self) -> int:
        return pb_counter_get(&self.publisher.bytes)

    @property
    def denied(self) -> int:
        return pb_counter_get(&self.publisher.denied)

    @property
    def unheard(self) -> int:
        return pb_counter_get(&self.publisher.unheard)


@cython.final
cdef class CollectedBatch:
    """The messages of one topic in one buffer, as columns in Arrow's layout."""


@cython.final
cdef class RouteResult:
    """The result of routing one buffer. `outputs` are (outbox, bytes) pairs, one per reader.

    Readers with an outbox in C are not among them: their outputs were pushed already.
    """

    def __cinit__(self):
        self.outputs = []
        self.collected = NOTHING
        self.fragments = NOTHING


@cython.final
cdef class Fanout(SubscriberTable):
    def __init__(self, judge):
        """`judge(identity class, topic) -> bool` returns verdicts that are not remembered."""
        self.judge = judge

    def route(self, Framing framing not None, Source source not None, buffer, Py_ssize_t start, Py_ssize_t end):
        """Route the frames in buffer[start:end]. Returns a RouteResult; `stop` is the reason it ended.

        Raises ValueError if start and end are not within the buffer.
        """
        cdef RouteResult routed = RouteResult.__new__(RouteResult)
        cdef Py_buffer view
        if framing.own is None:
            raise ValueError("framing.own must be set")
        PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
        try:
            if not 0 <= start <= end <= view.len:
                raise ValueError("start and end must lie within the buffer")
            # Raw frames take at most the received bytes, so the output needs no second measure.
            self.begin(framing.own.number, -1, end - start)
            try:
                self.scan(framing, source, <const unsigned char*>view.buf + start, end - start, routed)
                self.finish(routed, framing.own.number)
            finally:
                self.reset_scratch()
        finally:
            PyBuffer_Release(&view)
        self.report_events()
        return routed

    def publish(self, Source source not None, bytes topic not None, offsets, bodies, Encoding skip=None):
        """Route messages given as columns; offsets are those of `CollectedBatch`.

        Readers whose encoding is `skip` are left out because they got the raw frames already.
        Raises ValueError if the topic or the offsets are invalid.
        """
        cdef RouteResult routed = RouteResult.__new__(RouteResult)
        cdef Py_buffer index, view
        if not 0 < len(topic) <= 255:
            raise ValueError(f"topic must have 1 to 255 bytes, got {len(topic)}")
        PyObject_GetBuffer(offsets, &index, PyBUF_SIMPLE)
        try:
            PyObject_GetBuffer(bodies, &view, PyBUF_SIMPLE)
            try:
                check_offsets(<const int32_t*>index.buf, index.len, view.len)
                # No own encoding: every reader gets the messages encoded.
                self.begin(-1, -1 if skip is None else skip.number, 0)
                try:
                    self.route_columns(source, topic, &index, &view, routed)
                    self.finish(routed, -1)
                finally:
                    self.reset_scratch()
            finally:
                PyBuffer_Release(&view)
        finally:
            PyBuffer_Release(&index)
        self.report_events()
        return routed

    def encode_for(self, uint32_t number, bytes topic not None, offsets, bodies) -> bytes:
        """Encode messages for one reader and count them as sent to it. Returns the bytes."""
        cdef pb_subscriber* reader = self.require_subscriber(number)
        cdef Encoding encoding = self.encodings[reader.encoding]
        cdef Py_buffer index, view
        cdef const pb_run* run
        if not 0 < len(topic) <= 255:
            raise ValueError(f"topic must have 1 to 255 bytes, got {len(topic)}")
        PyObject_GetBuffer(offsets, &index, PyBUF_SIMPLE)
        try:
            PyObject_GetBuffer(bodies, &view, PyBUF_SIMPLE)
            try:
                check_offsets(<const int32_t*>index.buf, index.len, view.len)
                self.begin(-1, -1, 0)
                try:
                    # Set 0 is empty: the run only collects pieces for `encode`, no reader is looked up.
                    require_memory(pb_start_run(self.worker, 0))
                    self.add_pieces(topic, &index, &view)
                    self.encode(encoding)
                    blob = self.as_bytes()
                    run = &self.worker.runs[0]
                    pb_counter_add(&reader.messages, run.count)
                    pb_counter_add(&reader.bytes, self.size)
                    pb_counter_add(&self.worker.delivered, run.count)
                    pb_counter_add(&self.worker.delivered_bytes, self.size)
                    pb_counter_add(&self.worker.too_large, run.unfit)
                finally:
                    self.reset_scratch()
            finally:
                PyBuffer_Release(&view)
        finally:
            PyBuffer_Release(&index)
        return blob

    @property
    def messages(self) -> int:
        return sum([pb_counter_get(&self.router.workers[at].messages) for at in range(self.router.worker_count)])

    @property
    def bytes(self) -> int:
        return sum([pb_counter_get(&self.router.workers[at].bytes) for at in range(self.router.worker_count)])

    @property
    def delivered(self) -> int:
        return sum([pb_counter_get(&self.router.workers[at].delivered) for at in range(self.router.worker_count)])

    @property
    def delivered_bytes(self) -> int:
        return sum(
            [pb_counter_get(&self.router.workers[at].delivered_bytes) for at in range(self.router.worker_count)]
        )

    @property
    def denied(self) -> int:
        return sum([pb_counter_get(&self.router.workers[at].denied) for at in range(self.router.worker_count)])

    @property
    def unheard(self) -> int:
        return sum([pb_counter_get(&self.router.workers[at].unheard) for at in range(self.router.worker_count)])

    @property
    def too_large(self) -> int:
        return sum([pb_counter_get(&self.router.workers[at].too_large) for at in range(self.router.worker_count)])

    cdef int report_events(self) except -1:
        """Report outboxes that are full or over their bound. Not while a buffer is routed."""
        if self.turn is not None:
            self.turn.touch()
            if self.turn.turn.changed.count:
                self.turn.deliver()
        return 0

    cdef int add_pieces(self, bytes topic, const Py_buffer* index, const Py_buffer* view) except -1:
        cdef const int32_t* offsets = <const int32_t*>index.buf
        cdef pb_topic no_topic
        cdef Frame frame
        cdef Py_ssize_t at
        no_topic.collected = -1
        for at in range(index.len // <Py_ssize_t>sizeof(int32_t) - 1):
            frame = message(topic, view, offsets[at], offsets[at + 1])
            require_memory(pb_add_piece(self.worker, &no_topic, &frame, True, False))
        return 0

    cdef int begin(self, int own, int skip, Py_ssize_t room) except -1:
        if self.routing:
            raise RuntimeError("fan-out is not reentrant: a buffer is being routed")
        pb_worker_begin(&self.router, self.worker)
        self.routing = True
        pb_route_begin(self.worker, 0 if own < 0 else <uint32_t>1 << own, skip, room, False)
        # Raw frames go straight to where most readers of this encoding need them.
        if own >= 0 and self.router.outbox_counts[own] == 0:
            self.worker.open_raw = open_bytes
            self.worker.owner = <void*>self
        return 0

    cdef void reset_scratch(self) noexcept:
        # Runs also after an exception, so a failed call leaves no marks in the shared tables.
        self.drop_encoded()
        self.routing = False
        pb_worker_end(self.worker)

    cdef int scan(
        self, Framing framing, Source source, const unsigned char* at, Py_ssize_t size, RouteResult routed
    ) except -1:
        cdef pb_routed found
        cdef Py_ssize_t done = 0
        while True:
            pb_scan(
                &self.router, self.worker, &source.publisher, framing.scanner, at + done, size - done, &found
            )
            done += found.consumed
            if found.stop != PB_STOP_JUDGE:
                break
            self.request_verdict(source, &found)
        require_memory(-(found.stop == PB_STOP_NO_MEMORY))
        routed.consumed = done
        routed.stop = found.stop
        routed.code = found.code
        if found.stop == PB_STOP_CONTROL:
            routed.topic = found.topic[:found.topic_size] if found.topic_size else b""
        elif found.stop == PB_STOP_BLOCKED:
            routed.blocker = self.outboxes[found.blocker]
        return 0

    cdef int route_columns(
        self, Source source, bytes topic, const Py_buffer* index, const Py_buffer* view, RouteResult routed
    ) except -1:
        cdef const int32_t* offsets = <const int32_t*>index.buf
        cdef Py_ssize_t count = index.len // <Py_ssize_t>sizeof(int32_t) - 1
        cdef pb_routed found
        cdef pb_stop stop
        cdef Frame frame
        while routed.consumed < count:
            frame = message(topic, view, offsets[routed.consumed], offsets[routed.consumed + 1])
            stop = pb_accept(&self.router, self.worker, &source.publisher, &frame, &found)
            if stop == PB_STOP_JUDGE:
                self.request_verdict(source, &found)
                continue
            require_memory(-(stop == PB_STOP_NO_MEMORY))
            if stop == PB_STOP_BLOCKED:
                routed.stop = stop
                routed.blocker = self.outboxes[found.blocker]
                break
            routed.consumed += 1
        return 0

    cdef int request_verdict(self, Source source, const pb_routed* found) except -1:
        """Ask the policy about the topic at which the scan stopped, and remember the verdict."""
        cdef pb_topic* topic
        cdef pb_verdict verdict
        cdef int done
        pb_router_change_begin(&self.router)
        # Names are chosen by publishers, so entries kept for verdicts alone must be bounded.
        topic = pb_topics_find(&self.router.topics, found.topic, found.topic_size)
        if topic is NULL:
            if self.router.topics.idle >= PB_MAX_IDLE_TOPICS:
                pb_topics_sweep_idle(&self.router.topics)
            topic = pb_topics_find_or_add(&self.router.topics, found.topic, found.topic_size)
        pb_router_change_end(&self.router)
        require_memory(-(topic is NULL))
        # May raise: then nothing of this message has been counted or routed.
        allowed = self.judge(pb_source_identity(&source.publisher), found.topic[:found.topic_size])
        verdict = PB_ALLOW if allowed else PB_DENY
        pb_router_change_begin(&self.router)
        done = pb_topic_remember_verdict(
            topic, pb_source_identity(&source.publisher), self.router.generation, verdict
        )
        pb_router_change_end(&self.router)
        return require_memory(done)

    cdef int finish(self, RouteResult routed, int own) except -1:
        cdef uint32_t encodings = 0
        cdef size_t at
        cdef int number
        for at in range(self.worker.run_count):
            encodings |= pb_set_encodings(pb_router_set(&self.router, self.worker.runs[at].subscribers))
        if self.worker.filled:
            # The object is not shared yet, so resizing it in place is allowed.
            if self.out is not NULL and self.worker.filled != self.worker.room:
                _PyBytes_Resize(&self.out, self.worker.filled)
                self.worker.raw = <unsigned char*>bytes_of(self.out)
            if self.out is NULL:
                self.chunk = pb_take_raw_chunk(self.worker)
                require_memory(-(self.chunk is NULL))
            self.encoded = self.worker.raw
            self.size = self.worker.filled
            self.distribute(own, routed)
        encodings &= ~self.worker.own_bit
        if self.worker.skip >= 0:
            encodings &= ~(<uint32_t>1 << self.worker.skip)
        while encodings:
            number = lowest_bit(encodings)
            encodings &= encodings - 1
            self.encode(self.encodings[number])
            self.count_unfit(number)
            self.distribute(number, routed)
        if self.worker.fragment_count:
            self.add_fragments(routed)
        if self.worker.column_count:
            self.collect(routed)
        pb_deliver(self.worker)
        return 0

    cdef int encode(self, Encoding encoding) except -1:
        """Encode all relayed messages. Sets the bounds of the runs within the encoded bytes."""
        cdef pb_worker* worker = self.worker
        cdef size_t at
        cdef pb_piece* piece
        cdef pb_run* run
        cdef unsigned char* before
        cdef unsigned char* out
        self.drop_encoded()
        for at in range(worker.run_count):
            worker.runs[at].start = worker.runs[at].end = 0
            worker.runs[at].count = worker.runs[at].unfit = 0
        # Measured first, so that the encoded messages need one allocation and no copy.
        for at in range(worker.piece_count):
            if worker.pieces[at].relayed:
                self.size += encoding.measure(&worker.pieces[at].frame)
        if self.router.outbox_counts[encoding.number]:
            self.chunk = pb_chunk_new(self.size)
            require_memory(-(self.chunk is NULL))
            self.encoded = out = self.chunk.data
        else:
            self.out = new_bytes(NULL, self.size)
            self.encoded = out = <unsigned char*>bytes_of(self.out)
        for at in range(worker.piece_count):
            piece = &worker.pieces[at]
            if not piece.relayed:
                continue
            run = &worker.runs[piece.run]
            if run.count == 0:
                run.start = out - self.encoded
            before = out
            out = encoding.write(&piece.frame, out)
            run.end = out - self.encoded
            # An encoding writes nothing for a message that it cannot carry.
            if out != before:
                run.count += 1
            else:
                run.unfit += 1
        return 0

    cdef void count_unfit(self, int encoding) noexcept:
        """Count the messages that this encoding could not carry, once per reader."""
        cdef const pb_set* readers
        cdef const pb_run* run
        cdef size_t at
        cdef uint32_t index
        for at in range(self.worker.run_count):
            run = &self.worker.runs[at]
            if run.unfit:
                readers = pb_router_set(&self.router, run.subscribers)
                for index in range(readers.size):
                    if pb_router_subscriber(&self.router, readers.members[index]).encoding == encoding:
                        pb_counter_add(&self.worker.too_large, run.unfit)

    cdef int distribute(self, int encoding, RouteResult routed) except -1:
        """Add an output for each reader of this encoding."""
        cdef Py_ssize_t first
        if self.size == 0:
            return 0
        first = pb_measure_outputs(&self.router, self.worker, encoding)
        require_memory(-(first < 0))
        # With one run all readers share one object: no copy per reader.
        if self.worker.run_count == 1:
            return self.share(first, routed)
        return self.divide(first, encoding, routed)

    cdef int share(self, size_t first, RouteResult routed) except -1:
        """Give each reader the whole run."""
        cdef list outboxes = self.outboxes
        cdef bytes blob = None
        cdef pb_output* output
        cdef size_t at
        for at in range(first, self.worker.output_count):
            output = &self.worker.outputs[at]
            if output.outbox is NULL:
                if blob is None:
                    blob = self.as_bytes()
                routed.outputs.append((outboxes[output.subscriber], blob))
            else:
                pb_chunk_retain(self.as_chunk())
                output.chunk = self.chunk
        return 0

    cdef int divide(self, size_t first, int encoding, RouteResult routed) except -1:
        """Copy each reader's share of several runs into an object of its own."""
        cdef pb_output* output
        cdef size_t at
        cdef bytes share
        for at in range(first, self.worker.output_count):
            output = &self.worker.outputs[at]
            if output.outbox is NULL:
                share = PyBytes_FromStringAndSize(NULL, output.size)
                output.cursor = <unsigned char*>PyBytes_AS_STRING(share)
                routed.outputs.append((self.outboxes[output.subscriber], share))
            else:
                require_memory(pb_open_output(output))
        pb_copy_runs(&self.router, self.worker, encoding, first, self.encoded)
        return 0

    cdef object as_bytes(self):
        if self.out is NULL:
            self.out = new_bytes(<const char*>self.encoded, self.size)
        return <object>self.out

    cdef pb_chunk* as_chunk(self) except NULL:
        if self.chunk is NULL:
            self.chunk = pb_chunk_new(self.size)
            require_memory(-(self.chunk is NULL))
            memcpy(self.chunk.data, self.encoded, self.size)
        return self.chunk

    cdef void drop_encoded(self) noexcept:
        Py_XDECREF(self.out)
        self.out = NULL
        if self.chunk is not NULL:
            pb_chunk_release(self.chunk)
        self.chunk = NULL
        self.encoded = NULL
        self.size = 0

    cdef int add_fragments(self, RouteResult routed) except -1:
        cdef const Frame* frame
        cdef size_t at
        routed.fragments = []
        for at in range(self.worker.fragment_count):
            frame = &self.worker.fragments[at]
            # Copied, because the session keeps it longer than the receive buffer.
            body = PyBytes_FromStringAndSize(<const char*>frame.body, frame.body_size)
            routed.fragments.append((frame.topic[:frame.topic_size], body))
        return 0

    cdef int collect(self, RouteResult routed) except -1:
        cdef size_t at
        cdef pb_column* column
        cdef pb_piece* piece
        routed.collected = []
        for at in range(self.worker.column_count):
            self.open_column(&self.worker.columns[at], routed)
        for at in range(self.worker.piece_count):
            piece = &self.worker.pieces[at]
            if piece.column < 0:
                continue
            column = &self.worker.columns[piece.column]
            copy(column.body, piece.frame.body, piece.frame.body_size)
            column.body += piece.frame.body_size
            column.offset[1] = column.offset[0] + <int32_t>piece.frame.body_size
            column.offset += 1
        return 0

    cdef int open_column(self, pb_column* column, RouteResult routed) except -1:
        cdef CollectedBatch batch = CollectedBatch.__new__(CollectedBatch)
        if column.size > 0x7FFFFFFF:
            raise OverflowError("the messages of one topic in one buffer must fit 2 GiB (int32 offsets)")
        batch.topic = column.topic.name[:column.topic.name_size]
        batch.first_id = column.first_id
        batch.count = column.count
        batch.offsets = PyBytes_FromStringAndSize(NULL, (column.count + 1) * sizeof(int32_t))
        batch.bodies = PyBytes_FromStringAndSize(NULL, column.size)
        column.offset = <int32_t*>PyBytes_AS_STRING(batch.offsets)
        column.offset[0] = 0
        column.body = <unsigned char*>PyBytes_AS_STRING(batch.bodies)
        routed.collected.append(batch)
        return 0


cdef unsigned char* open_bytes(void* owner, size_t size) noexcept:
    """Return memory of a bytes object for the raw frames, or NULL without memory."""
    cdef PyObject* out = try_new_bytes(NULL, size)
    if out is NULL:
        PyErr_Clear()  # the scan reports it
        return NULL
    (<Fanout>owner).out = out
    return <unsigned char*>bytes_of(out)


cdef inline int require_memory(int done) except -1:
    if done < 0:
        raise MemoryError
    return 0


@cython.final
cdef class PlainRoute:
    """Routes the plain publishes of one connection, before its session gets the bytes."""

    def __init__(self, Fanout fanout not None, Source source not None, Framing framing not None):
        self.fanout = fanout
        self.source = source
        self.framing = framing

    cdef Py_ssize_t route(self, const unsigned char* data, Py_ssize_t size) except -1:
        """Route frames up to the first that needs the session. Returns the bytes consumed.

        `needs_session` says whether there is one; else an incomplete frame is left at most.
        """
        cdef Fanout fanout = self.fanout
        cdef pb_routed routed
        cdef int failed
        if fanout.routing:
            raise RuntimeError("fan-out is not reentrant: a buffer is being routed")
        pb_worker_begin(&fanout.router, fanout.worker)
        failed = pb_route(
            &fanout.router,
            fanout.worker,
            &self.source.publisher,
            self.framing.scanner,
            self.framing.own.number,
            data,
            size,
            &routed,
        )
        pb_deliver(fanout.worker)
        pb_worker_end(fanout.worker)
        require_memory(failed)
        self.needs_session = routed.stop != PB_STOP_END
        fanout.report_events()
        return routed.consumed


cdef inline Frame message(bytes topic, const Py_buffer* view, int32_t start, int32_t end):
    """Return a frame for a message of a column; it has no raw form."""
    cdef Frame frame
    frame.kind = MESSAGE
    frame.size = 0
    frame.code = 0
    frame.topic = topic
    frame.topic_size = len(topic)
    frame.body = <const unsigned char*>view.buf + start
    frame.body_size = end - start
    frame.raw = NULL
    frame.raw_size = 0
    return frame


cdef int check_offsets(const int32_t* offsets, Py_ssize_t size, Py_ssize_t limit) except -1:
    cdef Py_ssize_t at
    if size < <Py_ssize_t>sizeof(int32_t) or size % <Py_ssize_t>sizeof(int32_t):
        raise ValueError("offsets must be int32 values, one more than messages")
    # The loop below reads int32 values in place; an unaligned read is undefined in C.
    if <size_t>offsets % sizeof(int32_t):
        raise ValueError("offsets must be aligned")
    if offsets[0] < 0 or offsets[size // <Py_ssize_t>sizeof(int32_t) - 1] > limit:
        raise ValueError("offsets must lie within the bodies")
    for at in range(1, size // <Py_ssize_t>sizeof(int32_t)):
        if offsets[at] < offsets[at - 1]:
            raise ValueError("offsets must not decrease")
    return 0
