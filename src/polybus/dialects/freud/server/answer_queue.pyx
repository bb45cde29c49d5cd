"""Answers of a Freud connection: in the order of the requests, consumed when they are sent.

`AnswerQueue` gathers answers while requests are executed and writes them together. A
message counts as consumed when its whole answer is in the socket. If the socket accepts
only a part, the messages in that part are confirmed at once; the others are confirmed when
the socket has drained, or given back if the connection ends before.
"""
cimport cython
from libc.stdint cimport int32_t, uint64_t

from polybus.dialects.freud.server.answer_encoder cimport encode_columns
from polybus.dialects.freud.server.plain_delivery cimport MessageCounts
from polybus.dialects.freud.server.unread_queue cimport Chunk, Range, UnreadQueue, new_range

from polybus.dialects.freud.codec import NOTICE_FLAG, Code, escaped_body
from polybus.dialects.freud.server.answer_encoder import encode_answers

cdef enum:
    ANSWER_HEADER = 8
    RECORD_HEADER = 20


@cython.final
@cython.freelist(64)
cdef class WrittenMessages:
    """Messages within written answers: their offset, and the header bytes of each."""

    cdef UnreadQueue reader
    cdef Range taken
    cdef Py_ssize_t start
    cdef Py_ssize_t header_bytes


cdef WrittenMessages written_messages(
    UnreadQueue reader, Range taken, Py_ssize_t start, Py_ssize_t header_bytes
):
    cdef WrittenMessages written = WrittenMessages.__new__(WrittenMessages)
    written.reader = reader
    written.taken = taken
    written.start = start
    written.header_bytes = header_bytes
    return written


@cython.final
cdef class AnswerQueue:
    """`readers` (pull_reader.py) gets back what was not sent, and ends those that read a notice."""

    def __init__(self, pipe, readers, MessageCounts counts not None):
        self.pipe = pipe
        self.readers = readers
        self.counts = counts
        self.parts = []
        self.unconfirmed = []

    @property
    def unsent_bytes(self):
        """Bytes of answers that the client has not read."""
        return self.size + (self.pipe.backlog_bytes() if self.stalled else 0)

    cpdef add(self, bytes answer):
        if self.discarding:
            return
        self.parts.append(answer)
        self.size += len(answer)

    cdef Py_ssize_t add_messages(self, UnreadQueue reader, Range taken, bint records) except -1:
        """Add the answers that carry messages of a reader. Returns their bytes."""
        cdef Chunk chunk = taken.chunk
        cdef const int32_t* places = chunk.places()
        cdef Py_ssize_t header_bytes = ANSWER_HEADER
        cdef bytes data, body
        if records:
            header_bytes += RECORD_HEADER
            data = encode_columns(
                <const unsigned char*>places,
                chunk.body(),
                <const unsigned char*>chunk.times.data.as_voidptr,
                chunk.first_id,
                <int>NOTICE_FLAG if chunk.notice else 0,
                taken.start,
                taken.end - taken.start,
            )
        elif not chunk.notice and taken.is_reserved(taken.start):
            # `take` returns such a message alone.
            body = (chunk.body() + places[taken.start])[: taken.body_bytes()]
            payload = escaped_body(body)
            header_bytes += len(payload) - len(body)
            data = encode_answers(Code.OK, 1, payload)
        else:
            data = encode_columns(
                <const unsigned char*>places,
                chunk.body(),
                NULL,
                0,
                0,
                taken.start,
                taken.end - taken.start,
            )
        self.unconfirmed.append(written_messages(reader, taken, self.size, header_bytes))
        self.add(data)
        return len(data)

    cpdef flush(self):
        """Write the gathered answers, and confirm the messages that the socket accepted."""
        cdef Py_ssize_t size = self.size
        cdef bytes data
        if not self.parts:
            return
        data = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        self.parts = []
        self.size = 0
        self.pipe.write(data)
        if not self.unconfirmed:
            return
        if self.pipe.has_failed():
            self.return_unsent()
        elif self.stalled:
            self.confirm_until(size - self.pipe.backlog_bytes())
        else:
            self.confirm_all()

    def on_drained(self):
        """Confirm all messages: the socket accepted everything."""
        self.stalled = False
        self.confirm_all()

    def discard(self):
        """Discard all answers, present and later ones: the connection has ended."""
        self.discarding = True
        self.stalled = False
        self.parts = []
        self.return_unsent()

    cdef int return_unsent(self) except -1:
        """Give back the messages that did not reach the socket."""
        cdef list unconfirmed = self.unconfirmed
        cdef WrittenMessages written
        self.unconfirmed = []
        self.readers.give_back([(written.reader, written.taken) for written in unconfirmed])
        return 0

    cdef int confirm_all(self) except -1:
        cdef list unconfirmed = self.unconfirmed
        cdef WrittenMessages written
        # First: the end of a reader may come back to this queue.
        self.unconfirmed = []
        for written in unconfirmed:
            self.confirm(written.reader, written.taken)
        return 0

    cdef int confirm(self, UnreadQueue reader, Range taken) except -1:
        """Count the messages as consumed: they are in the reader's socket."""
        cdef uint64_t count = <uint64_t>(taken.end - taken.start)
        cdef uint64_t size = <uint64_t>taken.body_bytes()
        self.sent_messages += count
        self.sent_bytes += size
        if reader.gone:
            return 0
        reader.confirm(taken)
        self.counts.delivered += count
        self.counts.delivered_bytes += size
        if taken.chunk.notice:
            self.readers.end(reader, "deleted")
        return 0

    cdef int confirm_until(self, Py_ssize_t sent) except -1:
        """Confirm the messages that lie wholly within the first `sent` bytes."""
        cdef list unconfirmed = self.unconfirmed
        cdef WrittenMessages written
        cdef Range taken
        cdef const int32_t* places
        cdef Py_ssize_t end, place
        self.unconfirmed = []
        for written in unconfirmed:
            taken = written.taken
            places = taken.chunk.places()
            end = written.start
            place = taken.start
            while place < taken.end:
                end += written.header_bytes + places[place + 1] - places[place]
                if end > sent:
                    break
                place += 1
            if place < taken.end:
                rest = new_range(taken.chunk, place, taken.end)
                self.unconfirmed.append(
                    written_messages(written.reader, rest, written.start, written.header_bytes)
                )
            if place > taken.start:
                self.confirm(written.reader, new_range(taken.chunk, taken.start, place))
        return 0
