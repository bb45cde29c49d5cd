# distutils: language = c++
"""The Flight service of the native port, without Python per batch (flight_port.h).

pyarrow's own server runs Python on gRPC's threads for every step: to receive a batch, to wait
until it is stored, to answer it. Each step competes for the GIL with the others and with the
event loop. Here the service reads, checks, holds back and answers batches without the GIL, and
`BatchQueue.pop_all` gives one Python thread all batches that arrived since its last call.

`FlightPort` calls a handler object with these methods, on gRPC's threads:

    begin_call(call) → caller                `call.caller` in the calls below; raises to refuse it.
                                             `BatchQueue.take_ended` returns it after the call
    open_put(call, path, schema) → owner     the owner of a stream's batches; raises to refuse it
    close_put(owner)
    on_malformed(text, is_too_large) → an exception
    run_action(call, type, body) → results   bytes or Arrow buffers: a list, or an iterator
    open_rows(call, ticket) → (schema, an iterator of record batches)
    actions() → pairs of name and description
    describe_error(error) → (code, text, extra)   code: one of `INTERNAL` to `FAILED`
    too_many_calls                           (code, text, extra) of calls that are refused
"""

from cpython.buffer cimport PyBUF_READ
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.limits cimport INT_MAX
from libc.stdint cimport INT64_MAX, int64_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport make_shared, shared_ptr, unique_ptr
from libcpp.string cimport string
from libcpp.utility cimport move
from libcpp.vector cimport vector

import_pyarrow()

# Values of arrow::flight::FlightStatusCode.
INTERNAL, UNAUTHENTICATED, UNAUTHORIZED, UNAVAILABLE, FAILED = 0, 3, 4, 5, 6


cdef bytes as_bytes(const shared_ptr[CBuffer]& buffer):
    if buffer.get() == NULL:
        return b""
    return PyBytes_FromStringAndSize(<const char*>buffer.get().data(), buffer.get().size())


cdef class BatchQueue:
    """The batches of all streams of a listener that wait for Python."""

    cdef shared_ptr[CBatchQueue] queue

    def __cinit__(
        self,
        int64_t max_bytes=INT64_MAX,
        int max_calls=INT_MAX,
        int64_t max_unpacked_bytes=INT64_MAX,
        int64_t max_user_unpacked_bytes=INT64_MAX,
    ):
        """Bound the queue.

        The service stops reading streams while `max_bytes` of batches are queued, and refuses
        calls beyond `max_calls` of any kind, because gRPC spends a thread on each. It unpacks
        compressed batches of at most `max_unpacked_bytes` at a time, per user of at most
        `max_user_unpacked_bytes`.
        """
        self.queue = make_shared[CBatchQueue](
            max_bytes, max_calls, max_unpacked_bytes, max_user_unpacked_bytes
        )

    def take_refused(self):
        """Return how many calls beyond `max_calls` were refused since the last time."""
        cdef int refused
        with nogil:
            refused = self.queue.get().gate.TakeRefused()
        return refused

    def take_ended(self):
        """Return the callers of calls that have ended since the last time.

        A call that ends does not wait for the interpreter's lock: its thread would stay with it.
        """
        cdef vector[void*] ended
        with nogil:
            ended = self.queue.get().gate.TakeEnded()
        callers = []
        for caller in ended:
            callers.append(<object>caller)
            Py_DECREF(<object>caller)
        return callers

    def pop_all(self):
        """Wait for batches. Returns all that are queued, or None once the queue is closed.

        The list is empty if `wake` ended the wait. Each item is (owner of the stream, pending
        batch, metadata, size); size is -1 if the batch fails Arrow's structural check.
        """
        cdef vector[ReceivedBatch] received
        cdef cbool is_open
        cdef PendingBatch pending
        with nogil:
            is_open = self.queue.get().PopAll(&received)
        if not is_open:
            return None
        batches = []
        for arrival in received:
            pending = PendingBatch.__new__(PendingBatch)
            pending.put = arrival.put
            pending.ticket = arrival.ticket
            pending.held = arrival.batch
            owner = (<tuple>arrival.put.get().owner)[1]
            batches.append((owner, pending, as_bytes(arrival.metadata), arrival.size))
        return batches

    def wake(self):
        """Make `pop_all` return."""
        with nogil:
            self.queue.get().Wake()

    def stop(self, int code, bytes text, bytes extra):
        """Refuse every further batch: it ends its stream with this error."""
        cdef Refusal refusal
        refusal.is_set = True
        refusal.code, refusal.text, refusal.extra = code, text, extra
        with nogil:
            self.queue.get().Stop(refusal)

    def wait_settled(self, double timeout_s):
        """Wait until every batch is answered. Returns False after `timeout_s`."""
        cdef cbool settled
        with nogil:
            settled = self.queue.get().WaitSettled(timeout_s)
        return settled

    def close(self):
        with nogil:
            self.queue.get().Close()

    def pending_handovers(self):
        """List writes that gRPC has not sent yet: (id, peer, start on the monotonic clock)."""
        cdef vector[shared_ptr[Handover]] pending = self.queue.get().PendingHandovers()
        return [(send.get().id, send.get().peer.decode(), send.get().since_s) for send in pending]


