"""The requests of one Freud connection, executed one after another.

The scanner makes runs of like requests from a received buffer; one request alone is a run of
one. The session executes them in order until something halts it (`Halt` in session.py) or the
client does not read its answers. A plain Produce (plain_delivery.pyx) and a Get that has a message
are executed here, without Python; all other requests are `execute_other`'s, which finds
them as if they had not been looked at.
"""
from cpython.bytes cimport PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint64_t

from polybus.dialects.freud.server.answer_encoder cimport encode_produced
from polybus.dialects.freud.server.answer_queue cimport AnswerQueue
from polybus.dialects.freud.server.plain_delivery cimport PlainDelivery
from polybus.dialects.freud.server.request_scanner cimport GetRun, ProduceRun, RequestScanner, ScanResult
from polybus.dialects.freud.server.unread_queue cimport Range, UnreadQueue
from polybus.kernel.fanout cimport Source

from polybus.dialects.freud.server import fair_scheduler
from polybus.dialects.freud.server.answer_encoder import encode_answers

# The states that are tested here. Phase and Halt in session.py take their values from these.
cdef enum:
    PHASE_OPEN = 0
    PHASE_CLOSING = 3
    PHASE_ENDING = 4
    PHASE_DEPARTED = 5
    HALT_NONE = 0
    HALT_RESTING = 4

OPEN, CLOSING, ENDING, DEPARTED = PHASE_OPEN, PHASE_CLOSING, PHASE_ENDING, PHASE_DEPARTED
NOT_HALTED, RESTING = HALT_NONE, HALT_RESTING

cdef enum:
    STEP = 131072
    UNSCANNED = 65536

STEP_BYTES = STEP  # answers are written once this many are gathered: far fewer writes than requests
# Bytes that a client may send after a waiting Get before the session stops reading.
MAX_UNSCANNED_BYTES = UNSCANNED

cdef int64_t request_weight = fair_scheduler.REQUEST_WEIGHT
cdef int64_t plain_weight = fair_scheduler.PLAIN_WEIGHT
cdef int64_t reader_weight = fair_scheduler.READER_WEIGHT
cdef int64_t bytes_per_weight = fair_scheduler.BYTES_PER_WEIGHT


