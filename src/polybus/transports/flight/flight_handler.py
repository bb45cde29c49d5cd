"""The handler that the compiled port calls (`kernel.flight_port`).

Each method runs on a thread of gRPC. Batches of put streams bypass it: `PutIntake` takes them
from the batch queue.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from polybus.errors import Denied, LimitReached, MalformedRequest, TooLarge
from polybus.kernel.flight_port import FlightPort
from polybus.model import arrow
from polybus.model.delivery_time import due_of
from polybus.transports.flight.flight_status import Unauthenticated, to_flight_status
from polybus.transports.flight.put_intake import PutTarget, read_json

if TYPE_CHECKING:
    from polybus.kernel.flight_port import BatchQueue, FlightCall
    from polybus.model.identity import Identity
    from polybus.model.limits import NativeLimits
    from polybus.model.rows import Rows
    from polybus.transports.flight.call_tracker import CallTracker
    from polybus.transports.flight.port_interface import PortCaller, PortInterface, PortStream
    from polybus.transports.flight.token_calls import TokenCalls

T = TypeVar("T")

PRODUCE, STAGE = "produce", "stage"
EXISTING = "existing"  # after the topic: do not create it
# An Arrow IPC stream is its schema, batches, and an end marker.
SCHEMA, END = arrow.READ_SCHEMA.serialize().to_pybytes(), b"\xff\xff\xff\xff\0\0\0\0"
SMALL_BYTES = 64 << 10
ROW_BYTES = 48  # of a row besides its key, body and headers
SCHEMA_AND_END_BYTES = 4096  # per stream; the schema takes less than half of it
MAX_TICKET_BYTES = 64 * 1024
# Of a message besides the buffers of its batch: offsets, nulls, padding, headers. Whether a batch
# is too large is checked exactly when it is decoded.
MESSAGE_OVERHEAD_BYTES = 64 << 20
NULL = "null"  # in JSON


class FlightHandler:
    def __init__(
        self,
        location: str,
        verbs: PortInterface,
        limits: NativeLimits,
        calls: CallTracker,
        queue: BatchQueue,
        identify: Callable[[FlightCall], Identity],
        token_calls: TokenCalls,
        on_error: Callable[[Exception], None],
    ) -> None:
        self._verbs = verbs
        self._limits = limits
        self._calls = calls
        self._identify = identify
        self._token_calls = token_calls
        self._on_error = on_error
        self.too_many_calls = to_flight_status(
            LimitReached("max_calls", f"{limits.max_calls} calls are in progress; retry later")
        )
        self._queue = queue
        self._uncounting = Lock()  # the next call is counted when all ended ones are uncounted
        window = limits.max_batches_in_flight, limits.max_bytes_in_flight
        self._port = FlightPort(
            location,
            self,
            queue,
            arrow.READ_SCHEMA,
            *window,
            max_message_bytes=limits.max_batch_bytes + MESSAGE_OVERHEAD_BYTES,
            max_streams=limits.max_streams,
        )

    @property
    def is_bounded(self) -> bool:
        """Whether gRPC keeps to `max_streams` and to the size of a message."""
        return self._port.is_bounded

    def shutdown(self) -> None:
        """Accept no connection. Returns when all calls have ended."""
        self._port.shutdown()
        self.uncount_ended()

    def uncount_ended(self) -> None:
        """Uncount calls that have ended: their threads do not wait for the interpreter's lock."""
        with self._uncounting:
            for identity in self._queue.take_ended():
                self._verbs.end_call(identity)

    # --- called by the compiled port

    def begin_call(self, call: FlightCall) -> Identity:
        """Identify and count a caller before its first message. Raises `LimitReached`."""
        identity = self._identify(call)
        self.uncount_ended()
        self._verbs.begin_call(identity)
        return identity

    def open_put(self, call: FlightCall, path: list[bytes], schema: pa.Schema) -> PutTarget:
        with self._calls.begin_call():
            arrow.check_schema(schema)
            caller = self._caller(call)
            try:
                verb, *names = [part.decode("utf-8") for part in path] or [""]
            except UnicodeDecodeError:
                raise MalformedRequest("the path of a put must be UTF-8") from None
            if verb == PRODUCE and (len(names) == 1 or names[1:] == [EXISTING]):
                stream = self._verbs.produce(caller, names[0], create=len(names) == 1)
                return PutTarget(stream.produce, _encode_produced, stream.is_ready)
            if verb == STAGE and len(names) == 2:
                stream = self._verbs.produce(caller, names[1])
                return PutTarget(
                    partial(_stage, stream, names[0]),
                    lambda counter, _: json.dumps({"counter": counter}).encode(),
                    stream.is_ready,
                )
            forms = '["produce", TOPIC], ["produce", TOPIC, "existing"] or ["stage", STAGE, TOPIC]'
            raise MalformedRequest(f"the path of a put is {forms}")

    def close_put(self, target: PutTarget) -> None:
        self._calls.end_call()

    def run_action(self, call: FlightCall, name: str, body: bytes) -> Iterable[bytes | pa.Buffer]:
        """Return the results of an action: JSON, for a fetch also rows as they arrive."""
        self._calls.check_open()
        request = read_json(body, self._limits.max_action_bytes, "the action's body")
        caller = self._caller(call)
        if self._verbs.is_streamed(name):
            return self._check_each(call, _encode_fetch(self._verbs.stream_fetch(caller, request)))
        answer = self._verbs.act(caller, name, request)
        self._token_calls.check(call)  # a wait ends when its token becomes invalid
        return [json.dumps(answer).encode()]

    def open_rows(
        self, call: FlightCall, ticket: bytes
    ) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        request = read_json(ticket, MAX_TICKET_BYTES, "the ticket")
        reading = self._verbs.read(self._caller(call), request)
        schema = arrow.read_schema(reading.columns)
        return schema, self._check_each(call, self._batches(iter(reading), schema))

    def actions(self) -> list[tuple[str, str]]:
        return self._verbs.list_actions()

    def on_malformed(self, text: str, is_too_large: bool) -> Exception:
        return TooLarge(text) if is_too_large else MalformedRequest(text)

    def describe_error(self, error: BaseException) -> tuple[int, str, bytes]:
        if isinstance(error, Unauthenticated):
            self._on_error(Denied(str(error)))
        elif isinstance(error, Exception):
            self._on_error(error)
        return to_flight_status(error)

    # --- internals

    def _caller(self, call: FlightCall) -> PortCaller:
        if call.authorization is not None and self._token_calls.add(call).name != call.caller.key:
            raise Unauthenticated("the token has another name now; call again")
        call.user = call.caller.account_name
        is_valid = self._token_calls.is_valid
        return self._verbs.new_caller(
            call.caller, lambda: call.is_cancelled() or not is_valid(call)
        )

    def _check_each(self, call: FlightCall, parts: Iterator[T]) -> Iterator[T]:
        """Yield parts of an answer while the token of the call is valid."""
        for part in parts:
            self._token_calls.check(call)
            yield part
        self._token_calls.check(call)

    def _batches(self, rows: Iterator[Rows], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with self._calls.track_call():
            for chunk in rows:
                self._calls.check_open()
                batch = arrow.batch_of(chunk)
                yield batch if schema is arrow.READ_SCHEMA else batch.select(schema.names)


def _encode_fetch(
    parts: Iterator[tuple[Mapping[str, Any] | None, Rows]],
) -> Iterator[bytes | pa.Buffer]:
    """Yield answers as JSON and their rows as Arrow IPC streams."""
    for answer, rows in parts:
        if answer is not None:
            yield json.dumps(answer).encode()
        if not rows.count:
            continue
        batch = arrow.batch_of(rows)
        if rows.size_bytes + rows.count * ROW_BYTES <= SMALL_BYTES:
            # Joining bytes is faster for a small batch.
            yield b"".join((SCHEMA, batch.serialize(), END))
            continue
        # A buffer of the final size, because a growing buffer is copied repeatedly.
        buffer = pa.allocate_buffer(pa.ipc.get_record_batch_size(batch) + SCHEMA_AND_END_BYTES)
        sink = pa.FixedSizeBufferWriter(buffer)
        with pa.ipc.new_stream(sink, arrow.READ_SCHEMA) as writer:
            writer.write_batch(batch)
        yield buffer.slice(0, sink.tell())


def _stage(stream: PortStream, stage: str, block: Any, stamp: Any, delivery: Any) -> Any:
    if stamp is not None:
        raise MalformedRequest(
            "a staged batch must have no stamp; send the stamp with stage.publish"
        )
    if delivery is not None:
        raise MalformedRequest("a staged batch must have no delivery time")
    return stream.stage(stage, block)


def _encode_produced(counter: int | None, done: Any) -> bytes:
    """Return the answer to a batch. The ids are null if a stamp was voided by an empty commit.

    Formatted by hand because json.dumps takes three times as long for each batch.
    """
    first, last = done.id_range() or (NULL, NULL)
    number = NULL if counter is None else counter
    duplicate = "true" if done.duplicate else "false"
    ids = f'"first_id": {first}, "last_id": {last}'
    if done.note and (due_ns := due_of(done)) is not None:
        ids += f', "deliver_at_ns": {due_ns}'
    return f'{{"counter": {number}, {ids}, "duplicate": {duplicate}}}'.encode()