cdef object view(const unsigned char* data, int64_t size):
    return PyMemoryView_FromMemory(<char*>data, size, PyBUF_READ)


cdef class PendingBatch:
    """One received batch and the place of its answer."""

    cdef shared_ptr[CPutStream] put
    cdef uint64_t ticket
    cdef shared_ptr[CRecordBatch] held

    def columns(self):
        """Return (bodies, offsets, keys, key offsets, times) as views, valid until `release`.

        The last three are None if no message has one. Returns None if the batch needs more
        than that (mixed keys, headers); then use `batch`. Only for a batch with size >= 0.
        """
        cdef Columns columns
        if self.held.get() == NULL:
            return None
        columns = ColumnsOf(self.held.get()[0])
        if not columns.is_plain:
            return None
        offsets = (columns.count + 1) * 4
        keys = key_offsets = times = None
        if columns.keys != NULL:
            keys, key_offsets = view(columns.keys, columns.keys_size), view(columns.key_offsets, offsets)
        if columns.times != NULL:
            times = view(columns.times, columns.count * 8)
        bodies = view(columns.bodies, columns.bodies_size)
        return bodies, view(columns.body_offsets, offsets), keys, key_offsets, times

    def batch(self):
        """Return the batch as a pyarrow object, or None if the message had metadata only."""
        return None if self.held.get() == NULL else wrap_batch(self.held)

    def release(self):
        """Drop the reference to the batch's memory."""
        self.held.reset()


def answer_batches(list answers not None):
    """Answer pending batches: pairs of (pending batch, answer), each batch once, any thread."""
    cdef vector[BatchAnswer] batch_answers
    cdef BatchAnswer entry
    cdef PendingBatch pending
    for pending, text in answers:
        entry.put, entry.ticket, entry.text = pending.put, pending.ticket, <bytes?>text
        batch_answers.push_back(entry)
    with nogil:
        AnswerAll(batch_answers)


cdef class FlightCall:
    """The peer of a call. `is_cancelled` is True once the call has ended."""

    cdef CCall* call
    cdef readonly str peer
    cdef readonly object authorization  # the header, or None
    cdef readonly object caller  # the value that `begin_call` returned
    cdef public str user  # the name of the caller, once it is known

    cdef close(self):
        self.call = NULL

    def is_cancelled(self):
        return self.call == NULL or self.call.is_cancelled()

    def refuse(self, int code, bytes text, bytes extra):
        """End a put with this error at its next message."""
        cdef Refusal refusal
        if self.call != NULL:
            refusal.is_set = True
            refusal.code, refusal.text, refusal.extra = code, text, extra
            self.call.Refuse(refusal)


