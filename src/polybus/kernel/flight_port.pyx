# distutils: language = c++
"""The native port's Flight service, so far as it needs no Python (flight_port.h).

pyarrow's own server runs Python on gRPC's threads for everything: for a batch that comes in, for
waiting until it is stored, for its answer. Each of these steps then waits for the interpreter's
lock with all the others, and with the event loop. Here batches are read, checked, held back and
answered without it, and `Desk.take` gives one thread of Python all that have come meanwhile.

`Port` calls an object with these methods, on gRPC's threads:

    open_put(call, path, schema) → owner     who takes the batches of a stream; raises to refuse it
    close_put(owner)
    malformed(text) → an exception
    crowded() → an exception                 there are too many calls
    act(call, type, body) → results          bytes or buffers of Arrow: a list, or an iterator
    end_act()                                gRPC has taken the last of them
    rows(call, ticket) → an iterator of record batches
    actions() → pairs of name and meaning
    refusal(error) → (code, text, extra)     code: one of `INTERNAL` to `FAILED`
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

# Of arrow::flight::FlightStatusCode.
INTERNAL, UNAUTHENTICATED, UNAUTHORIZED, UNAVAILABLE, FAILED = 0, 3, 4, 5, 6


cdef bytes as_bytes(const shared_ptr[CBuffer]& buffer):
    if buffer.get() == NULL:
        return b""
    return PyBytes_FromStringAndSize(<const char*>buffer.get().data(), buffer.get().size())


cdef class Desk:
    """What has come in on all streams of a listener, and waits for Python."""

    cdef shared_ptr[CDesk] desk

    def __cinit__(self, int64_t max_bytes=INT64_MAX, int max_calls=INT_MAX):
        """Streams are read no further while batches of so many bytes lie there. More calls than
        that are refused, whatever they are: each has a thread."""
        self.desk = make_shared[CDesk](max_bytes, max_calls)

    def take(self):
        """Waits; all that lies there (after a nudge, maybe nothing); None once it is closed.

        Each is (owner of its stream, slot, metadata, size); the size is -1 if the batch's structure
        is not what it says.
        """
        cdef vector[Arrival] arrivals
        cdef cbool is_open
        cdef Slot slot
        with nogil:
            is_open = self.desk.get().Take(&arrivals)
        if not is_open:
            return None
        found = []
        for arrival in arrivals:
            slot = Slot.__new__(Slot)
            slot.put = arrival.put
            slot.ticket = arrival.ticket
            slot.held = arrival.batch
            owner = (<tuple>arrival.put.get().owner)[1]
            found.append((owner, slot, as_bytes(arrival.metadata), arrival.size))
        return found

    def nudge(self):
        """Lets `take` return."""
        with nogil:
            self.desk.get().Nudge()

    def stop(self, int code, bytes text, bytes extra):
        """Every further batch ends its stream with this refusal."""
        cdef Refusal refusal
        refusal.is_set = True
        refusal.code, refusal.text, refusal.extra = code, text, extra
        with nogil:
            self.desk.get().Stop(refusal)

    def wait_settled(self, double timeout_s):
        """Until every batch is answered; False if that takes too long."""
        cdef cbool settled
        with nogil:
            settled = self.desk.get().WaitSettled(timeout_s)
        return settled

    def close(self):
        with nogil:
            self.desk.get().Close()

    def under_way(self):
        """What gRPC has and has not passed on: (id, peer, since when on the monotonic clock)."""
        cdef vector[shared_ptr[Handing]] found = self.desk.get().UnderWay()
        return [(one.get().id, one.get().peer.decode(), one.get().since_s) for one in found]


cdef object view(const unsigned char* data, int64_t size):
    return PyMemoryView_FromMemory(<char*>data, size, PyBUF_READ)


cdef class Slot:
    """One batch, and where the answer to it goes."""

    cdef shared_ptr[CPut] put
    cdef uint64_t ticket
    cdef shared_ptr[CRecordBatch] held

    def columns(self):
        """(bodies, offsets, keys, key offsets, times): views of the batch, until `let_go`.

        The last three are None where no message has one. None if it is not as simple as that:
        then `batch` has it. Only for a batch whose structure is what it says.
        """
        cdef Columns found
        if self.held.get() == NULL:
            return None
        found = ColumnsOf(self.held.get()[0])
        if not found.is_plain:
            return None
        offsets = (found.count + 1) * 4
        keys = key_offsets = times = None
        if found.keys != NULL:
            keys, key_offsets = view(found.keys, found.keys_size), view(found.key_offsets, offsets)
        if found.times != NULL:
            times = view(found.times, found.count * 8)
        bodies = view(found.bodies, found.bodies_size)
        return bodies, view(found.body_offsets, offsets), keys, key_offsets, times

    def batch(self):
        """The batch as pyarrow's; None if there is none."""
        return None if self.held.get() == NULL else wrap_batch(self.held)

    def let_go(self):
        """Of the batch's memory."""
        self.held.reset()


