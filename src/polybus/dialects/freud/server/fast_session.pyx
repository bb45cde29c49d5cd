"""One Freud request, answered without Python: the dialect's half of the short path.

A connection that has nothing else under way, and has sent exactly one request, is
answered here if it is a Produce or a Get that dialects/freud/server/ephemeral_topic can carry out. All
else goes to `receive_groups`, the long path in dialects/freud/server/session.py: several
requests (which it serves together), anything malformed, anything but Ok.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint32_t, uint64_t

from polybus.dialects.freud.server.ephemeral_topic cimport ShortPath
from polybus.kernel.byte_order cimport load_length, load_u32, store_u32, store_u64
from polybus.dialects.freud.server.unread_queue cimport Range, Unread

cdef extern from "bytes_inline.h":
    void copy "polybus_copy"(unsigned char* out, const unsigned char* source, size_t size) noexcept nogil
    bint same "polybus_same"(const unsigned char* a, const unsigned char* b, size_t size) noexcept nogil

cdef enum:
    HEADER = 8  # type or code 4, length 4
    NAME_LENGTH = 4
    SUBSCRIBER_ID = 16
    GET_PAYLOAD = 20  # subscriber id 16, max_blocking 4
    MESSAGE_ID = 8
    RECORD_HEADER = 20  # message id 8, timestamp 8, flags 4
    PRODUCE = 4
    GET_MESSAGE = 5
    GET_RECORD = 8
    OK = 0
    NOTICE_SIZE = 15

cdef const unsigned char* NOTICE = b"\0FREUD\0DELETED\0"


cdef class ShortSession:
    """A session's state, as far as the short path must look at it; the session does the rest."""

    cdef public bint _blocked, _resting, _hung_up, _finished, _gone, _closing
    cdef public object _waiting_on, _todo, _answers, _pipe
    cdef public Py_ssize_t _unsettled  # requests that are carried out and not answered
    # Messages taken from the client, and given to it, on either path.
    cdef public uint64_t received_messages, received_bytes, sent_messages, sent_bytes
    cdef ShortPath path
    cdef object source, account
    cdef Py_ssize_t max_frame_bytes

    def __cinit__(self, *args, **kwargs):
        self._todo = self._answers = self._pipe = None

    def take_short_path(self, ShortPath path not None, source, account, Py_ssize_t max_frame_bytes):
        """From now on; `account` is whose subscriptions the caller may read."""
        self.path = path
        self.source = source
        self.account = account
        self.max_frame_bytes = max_frame_bytes

    def receive(self, buffer, Py_ssize_t start, Py_ssize_t end):
        """As transports/stream_session.py has it."""
        if self.is_idle() and self.serve(buffer, start, end):
            return end - start
        return self.receive_groups(buffer, start, end)

    cdef bint is_idle(self) except -1:
        """Nothing stands in the way, and nothing is left of earlier requests."""
        if self._blocked or self._resting or self._closing or self._unsettled:
            return False
        if self._hung_up or self._finished or self._gone:
            return False
        if self.path is None or self._waiting_on is not None or self._todo:
            return False
        return not self._answers.stalled

    cdef bint serve(self, buffer, Py_ssize_t start, Py_ssize_t end) except -1:
        """Answers the one request there is; False, with nothing done, if it is not for us."""
        cdef Py_buffer view
        PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
        try:
            if not 0 <= start <= end <= view.len:
                raise ValueError("start and end must lie within the buffer")
            return self.request(<const unsigned char*>view.buf + start, end - start)
        finally:
            PyBuffer_Release(&view)

    cdef bint request(self, const unsigned char* at, Py_ssize_t size) except -1:
        cdef int64_t length
        cdef uint32_t kind
        if size < HEADER:
            return False
        kind = load_u32(at)
        length = load_length(at + 4)
        if length != size - HEADER or length > self.max_frame_bytes:
            return False
        if kind == PRODUCE:
            return self.produce(at + HEADER, <Py_ssize_t>length)
        if (kind == GET_MESSAGE or kind == GET_RECORD) and length == GET_PAYLOAD:
            return self.get(at + HEADER, kind == GET_RECORD)
        return False

    cdef bint produce(self, const unsigned char* at, Py_ssize_t length) except -1:
        cdef int64_t name_size
        cdef uint64_t message_id
        cdef Py_ssize_t size
        cdef bytes answer
        if length < NAME_LENGTH:
            return False
        name_size = load_length(at)
        if name_size > length - NAME_LENGTH:
            return False
        at += NAME_LENGTH
        size = <Py_ssize_t>(length - NAME_LENGTH - name_size)
        if size >= NOTICE_SIZE and same(at + name_size, NOTICE, NOTICE_SIZE):
            return False
        # Of a topic that exists, so its name breaks no rule.
        if not self.path.produce(self.source, at[:name_size], at + name_size, size, &message_id):
            return False
        self.received_messages += 1
        self.received_bytes += <uint64_t>size
        answer = PyBytes_FromStringAndSize(NULL, HEADER + MESSAGE_ID)
        store_u64(header(answer, MESSAGE_ID), message_id)
        self._pipe.write(answer)
        return True

    cdef bint get(self, const unsigned char* at, bint record) except -1:
        cdef Unread reader = self.path.reader(self.account, at[:SUBSCRIBER_ID])
        cdef Range taken
        cdef bytes answer
        if reader is None:
            return False
        taken = reader.take(1, 0)
        answer = answer_of(taken, record)
        self._pipe.write(answer)
        if self._answers.stalled or self._pipe.has_failed():
            self._answers.add_written(len(answer), reader, taken, records=record)
        else:
            self.path.confirm(reader, taken)
            self.sent_messages += 1
            self.sent_bytes += <uint64_t>taken.body_bytes()
        return True


cdef unsigned char* header(bytes answer, Py_ssize_t length) noexcept:
    cdef unsigned char* out = <unsigned char*>PyBytes_AS_STRING(answer)
    return store_u32(store_u32(out, OK), <uint32_t>length)


cdef bytes answer_of(Range taken, bint record):
    """The answer that hands out one message."""
    cdef Py_ssize_t size = <Py_ssize_t>taken.body_bytes()
    cdef Py_ssize_t length = size + (RECORD_HEADER if record else 0)
    cdef bytes answer = PyBytes_FromStringAndSize(NULL, HEADER + length)
    cdef unsigned char* out = header(answer, length)
    if record:
        out = store_u64(out, taken.id())
        out = store_u64(out, (<const uint64_t*>taken.chunk.times.data.as_voidptr)[taken.start])
        out = store_u32(out, 0)
    copy(out, taken.chunk.body() + taken.chunk.places()[taken.start], size)
    return answer