cdef FlightCall open_call(CCall* call):
    cdef FlightCall flight_call = FlightCall.__new__(FlightCall)
    flight_call.call = call
    flight_call.peer = call.peer().decode("utf-8", "replace")
    flight_call.authorization, flight_call.user = None, ""
    if call.is_authorized():
        flight_call.authorization = call.authorization().decode("utf-8", "surrogateescape")
    if call.caller() != NULL:
        flight_call.caller = <object>call.caller()
    return flight_call


# --- called by the service. These take the GIL and must not raise: C++ code is the caller.


cdef void refuse(object handler, object error, Refusal* refusal) noexcept:
    try:
        code, text, extra = handler.describe_error(error)
        refusal.code, refusal.text, refusal.extra = code, text.encode(), extra
    except BaseException:
        refusal.code, refusal.text = 0, b"the bus failed to answer"
    refusal.is_set = True


cdef void open_put(void* python, CCall* call, CPutStream* put, Refusal* refusal) noexcept with gil:
    call.LeaveInterpreterQueue()
    handler = <object>python
    cdef FlightCall flight_call = None
    try:
        flight_call = open_call(call)
        path = put.path
        owner = (flight_call, handler.open_put(flight_call, path, wrap_schema(put.schema)))
        put.user = flight_call.user.encode("utf-8", "surrogateescape")
        Py_INCREF(owner)
        put.owner = <void*>owner
    except BaseException as error:
        refuse(handler, error, refusal)
        if flight_call is not None:
            flight_call.close()


cdef void close_put(void* python, CPutStream* put) noexcept with gil:
    call, owner = <tuple>put.owner
    Py_DECREF(<object>put.owner)
    (<FlightCall>call).close()
    try:
        (<object>python).close_put(owner)
    except BaseException:
        pass


cdef void* begin_call(void* python, CCall* call, Refusal* refusal) noexcept with gil:
    handler = <object>python
    cdef FlightCall flight_call = None
    try:
        flight_call = open_call(call)
        caller = handler.begin_call(flight_call)
        Py_INCREF(caller)
        return <void*>caller
    except BaseException as error:
        refuse(handler, error, refusal)
    finally:
        if flight_call is not None:
            flight_call.close()
    return NULL


cdef void on_malformed(
    void* python, const string& text, cbool is_too_large, Refusal* refusal
) noexcept with gil:
    handler = <object>python
    try:
        error = handler.on_malformed(text.decode("utf-8", "replace"), is_too_large)
        refuse(handler, error, refusal)
    except BaseException as error:
        refuse(handler, error, refusal)


cdef void run_action(
    void* python,
    CCall* call,
    const string& kind,
    const shared_ptr[CBuffer]& body,
    vector[shared_ptr[CBuffer]]* results,
    void** more,
    Refusal* refusal,
) noexcept with gil:
    call.LeaveInterpreterQueue()
    handler = <object>python
    cdef FlightCall flight_call = None
    try:
        flight_call = open_call(call)
        name = kind.decode("utf-8", "replace")
        encoded = handler.run_action(flight_call, name, as_bytes(body))
        if not isinstance(encoded, list):
            # A stream of results: the service asks for one after the other, until `close_get`.
            stream = (flight_call, iter(encoded))
            Py_INCREF(stream)
            more[0] = <void*>stream
            return
        for result in encoded:
            results.push_back(as_buffer(result))
    except BaseException as error:
        refuse(handler, error, refusal)
    if flight_call is not None:
        flight_call.close()


cdef void next_result(
    void* python, void* more, shared_ptr[CBuffer]* result, Refusal* refusal
) noexcept with gil:
    try:
        encoded = next((<tuple>more)[1], None)
        if encoded is not None:
            result[0] = as_buffer(encoded)
    except BaseException as error:
        refuse(<object>python, error, refusal)


cdef shared_ptr[CBuffer] as_buffer(object data) except *:
    cdef string text
    if isinstance(data, bytes):
        text = data
        return CBuffer.FromString(move(text))
    return unwrap_buffer(data).ValueUnsafe()