def fill(list answers not None):
    """Pairs of a slot and its answer: each slot once, from any thread."""
    cdef vector[Filling] filled
    cdef Filling one
    cdef Slot slot
    for slot, answer in answers:
        one.put, one.ticket, one.text = slot.put, slot.ticket, <bytes?>answer
        filled.push_back(one)
    with nogil:
        FillAll(filled)


cdef class Call:
    """Who is on the other side; knows nothing any more when the call has ended."""

    cdef CCall* call
    cdef readonly str peer
    cdef readonly bytes identity  # of a client's certificate; empty without one
    cdef readonly object authorization  # the header, or None

    cdef close(self):
        self.call = NULL

    def is_cancelled(self):
        return self.call == NULL or self.call.is_cancelled()


cdef Call open_call(CCall* call):
    cdef Call made = Call.__new__(Call)
    made.call = call
    made.peer = call.peer().decode("utf-8", "replace")
    made.identity = call.identity()
    made.authorization = None
    if call.is_authorized():
        made.authorization = call.authorization().decode("utf-8", "surrogateescape")
    return made


# --- what the service calls: with the interpreter's lock, and nothing may be raised


cdef void refuse(object handler, object error, Refusal* refusal) noexcept:
    try:
        code, text, extra = handler.refusal(error)
        refusal.code, refusal.text, refusal.extra = code, text.encode(), extra
    except BaseException:
        refusal.code, refusal.text = 0, b"the bus failed to answer"
    refusal.is_set = True


cdef void open_put(void* python, CCall* call, CPut* put, Refusal* refusal) noexcept with gil:
    handler = <object>python
    cdef Call given = None
    try:
        given = open_call(call)
        path = put.path
        owner = (given, handler.open_put(given, path, wrap_schema(put.schema)))
        Py_INCREF(owner)
        put.owner = <void*>owner
    except BaseException as error:
        refuse(handler, error, refusal)
        if given is not None:
            given.close()


cdef void close_put(void* python, CPut* put) noexcept with gil:
    call, owner = <tuple>put.owner
    Py_DECREF(<object>put.owner)
    (<Call>call).close()
    try:
        (<object>python).close_put(owner)
    except BaseException:
        pass


cdef void crowded(void* python, Refusal* refusal) noexcept with gil:
    handler = <object>python
    try:
        refuse(handler, handler.crowded(), refusal)
    except BaseException as error:
        refuse(handler, error, refusal)


cdef void malformed(void* python, const string& text, Refusal* refusal) noexcept with gil:
    handler = <object>python
    try:
        refuse(handler, handler.malformed(text.decode("utf-8", "replace")), refusal)
    except BaseException as error:
        refuse(handler, error, refusal)


cdef void act(
    void* python,
    CCall* call,
    const string& kind,
    const shared_ptr[CBuffer]& body,
    vector[shared_ptr[CBuffer]]* results,
    void** more,
    Refusal* refusal,
) noexcept with gil:
    handler = <object>python
    cdef Call given = None
    try:
        given = open_call(call)
        found = handler.act(given, kind.decode("utf-8", "replace"), as_bytes(body))
        if not isinstance(found, list):
            rows = (given, iter(found))
            Py_INCREF(rows)
            more[0] = <void*>rows
            return
        for result in found:
            results.push_back(as_buffer(result))
    except BaseException as error:
        refuse(handler, error, refusal)
    if given is not None:
        given.close()


