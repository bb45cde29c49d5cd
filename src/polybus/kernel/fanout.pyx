"""The hot loop: one received buffer in, at most one output per subscriber out.

    received bytes ──framing──▶ frames ──topic table──▶ subscriber sets
                                                             │ runs
    one bytes object per subscriber  ◀──copy or share────────┘

Messages are gathered into *runs* of the same interned subscriber set. A buffer with one run
is the common case: it becomes one bytes object that all its readers share. Otherwise the
loop measures each reader's bytes first and copies them into one object of exactly that size.
So a reader costs one write per buffer, independent of the number of topics.

Readers of the sender's own dialect get the frames unchanged (`raw`), copied during the scan.
For any other encoding the run's messages are encoded once and distributed the same way.
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
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_XDECREF
from libc.stdint cimport int32_t, uint32_t, uint64_t

from polybus.kernel.framing cimport BAD, CONTROL, FRAGMENT, MESSAGE, Encoding, Frame, FrameKind, Framing
from polybus.kernel.subscriber_table cimport SubscriberTable, Subscriber
from polybus.kernel.subscriber_set cimport SubscriberSet
from polybus.kernel.topic_index cimport ALLOW, DENY, UNKNOWN, Topic, Verdict

cdef extern from "bytes_inline.h":
    void copy "polybus_copy"(unsigned char* out, const unsigned char* source, size_t size) noexcept nogil
    bint same "polybus_same"(const unsigned char* a, const unsigned char* b, size_t size) noexcept nogil

cdef extern from *:
    int lowest_bit "__builtin_ctz"(unsigned int word) noexcept nogil

cdef extern from "Python.h":
    int _PyBytes_Resize(PyObject** string, Py_ssize_t size) except -1
    PyObject* new_bytes "PyBytes_FromStringAndSize"(const char* content, Py_ssize_t size) except NULL
    char* bytes_of "PyBytes_AS_STRING"(PyObject* string)

cdef enum:
    MAX_IDENTITY_CLASSES = 65536  # a verdict is one byte per class and topic
    MAX_IDLE_TOPICS = 4096  # entries kept for verdicts alone, about 1 MB

cdef enum Stop:
    STOP_END  # all complete frames were consumed
    STOP_CONTROL  # a control frame was consumed; the session must act on it, then route the rest
    STOP_BLOCKED  # the next message would reach a full reader
    STOP_BAD  # the next bytes are not a frame
    STOP_FRAGMENTS  # a complete message follows; it must not overtake the fragments before it

END = STOP_END
CONTROL_FRAME = STOP_CONTROL
BLOCKED = STOP_BLOCKED
BAD_FRAME = STOP_BAD
FRAGMENTS_FIRST = STOP_FRAGMENTS

NOTHING = ()  # most buffers collect nothing, so they share one empty tuple

cdef enum Outcome:
    HEARD
    KEPT  # durable topic: collected, not relayed
    UNHEARD
    DENIED
    WAIT

cdef struct Run:
    uint32_t subscribers  # number of the set
    Py_ssize_t start
    Py_ssize_t end
    uint64_t count
    uint64_t unfit  # messages that the encoding cannot carry

cdef struct Piece:
    Frame frame
    size_t run
    int collected  # index into `collecting`, or -1
    bint relayed

cdef struct Collecting:
    Topic* topic
    uint64_t first_id
    Py_ssize_t count
    Py_ssize_t size
    int32_t* offset
    unsigned char* body


@cython.final
cdef class Source:
    """A publisher: its identity class and the counters of its messages.

    Messages of a trusted source are not judged; the caller has done that.
    """

    cdef readonly uint32_t identity
    cdef readonly bint trusted
    cdef readonly uint64_t messages, bytes, denied, unheard

    def __init__(self, uint32_t identity, *, bint trusted=False):
        self.reclassify(identity)
        self.trusted = trusted

    def reclassify(self, uint32_t identity):
        """Set the identity class after the policy has changed."""
        if identity >= MAX_IDENTITY_CLASSES:
            raise ValueError(f"identity class must be below {MAX_IDENTITY_CLASSES}, got {identity}")
        self.identity = identity


@cython.final
cdef class CollectedBatch:
    """The messages of one topic in one buffer, as columns in Arrow's layout."""

    cdef readonly bytes topic
    cdef readonly uint64_t first_id
    cdef readonly Py_ssize_t count
    cdef readonly bytes offsets  # int32, native order, count + 1 of them
    cdef readonly bytes bodies