cdef class PlainSession:
    cdef public int phase, halt
    cdef public list pending  # runs that were scanned and not executed; the next one is the last
    cdef public int64_t weight_left
    cdef public Py_ssize_t uncommitted  # Produces that wait for their commit
    cdef readonly AnswerQueue answers
    cdef readonly object pipe
    cdef public uint64_t received_messages, received_bytes
    cdef RequestScanner scanner
    cdef PlainDelivery delivery
    cdef Source source
    cdef object account

    def __init__(
        self,
        pipe,
        RequestScanner scanner not None,
        PlainDelivery delivery not None,
        AnswerQueue answers not None,
        Source source not None,
        account,
    ):
        """`account` owns the subscriptions that the client may read."""
        self.pipe = pipe
        self.scanner = scanner
        self.delivery = delivery
        self.answers = answers
        self.source = source
        self.account = account
        self.pending = []
        self.weight_left = fair_scheduler.TURN_WEIGHT

    def receive(self, buffer, Py_ssize_t start, Py_ssize_t end):
        """Execute the requests in buffer[start:end]. Returns the number of bytes consumed."""
        cdef Py_ssize_t at = start
        cdef ScanResult scanned
        while not self.pending and not self.has_halted() and not self.has_closed():
            scanned = self.scanner.scan(buffer, at, end)
            at += scanned.consumed
            scanned.groups.reverse()
            self.pending = scanned.groups
            self.execute_pending()
            if not scanned.more:
                return at - start
        if self.has_closed():
            return end - start  # the rest is discarded
        if end - at > UNSCANNED:
            (<object>self).stop_reading()
        return at - start

    @property
    def is_halted(self):
        return self.has_halted()

    @property
    def is_closed(self):
        """True if no further request is executed."""
        return self.has_closed()

    cdef bint has_halted(self) noexcept:
        return self.answers.stalled or self.halt != HALT_NONE

    cdef bint has_closed(self) noexcept:
        return self.phase == PHASE_CLOSING or self.phase == PHASE_DEPARTED

    def run(self):
        """Execute pending requests until something halts the session, and write the answers."""
        self.execute_pending()

    cdef int execute_pending(self) except -1:
        while self.pending and not self.has_halted() and not self.has_closed():
            if self.weight_left <= 0:
                self.halt = HALT_RESTING
                (<object>self).rest()
                break
            if self.execute(self.pending[len(self.pending) - 1]):
                self.pending.pop()
            if self.answers.size >= STEP:
                self.answers.flush()
        if not self.has_closed():
            self.answers.flush()
        return 0

    cdef bint execute(self, object run) except -1:
        """Execute a run of requests. Returns False if some of it is still to be done."""
        cdef UnreadQueue reader
        # Everything but a durable Produce must see the effect of earlier Produces.
        if not self.uncommitted:
            if type(run) is ProduceRun:
                if self.produce(<ProduceRun>run):
                    return True
            elif type(run) is GetRun:
                if not (<GetRun>run).unanswered:
                    return True
                reader = self.find_unread(<GetRun>run)
                if reader is not None:
                    return self.read_messages(<GetRun>run, reader)
        self.weight_left -= request_weight
        return (<object>self).execute_other(run)

    # --- Produce

    cdef bint produce(self, ProduceRun run) except -1:
        cdef uint64_t first_id
        cdef Py_ssize_t readers = self.delivery.produce(self.source, run, &first_id)
        if not readers:
            return False
        self.weight_left -= plain_weight + reader_weight * readers
        self.accept(run, first_id)
        return True

    cdef int accept(self, ProduceRun run, uint64_t first_id) except -1:
        self.count(run)
        self.answers.add(encode_produced(first_id, run.count))
        return 0

    cdef void count(self, ProduceRun run) noexcept:
        self.received_messages += <uint64_t>run.count
        self.received_bytes += <uint64_t>PyBytes_GET_SIZE(run.bodies)

    def answer_produced(self, ProduceRun run not None, uint64_t first_id):
        """Count and answer a run that was accepted."""
        self.accept(run, first_id)

    def count_received(self, ProduceRun run not None):
        self.count(run)

    # --- Get

    cdef UnreadQueue find_unread(self, GetRun run):
        """Return the subscription if its messages can be read without Python."""
        cdef UnreadQueue reader
        # The Gets of a client that is gone are skipped.
        if self.phase < PHASE_ENDING:
            reader = self.delivery.find_reader(self.account, run.subscriber)
            # The first use of a detached subscription attaches it.
            if reader is not None and reader.is_owned and reader.ranges:
                return reader
        return None

    cdef bint read_messages(self, GetRun run, UnreadQueue reader) except -1:
        while run.unanswered and reader.ranges and self.weight_left > 0 and not self.answers.stalled:
            self.weight_left -= self.take_messages(run, reader, run.unanswered)
            if self.answers.size >= STEP:
                self.answers.flush()
        return not run.unanswered

    cdef int64_t take_messages(self, GetRun run, UnreadQueue reader, Py_ssize_t most) except -1:
        cdef Range taken = reader.take(most, STEP, not run.records)
        cdef Py_ssize_t size
        if taken is None:
            return 0
        run.unanswered -= taken.end - taken.start
        size = self.answers.add_messages(reader, taken, run.records)
        if taken.chunk.notice:
            self.answers.flush()  # sending the notice ends the subscription, so send it now
        return plain_weight + size // bytes_per_weight

    def read(self, GetRun run not None, UnreadQueue reader not None):
        """Answer with the messages of a reader. Returns False if Gets are left unanswered."""
        return self.read_messages(run, reader)

    def answer_messages(self, GetRun run not None, UnreadQueue reader not None, Py_ssize_t most):
        """Answer up to `most` Gets with the next messages. Returns their weight, 0 if there are none."""
        return self.take_messages(run, reader, most)

    def answer_gets(self, GetRun run not None, int code, Py_ssize_t count):
        """Answer `count` Gets with a code alone."""
        self.answers.add(encode_answers(code, count))
        run.unanswered -= count