cdef void next_result(
    void* python, void* more, shared_ptr[CBuffer]* result, Refusal* refusal
) noexcept with gil:
    try:
        found = next((<tuple>more)[1], None)
        if found is not None:
            result[0] = as_buffer(found)
    except BaseException as error:
        refuse(<object>python, error, refusal)


cdef shared_ptr[CBuffer] as_buffer(object given) except *:
    cdef string text
    if isinstance(given, bytes):
        text = given
        return CBuffer.FromString(move(text))
    return unwrap_buffer(given).ValueUnsafe()


cdef void end_act(void* python) noexcept with gil:
    try:
        (<object>python).end_act()
    except BaseException:
        pass


cdef void* open_get(
    void* python, CCall* call, const string& ticket, shared_ptr[CSchema]* schema, Refusal* refusal
) noexcept with gil:
    handler = <object>python
    cdef Call given = None
    cdef bytes wanted
    try:
        given, wanted = open_call(call), ticket
        columns, found = handler.rows(given, wanted)
        schema[0] = unwrap_schema(columns).ValueUnsafe()
        rows = (given, iter(found))
        Py_INCREF(rows)
        return <void*>rows
    except BaseException as error:
        refuse(handler, error, refusal)
        if given is not None:
            given.close()
    return NULL


cdef void next_rows(
    void* python, void* rows, shared_ptr[CRecordBatch]* batch, Refusal* refusal
) noexcept with gil:
    try:
        found = next((<tuple>rows)[1], None)
        batch[0] = shared_ptr[CRecordBatch]()
        if found is not None:
            batch[0] = unwrap_batch(found).ValueUnsafe()
    except BaseException as error:
        refuse(<object>python, error, refusal)


cdef void close_get(void* python, void* rows) noexcept with gil:
    call, iterator = <tuple>rows
    Py_DECREF(<object>rows)
    (<Call>call).close()
    try:
        iterator.close()
    except BaseException:
        pass


cdef void list_actions(void* python, vector[CActionType]* actions) noexcept with gil:
    cdef CActionType one
    try:
        for name, meaning in (<object>python).actions():
            one.type, one.description = name.encode(), meaning.encode()
            actions.push_back(one)
    except BaseException:
        pass


cdef class Port:
    """A Flight service at a location, for as long as it is not shut down."""

    cdef unique_ptr[CService] service
    cdef object handler

    def __init__(
        self,
        str location,
        object handler,
        Desk desk not None,
        object rows_schema,
        int max_batches,
        int64_t max_bytes,
        *,
        object certificates=(),
        bytes client_authorities=b"",
    ):
        """`certificates` are pairs of PEM texts. `OSError` if it cannot be listened on."""
        self.handler = handler
        cdef Hooks hooks
        hooks.python = <void*>handler
        hooks.open_put, hooks.close_put, hooks.malformed = open_put, close_put, malformed
        hooks.act, hooks.next_result, hooks.end_act = act, next_result, end_act
        hooks.list_actions, hooks.crowded = list_actions, crowded
        hooks.open_get, hooks.next_rows, hooks.close_get = open_get, next_rows, close_get
        cdef shared_ptr[CSchema] schema = unwrap_schema(rows_schema).ValueUnsafe()
        self.service.reset(new CService(desk.desk, hooks, schema, max_batches, max_bytes))
        cdef CResult[CLocation] parsed = CLocation.Parse(location.encode())
        check(parsed.status())
        cdef unique_ptr[COptions] options
        options.reset(new COptions(parsed.ValueUnsafe()))
        cdef CCertKeyPair pair
        for certificate, key in certificates:
            pair.pem_cert, pair.pem_key = certificate, key
            options.get().tls_certificates.push_back(pair)
        options.get().verify_client = bool(client_authorities)
        options.get().root_certificates = client_authorities
        cdef CStatus status
        with nogil:
            status = self.service.get().Open(options.get()[0])
        check(status)

    @property
    def port(self):
        return self.service.get().port()

    def shutdown(self):
        """Lets go of the port at once; returns when all calls have ended."""
        with nogil:
            self.service.get().Shutdown()
            self.service.get().Wait()


cdef check(const CStatus& status):
    if not (<CStatus>status).ok():
        raise OSError((<CStatus>status).ToString().decode("utf-8", "replace"))