@cython.final
cdef class RouteResult:
    """The result of routing one buffer. `outputs` are (outbox, bytes) pairs, one per reader."""

    cdef readonly Py_ssize_t consumed
    cdef readonly int stop
    cdef readonly int code
    cdef readonly bytes topic
    cdef readonly object blocker
    cdef readonly list outputs
    cdef readonly object collected  # of CollectedBatch, one per topic
    cdef readonly object fragments  # of (topic, body)

    def __cinit__(self):
        self.outputs = []
        self.collected = NOTHING
        self.fragments = NOTHING


@cython.final
cdef class Fanout(SubscriberTable):
    cdef object judge
    cdef readonly uint64_t messages, bytes, delivered, delivered_bytes, denied, unheard, too_large
    # Scratch of one call. The arrays keep their capacity, so a call allocates nothing for them.
    cdef Run* runs
    cdef size_t run_count, run_capacity
    cdef Piece* pieces
    cdef size_t piece_count, piece_capacity
    cdef Collecting* collecting
    cdef size_t collecting_count, collecting_capacity
    cdef uint32_t* touched
    cdef size_t touched_count, touched_capacity
    cdef PyObject* out
    cdef Py_ssize_t room, filled
    cdef uint32_t own_bit
    cdef int skip  # number of the encoding whose readers are skipped, or -1
    cdef Topic* last
    cdef Outcome last_outcome
    cdef Topic* streak  # the topic whose next message only needs to be copied, or NULL
    cdef unsigned char* streak_out
    cdef uint64_t streak_count, streak_bytes

    def __init__(self, judge):
        """`judge(identity class, topic) -> bool` returns verdicts that are not remembered."""
        self.judge = judge

    def __dealloc__(self):
        PyMem_Free(self.runs)
        PyMem_Free(self.pieces)
        PyMem_Free(self.collecting)
        PyMem_Free(self.touched)

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
            self.begin(<uint32_t>1 << framing.own.number, -1, end - start)
            try:
                self.scan(framing, source, <const unsigned char*>view.buf + start, end - start, routed)
                self.finish(routed, framing.own.number)
            finally:
                self.reset_scratch()
        finally:
            PyBuffer_Release(&view)
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
                self.begin(0, -1 if skip is None else skip.number, 0)
                try:
                    self.route_columns(source, topic, &index, &view, routed)
                    self.finish(routed, -1)
                finally:
                    self.reset_scratch()
            finally:
                PyBuffer_Release(&view)
        finally:
            PyBuffer_Release(&index)
        return routed

    def encode_for(self, uint32_t number, bytes topic not None, offsets, bodies) -> bytes:
        """Encode messages for one reader and count them as sent to it. Returns the bytes."""
        cdef RouteResult routed = RouteResult.__new__(RouteResult)
        cdef Subscriber* reader = self.require_subscriber(number)
        cdef Encoding encoding = self.encodings[reader.encoding]
        cdef Py_buffer index, view
        cdef bytes blob
        if not 0 < len(topic) <= 255:
            raise ValueError(f"topic must have 1 to 255 bytes, got {len(topic)}")
        PyObject_GetBuffer(offsets, &index, PyBUF_SIMPLE)
        try:
            PyObject_GetBuffer(bodies, &view, PyBUF_SIMPLE)
            try:
                check_offsets(<const int32_t*>index.buf, index.len, view.len)
                self.begin(0, -1, 0)
                try:
                    # Set 0 is empty: the run only collects pieces for `encode`, no reader is looked up.
                    self.start_run(0)
                    self.add_pieces(topic, &index, &view)
                    blob = self.encode(encoding)
                    self.count_delivery(number, self.runs[0].count, len(blob))
                    self.too_large += self.runs[0].unfit
                finally:
                    self.reset_scratch()
            finally:
                PyBuffer_Release(&view)
        finally:
            PyBuffer_Release(&index)
        return blob

    cdef int add_pieces(self, bytes topic, const Py_buffer* index, const Py_buffer* view) except -1:
        cdef const int32_t* offsets = <const int32_t*>index.buf
        cdef Py_ssize_t at
        cdef Piece* piece
        for at in range(index.len // <Py_ssize_t>sizeof(int32_t) - 1):
            self.pieces = <Piece*>grow_if_full(
                self.pieces, self.piece_count, &self.piece_capacity, sizeof(Piece)
            )
            piece = &self.pieces[self.piece_count]
            piece.frame = message(topic, view, offsets[at], offsets[at + 1])
            piece.run = 0
            piece.collected = -1
            piece.relayed = True
            self.piece_count += 1
        return 0

    cdef int begin(self, uint32_t own_bit, int skip, Py_ssize_t room) except -1:
        if self.routing:
            raise RuntimeError("fan-out is not reentrant: a buffer is being routed")
        self.routing = True
        self.own_bit = own_bit
        self.skip = skip
        self.room = room
        self.filled = 0
        self.last = NULL
        self.streak = NULL
        return 0

    cdef void reset_scratch(self) noexcept:
        # Runs also after an exception, so a failed call leaves no marks in the shared tables.
        cdef size_t at
        for at in range(self.collecting_count):
            self.collecting[at].topic.collected = -1
        for at in range(self.touched_count):
            self.subscribers[self.touched[at]].pending = 0
        Py_XDECREF(self.out)
        self.out = NULL
        self.run_count = 0
        self.piece_count = 0
        self.collecting_count = 0
        self.touched_count = 0
        self.routing = False

    cdef int scan(
        self, Framing framing, Source source, const unsigned char* at, Py_ssize_t size, RouteResult routed
    ) except -1:
        cdef Frame frame
        cdef FrameKind kind
        cdef Py_ssize_t done = 0
        while True:
            kind = framing.next(at + done, size - done, &frame)
            if kind == MESSAGE and self.streak is not NULL and is_named(self.streak, &frame):
                # The hottest lines of the bus: one more message for the same readers. Topic lookup,
                # verdict and run stay the same, so only bytes and counters change.
                copy(self.streak_out, frame.raw, frame.raw_size)
                self.streak_out += frame.raw_size
                self.streak_count += 1
                self.streak_bytes += frame.body_size
                done += frame.size
                continue
            # Any other frame ends the streak: its counters must be in before the frame is judged.
            if self.streak is not NULL:
                self.end_streak(source)
            if kind != MESSAGE and kind != FRAGMENT:
                break
            # The session must reassemble and publish the fragments first, or this message would
            # overtake the larger one at readers of other dialects.
            if kind == MESSAGE and routed.fragments is not NOTHING:
                routed.stop = STOP_FRAGMENTS
                break
            if self.accept(source, &frame, routed) == WAIT:
                routed.stop = STOP_BLOCKED
                break
            done += frame.size
        if kind == CONTROL:
            done += frame.size
            routed.stop = STOP_CONTROL
            routed.code = frame.code
            routed.topic = frame.topic[:frame.topic_size] if frame.topic_size else b""
        elif kind == BAD:
            routed.stop = STOP_BAD
            routed.code = frame.code
        routed.consumed = done
        return 0

    cdef int route_columns(
        self, Source source, bytes topic, const Py_buffer* index, const Py_buffer* view, RouteResult routed
    ) except -1:
        cdef const int32_t* offsets = <const int32_t*>index.buf
        cdef Py_ssize_t count = index.len // <Py_ssize_t>sizeof(int32_t) - 1
        cdef Py_ssize_t at
        cdef Frame frame
        for at in range(count):
            frame = message(topic, view, offsets[at], offsets[at + 1])
            if self.accept(source, &frame, routed) == WAIT:
                routed.stop = STOP_BLOCKED
                break
            routed.consumed += 1
        return 0

    cdef inline int accept(self, Source source, const Frame* frame, RouteResult routed) except -1:
        cdef Topic* topic = self.last
        # Consecutive messages usually have the same topic; its outcome holds for the whole call,
        # because the table cannot change while a buffer is routed.
        if topic is NULL or not is_named(topic, frame):
            self.last_outcome = self.admit(source, frame, routed)
            topic = self.last
        if self.last_outcome == WAIT:
            return WAIT
        source.messages += 1
        source.bytes += frame.body_size
        self.messages += 1
        self.bytes += frame.body_size
        if self.last_outcome == HEARD:
            self.relay_frame(topic, frame, routed)
        elif self.last_outcome == KEPT:
            self.collect_durable(topic, frame, routed)
        elif self.last_outcome == DENIED:
            source.denied += 1
            self.denied += 1
        else:
            source.unheard += 1
            self.unheard += 1
        return self.last_outcome

    cdef Outcome admit(self, Source source, const Frame* frame, RouteResult routed) except? WAIT:
        """Look up the topic and its verdict. Returns the outcome for its messages."""
        cdef Topic* topic = self.table.find(frame.topic, frame.topic_size)
        cdef Verdict verdict
        if topic is NULL:
            # An unknown topic has no reader. The policy is asked only if it has rules about
            # producing, because then the message counts as denied and not as unheard.
            if source.trusted or not self.has_produce_rules:
                self.last = NULL
                return UNHEARD
            # Names are chosen by publishers, so entries kept for verdicts alone must be bounded.
            if self.table.idle >= MAX_IDLE_TOPICS:
                self.table.sweep_idle()
            topic = self.table.find_or_add(frame.topic, frame.topic_size)
        self.last = topic
        verdict = ALLOW
        if not source.trusted:
            verdict = self.table.verdict(topic, source.identity, self.generation)
        if verdict == UNKNOWN:
            # May raise: then nothing of this message has been counted or routed.
            allowed = self.judge(source.identity, frame.topic[:frame.topic_size])
            verdict = ALLOW if allowed else DENY
            self.table.remember_verdict(topic, source.identity, self.generation, verdict)
        if verdict == DENY:
            return DENIED
        if topic.durable and not source.trusted:
            return KEPT
        if topic.subscribers == 0 and not topic.collect:
            return UNHEARD
        if self.full_count and self.is_blocked(topic, routed):
            self.last = NULL  # the next call must check again
            return WAIT
        return HEARD

    cdef bint is_blocked(self, const Topic* topic, RouteResult routed) except -1:
        cdef SubscriberSet* readers = &self.sets.sets[topic.subscribers]
        cdef Subscriber* reader
        cdef uint32_t at
        for at in range(readers.size):
            reader = &self.subscribers[readers.members[at]]
            if reader.full and reader.encoding != self.skip:
                routed.blocker = self.outboxes[readers.members[at]]
                return True
        return False

    cdef inline int relay_frame(self, Topic* topic, const Frame* frame, RouteResult routed) except -1:
        cdef uint32_t encodings = self.sets.sets[topic.subscribers].encodings
        # Whether the message is needed in any form but its raw frame.
        cdef bint beyond = topic.collect or (encodings & ~self.own_bit)
        cdef Run* run
        if topic.subscribers:
            # Sets are interned, so comparing numbers finds topics with the same readers.
            if self.run_count == 0 or self.runs[self.run_count - 1].subscribers != topic.subscribers:
                self.start_run(topic.subscribers)
            if encodings & self.own_bit:
                run = &self.runs[self.run_count - 1]
                self.copy_raw(frame)
                run.end = self.filled
                run.count += 1
                # A fragment starts no streak: messages within a streak are not checked
                # against fragments that wait to be put together (STOP_FRAGMENTS).
                if not beyond and frame.kind == MESSAGE:
                    self.start_streak(topic)
        if frame.kind == FRAGMENT:
            if beyond:
                self.collect_fragment(frame, routed)
            return 0
        if beyond:
            self.add_piece(topic, frame, (encodings & ~self.own_bit) != 0, topic.collect)
        topic.next_id += 1
        return 0

    cdef int collect_durable(self, Topic* topic, const Frame* frame, RouteResult routed) except -1:
        """Collect a message of a durable topic. Readers must not see it before it is committed."""
        if frame.kind == FRAGMENT:
            return self.collect_fragment(frame, routed)
        return self.add_piece(topic, frame, False, True)

    cdef int collect_fragment(self, const Frame* frame, RouteResult routed) except -1:
        """Hand a fragment to the session, which reassembles it for readers of other dialects."""
        if routed.fragments is NOTHING:
            routed.fragments = []
        # Copied, because the session keeps it longer than the receive buffer.
        body = PyBytes_FromStringAndSize(<const char*>frame.body, frame.body_size)
        routed.fragments.append((frame.topic[:frame.topic_size], body))
        return 0

    cdef inline int copy_raw(self, const Frame* frame) except -1:
        if self.out is NULL:
            # Raw frames never take more than the received bytes, so `room` always suffices.
            self.out = new_bytes(NULL, self.room)
        copy(<unsigned char*>bytes_of(self.out) + self.filled, frame.raw, frame.raw_size)
        self.filled += frame.raw_size
        return 0

    cdef inline void start_streak(self, Topic* topic) noexcept:
        """Begin a streak: further messages of this topic only need to be copied."""
        self.streak = topic
        self.streak_out = <unsigned char*>bytes_of(self.out) + self.filled
        self.streak_count = 0
        self.streak_bytes = 0

    cdef inline void end_streak(self, Source source) noexcept:
        """Add the copied messages to the run and the counters."""
        cdef Run* run = &self.runs[self.run_count - 1]
        self.filled = self.streak_out - <unsigned char*>bytes_of(self.out)
        run.end = self.filled
        run.count += self.streak_count
        self.streak.next_id += self.streak_count
        source.messages += self.streak_count
        source.bytes += self.streak_bytes
        self.messages += self.streak_count
        self.bytes += self.streak_bytes
        self.streak = NULL

    cdef int start_run(self, uint32_t subscribers) except -1:
        self.runs = <Run*>grow_if_full(self.runs, self.run_count, &self.run_capacity, sizeof(Run))
        self.runs[self.run_count] = Run(subscribers, self.filled, self.filled, 0, 0)
        self.run_count += 1
        return 0

    cdef int add_piece(self, Topic* topic, const Frame* frame, bint relayed, bint collected) except -1:
        """Record a message that is needed as a column or in another encoding."""
        cdef Collecting* column
        cdef Piece* piece
        self.pieces = <Piece*>grow_if_full(self.pieces, self.piece_count, &self.piece_capacity, sizeof(Piece))
        if collected and topic.collected < 0:
            self.collecting = <Collecting*>grow_if_full(
                self.collecting, self.collecting_count, &self.collecting_capacity, sizeof(Collecting)
            )
            self.collecting[self.collecting_count] = Collecting(topic, topic.next_id, 0, 0, NULL, NULL)
            topic.collected = self.collecting_count
            self.collecting_count += 1
        piece = &self.pieces[self.piece_count]
        piece.frame = frame[0]
        piece.run = self.run_count - 1  # used only if relayed; then there is a run
        piece.collected = topic.collected
        piece.relayed = relayed
        self.piece_count += 1
        if topic.collected >= 0:
            column = &self.collecting[topic.collected]
            column.count += 1
            column.size += frame.body_size
        return 0

    cdef int finish(self, RouteResult routed, int own) except -1:
        cdef uint32_t encodings = 0
        cdef size_t at
        cdef int number
        cdef bytes blob
        for at in range(self.run_count):
            encodings |= self.sets.sets[self.runs[at].subscribers].encodings
        if own >= 0 and encodings & self.own_bit:
            # The object is not shared yet, so resizing it in place is allowed.
            if self.filled != self.room:
                _PyBytes_Resize(&self.out, self.filled)
            self.distribute(<object>self.out, own, routed)
        encodings &= ~self.own_bit
        if self.skip >= 0:
            encodings &= ~(<uint32_t>1 << self.skip)
        while encodings:
            number = lowest_bit(encodings)
            encodings &= encodings - 1
            blob = self.encode(self.encodings[number])
            self.count_unfit(number)
            self.distribute(blob, number, routed)
        if self.collecting_count:
            self.collect(routed)
        return 0

    cdef bytes encode(self, Encoding encoding):
        """Encode all relayed messages. Sets the bounds of the runs within the returned bytes."""
        cdef Py_ssize_t size = 0
        cdef size_t at
        cdef Piece* piece
        cdef Run* run
        cdef bytes blob
        cdef unsigned char* start
        cdef unsigned char* before
        cdef unsigned char* out
        for at in range(self.run_count):
            self.runs[at].start = self.runs[at].end = 0
            self.runs[at].count = self.runs[at].unfit = 0
        # Measured first, so that the encoded messages need one allocation and no copy.
        for at in range(self.piece_count):
            if self.pieces[at].relayed:
                size += encoding.measure(&self.pieces[at].frame)
        blob = PyBytes_FromStringAndSize(NULL, size)
        start = out = <unsigned char*>PyBytes_AS_STRING(blob)
        for at in range(self.piece_count):
            piece = &self.pieces[at]
            if not piece.relayed:
                continue
            run = &self.runs[piece.run]
            if run.count == 0:
                run.start = out - start
            before = out
            out = encoding.write(&piece.frame, out)
            run.end = out - start
            # An encoding writes nothing for a message that it cannot carry.
            if out != before:
                run.count += 1
            else:
                run.unfit += 1
        return blob

    cdef void count_unfit(self, int encoding) noexcept:
        """Count the messages that this encoding could not carry, once per reader."""
        cdef SubscriberSet* readers
        cdef size_t at
        cdef uint32_t index
        for at in range(self.run_count):
            if self.runs[at].unfit:
                readers = &self.sets.sets[self.runs[at].subscribers]
                for index in range(readers.size):
                    if self.subscribers[readers.members[index]].encoding == encoding:
                        self.too_large += self.runs[at].unfit

    cdef int distribute(self, bytes blob, int encoding, RouteResult routed) except -1:
        cdef SubscriberSet* readers
        cdef uint32_t at, member
        if not blob:
            return 0
        # With one run all readers share one object: no copy per reader.
        if self.run_count != 1:
            return self.distribute_runs(blob, encoding, routed)
        readers = &self.sets.sets[self.runs[0].subscribers]
        for at in range(readers.size):
            member = readers.members[at]
            if self.subscribers[member].encoding == encoding:
                routed.outputs.append((self.outboxes[member], blob))
                self.count_delivery(member, self.runs[0].count, self.runs[0].end - self.runs[0].start)
        return 0

    cdef int distribute_runs(self, bytes blob, int encoding, RouteResult routed) except -1:
        """Distribute several runs: measure the share of each reader, then copy it."""
        cdef const unsigned char* source = <const unsigned char*>PyBytes_AS_STRING(blob)
        cdef size_t at
        cdef uint32_t index, member
        cdef SubscriberSet* readers
        cdef Subscriber* subscriber
        cdef Run* run
        cdef bytes share
        for at in range(self.run_count):
            run = &self.runs[at]
            readers = &self.sets.sets[run.subscribers]
            if run.end > run.start:
                for index in range(readers.size):
                    member = readers.members[index]
                    if self.subscribers[member].encoding == encoding:
                        self.touch(member, run.count, run.end - run.start)
        for at in range(self.touched_count):
            subscriber = &self.subscribers[self.touched[at]]
            share = PyBytes_FromStringAndSize(NULL, subscriber.pending)
            subscriber.cursor = <unsigned char*>PyBytes_AS_STRING(share)
            routed.outputs.append((self.outboxes[self.touched[at]], share))
            self.count_delivery(self.touched[at], subscriber.pending_messages, subscriber.pending)
        for at in range(self.run_count):
            run = &self.runs[at]
            readers = &self.sets.sets[run.subscribers]
            for index in range(readers.size):
                subscriber = &self.subscribers[readers.members[index]]
                if subscriber.encoding == encoding:
                    copy(subscriber.cursor, source + run.start, run.end - run.start)
                    subscriber.cursor += run.end - run.start
        # Reset here: the next encoding of the same buffer measures again.
        for at in range(self.touched_count):
            self.subscribers[self.touched[at]].pending = 0
        self.touched_count = 0
        return 0

    cdef inline int touch(self, uint32_t member, uint64_t count, Py_ssize_t size) except -1:
        cdef Subscriber* subscriber = &self.subscribers[member]
        # The first share of a reader in this pass: remember it for the later passes.
        if subscriber.pending == 0:
            subscriber.pending_messages = 0
            self.touched = <uint32_t*>grow_if_full(
                self.touched, self.touched_count, &self.touched_capacity, sizeof(uint32_t)
            )
            self.touched[self.touched_count] = member
            self.touched_count += 1
        subscriber.pending += size
        subscriber.pending_messages += count
        return 0

    cdef inline void count_delivery(self, uint32_t member, uint64_t count, Py_ssize_t size) noexcept:
        self.subscribers[member].messages += count
        self.subscribers[member].bytes += size
        self.delivered += count
        self.delivered_bytes += size

    cdef int collect(self, RouteResult routed) except -1:
        cdef size_t at
        cdef Collecting* column
        cdef Piece* piece
        routed.collected = []
        for at in range(self.collecting_count):
            self.open_column(&self.collecting[at], routed)
        for at in range(self.piece_count):
            piece = &self.pieces[at]
            if piece.collected < 0:
                continue
            column = &self.collecting[piece.collected]
            copy(column.body, piece.frame.body, piece.frame.body_size)
            column.body += piece.frame.body_size
            column.offset[1] = column.offset[0] + <int32_t>piece.frame.body_size
            column.offset += 1
        return 0

    cdef int open_column(self, Collecting* column, RouteResult routed) except -1:
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


cdef inline bint is_named(const Topic* topic, const Frame* frame) noexcept nogil:
    return topic.name_size == frame.topic_size and same(topic.name, frame.topic, frame.topic_size)


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


cdef void* grow_if_full(void* array, size_t used, size_t* capacity, size_t item) except NULL:
    """Return the array, reallocated if it is full. Raises MemoryError."""
    cdef size_t wider
    cdef void* grown
    if used < capacity[0]:
        return array
    wider = 2 * capacity[0] if capacity[0] else 64
    grown = PyMem_Realloc(array, wider * item)
    if grown is NULL:
        raise MemoryError
    capacity[0] = wider
    return grown


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