cdef void* open_get(
    void* python, CCall* call, const string& ticket, shared_ptr[CSchema]* schema, Refusal* refusal
) noexcept with gil:
    call.LeaveInterpreterQueue()
    handler = <object>python
    cdef FlightCall flight_call = None
    cdef bytes raw_ticket
    try:
        flight_call, raw_ticket = open_call(call), ticket
        columns, batches = handler.open_rows(flight_call, raw_ticket)
        schema[0] = unwrap_schema(columns).ValueUnsafe()
        rows = (flight_call, iter(batches))
        Py_INCREF(rows)
        return <void*>rows
    except BaseException as error:
        refuse(handler, error, refusal)
        if flight_call is not None:
            flight_call.close()
    return NULL


cdef void next_rows(
    void* python, void* rows, shared_ptr[CRecordBatch]* batch, Refusal* refusal
) noexcept with gil:
    try:
        record_batch = next((<tuple>rows)[1], None)
        batch[0] = shared_ptr[CRecordBatch]()
        if record_batch is not None:
            batch[0] = unwrap_batch(record_batch).ValueUnsafe()
    except BaseException as error:
        refuse(<object>python, error, refusal)


cdef void close_get(void* python, void* rows) noexcept with gil:
    call, iterator = <tuple>rows
    Py_DECREF(<object>rows)
    (<FlightCall>call).close()
    try:
        iterator.close()
    except BaseException:
        pass


cdef void list_actions(void* python, vector[CActionType]* actions) noexcept with gil:
    cdef CActionType action
    try:
        for name, meaning in (<object>python).actions():
            action.type, action.description = name.encode(), meaning.encode()
            actions.push_back(action)
    except BaseException:
        pass


cdef Refusal refusal_of(object status):
    cdef Refusal refusal
    code, text, extra = status
    refusal.is_set = True
    refusal.code, refusal.text, refusal.extra = code, text.encode(), extra
    return refusal


cdef class FlightPort:
    """A Flight service that listens at a location until `shutdown`."""

    cdef unique_ptr[CService] service
    cdef object handler

    def __init__(
        self,
        str location,
        object handler,
        BatchQueue queue not None,
        object rows_schema,
        int max_batches,
        int64_t max_bytes,
        *,
        int max_message_bytes=INT_MAX,
        int max_streams=INT_MAX,
    ):
        """Listen, without encryption. Raises OSError if that fails.

        gRPC refuses messages beyond `max_message_bytes` and streams of a connection beyond
        `max_streams`, if it `is_bounded`.
        """
        self.handler = handler
        cdef Hooks hooks
        hooks.python = <void*>handler
        hooks.open_put, hooks.close_put, hooks.on_malformed = open_put, close_put, on_malformed
        hooks.run_action, hooks.next_result = run_action, next_result
        hooks.list_actions = list_actions
        hooks.too_many_calls = refusal_of(handler.too_many_calls)
        hooks.begin_call = begin_call
        hooks.open_get, hooks.next_rows, hooks.close_get = open_get, next_rows, close_get
        cdef shared_ptr[CSchema] schema = unwrap_schema(rows_schema).ValueUnsafe()
        self.service.reset(new CService(queue.queue, hooks, schema, max_batches, max_bytes))
        cdef CResult[CLocation] parsed = CLocation.Parse(location.encode())
        check(parsed.status())
        cdef unique_ptr[COptions] options
        options.reset(new COptions(parsed.ValueUnsafe()))
        cdef GrpcBounds bounds
        bounds.max_message_bytes, bounds.max_streams = max_message_bytes, max_streams
        cdef CStatus status
        with nogil:
            status = self.service.get().Open(options.get()[0], bounds)
        check(status)

    @property
    def is_bounded(self):
        """Whether gRPC has taken the bounds (kernel/grpc_bounds.h)."""
        return self.service.get().is_bounded()

    @property
    def port(self):
        """The port of a TCP location."""
        return self.service.get().port()

    def shutdown(self):
        """Stop listening. Returns when all calls have ended."""
        with nogil:
            self.service.get().Shutdown()
            self.service.get().Wait()


cdef check(const CStatus& status):
    if not (<CStatus>status).ok():
        raise OSError((<CStatus>status).ToString().decode("utf-8", "replace"))
