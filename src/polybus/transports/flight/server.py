"""The Flight service itself: which call is which verb, and nothing of what verbs do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.flight as flight

from polybus.errors import MalformedRequest, PolybusError, TooLarge
from polybus.model import arrow
from polybus.transports.flight.calls import Calls
from polybus.transports.flight.errors import as_flight
from polybus.transports.flight.pace import Pace
from polybus.transports.flight.putting import Answering, Window, read_json, read_stamp

if TYPE_CHECKING:
    from polybus.model.limits import NativeLimits
    from polybus.model.rows import Rows
    from polybus.transports.flight.verbs import Caller, Stream, Verbs

PRODUCE, STAGE = "produce", "stage"
FETCH = "group.fetch"
SCHEMA_AND_END_BYTES = 4096  # of a stream of rows: the schema takes less than half of it
MAX_TICKET_BYTES = 64 * 1024


class Service(flight.FlightServerBase):  # type: ignore[misc]
    def __init__(
        self,
        location: Any,
        verbs: Verbs,
        limits: NativeLimits,
        calls: Calls,
        identify: Callable[[Any, int], Any],
        pace: Pace,
        now_ms: Callable[[], int],
        on_error: Callable[[Exception], None],
        **security: Any,
    ) -> None:
        self._verbs = verbs
        self._limits = limits
        self._identify = identify
        self._pace = pace
        self._now_ms = now_ms
        self._on_error = on_error
        self.calls = calls
        super().__init__(location, **security)

    # --- what Flight calls, each on a thread of its own

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with Told(self._on_error), self.calls.one():
            caller = self._caller(context)
            verb, *names = _path(descriptor)
            if verb == PRODUCE and len(names) == 1:
                stream = self._verbs.produce(caller, names[0])
                self._put(context, reader, writer, partial(_produce, stream), _told_ids)
            elif verb == STAGE and len(names) == 2:
                stream = self._verbs.produce(caller, names[1])
                self._put(context, reader, writer, partial(_stage, stream, names[0]), _told_nothing)
            else:
                forms = '["produce", TOPIC] or ["stage", STAGE, TOPIC]'
                raise MalformedRequest(f"the path of a put is {forms}")

    def do_get(self, context: Any, ticket: Any) -> Any:
        with Told(self._on_error):
            request = read_json(ticket.ticket, MAX_TICKET_BYTES, "the ticket")
            rows = self._verbs.read(self._caller(context), request)
            batches = self._batches(iter(rows), context.peer())
            return flight.GeneratorStream(arrow.READ_SCHEMA, batches)

    def do_action(self, context: Any, action: Any) -> Iterator[Any]:
        with Told(self._on_error), self.calls.one(), self.calls.owing():
            body = action.body.to_pybytes() if action.body is not None else b""
            request = read_json(body, self._limits.max_action_bytes, "the action's body")
            for result in self._results(self._caller(context), action.type, request):
                with self._pace.handing_over(context.peer()):
                    yield flight.Result(result)

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        return [(one.name, one.meaning) for one in self._verbs.actions()]

    # --- inside

    def _caller(self, context: Any) -> Caller:
        identity = self._identify(context, self.port)
        return self._verbs.caller(identity, context.is_cancelled)

    def _results(self, caller: Caller, name: str, request: Any) -> Iterator[Any]:
        """One in JSON; of a fetch, the rows of shards behind it."""
        rows: Sequence[Rows] = ()
        if name == FETCH:
            answer, rows = self._verbs.fetch(caller, request)
        else:
            answer = self._verbs.act(caller, name, request)
        yield json.dumps(answer).encode()
        if rows:
            yield _as_stream([arrow.batch_of(one) for one in rows])

    def _put(
        self, context: Any, reader: Any, writer: Any, hand_over: Callable[..., Any], tell: Any
    ) -> None:
        limits = self._limits
        arrow.check_schema(_schema(reader))
        answering = Answering(
            writer,
            Window(limits.max_batches_in_flight, limits.max_bytes_in_flight, self.calls),
            tell,
            partial(self._pace.handing_over, context.peer()),
            self._on_error,
        )
        try:
            for data, metadata in _chunks(reader):
                self._take(answering, data, metadata, hand_over)
        finally:
            answering.close()

    def _take(
        self, answering: Answering, data: Any, metadata: Any, hand_over: Callable[..., Any]
    ) -> None:
        counter = None
        try:
            stamp = read_stamp(metadata)
            counter = stamp.counter if stamp else None
            if data is None:
                raise MalformedRequest("metadata without a batch")
            if data.nbytes > self._limits.max_batch_bytes:
                most = self._limits.max_batch_bytes
                raise TooLarge(f"a batch of {data.nbytes} bytes: at most {most} are taken")
            block = arrow.block_of(data, self._now_ms())
        except PolybusError as error:
            answering.refuse(error, counter)
        else:
            answering.add(partial(hand_over, block, stamp), counter, block.size_bytes)

    def _batches(self, rows: Iterator[Rows], peer: str) -> Iterator[pa.RecordBatch]:
        with Told(self._on_error), self.calls.one(), self.calls.owing():
            for one in rows:
                self.calls.check()
                with self._pace.handing_over(peer):
                    yield arrow.batch_of(one)


class Told:
    """Turns what went wrong into what the client is told; `on_error` hears of it, too."""

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, flight.FlightError | GeneratorExit):
            return
        if isinstance(error, Exception):
            self._on_error(error)
        raise as_flight(error) from None


def _as_stream(batches: Sequence[pa.RecordBatch]) -> pa.Buffer:
    """Batches of one schema, and that once before them.

    Into a buffer of the size that it takes: one that grows is copied again and again.
    """
    size = sum(pa.ipc.get_record_batch_size(batch) for batch in batches)
    buffer = pa.allocate_buffer(size + SCHEMA_AND_END_BYTES)
    sink = pa.FixedSizeBufferWriter(buffer)
    with pa.ipc.new_stream(sink, arrow.READ_SCHEMA) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return buffer.slice(0, sink.tell())


def _produce(stream: Stream, block: Any, stamp: Any) -> Any:
    return stream.produce(block, stamp)


def _stage(stream: Stream, stage: str, block: Any, stamp: Any) -> Any:
    if stamp is not None:
        raise MalformedRequest("what is staged has no stamp: stage.publish takes it")
    return stream.stage(stage, block)


def _told_ids(counter: int | None, done: Any) -> dict[str, Any]:
    """No ids if a stamp is repeated that was used up by publishing nothing."""
    first = min((span.first_id for span in done.spans), default=None)
    last = max((span.first_id + span.count - 1 for span in done.spans), default=None)
    return {"counter": counter, "first_id": first, "last_id": last, "duplicate": done.duplicate}


def _told_nothing(counter: int | None, done: Any) -> dict[str, Any]:
    return {"counter": counter}


def _path(descriptor: Any) -> list[str]:
    try:
        path = [part.decode("utf-8") for part in descriptor.path or ()]
    except UnicodeDecodeError:
        raise MalformedRequest("the path of a put is no UTF-8") from None
    return path or [""]


def _schema(reader: Any) -> pa.Schema:
    try:
        return reader.schema
    except pa.ArrowInvalid as error:
        raise MalformedRequest(f"the stream begins with no schema: {error}") from None


def _chunks(reader: Any) -> Iterator[tuple[Any, Any]]:
    """Batches and their metadata, until all was read or the connection has ended."""
    while True:
        try:
            chunk = reader.read_chunk()
        except StopIteration:
            return
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise MalformedRequest(f"the stream is no Arrow: {error}") from None
        yield chunk.data, chunk.app_metadata
