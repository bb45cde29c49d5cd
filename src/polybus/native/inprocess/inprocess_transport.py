"""The client's transport to a bus inside the process: direct calls of its port.

Nothing can be lost between client and store, so nothing is sent again. Stamps still fence an
older producer of the same name. Requests and answers go through JSON here, too: a program
that works with a bus inside the process works with one behind a port.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from threading import Condition, Event, Lock
from typing import TYPE_CHECKING, Any, TypeVar

from polybus.errors import (
    ConnectionLost,
    Fenced,
    MalformedRequest,
    PolybusError,
    StoreClosed,
    TooLarge,
)
from polybus.model.arrow import READ_SCHEMA, batch_of, block_of, read_schema
from polybus.model.delivery_time import due_of
from polybus.model.stamp import KEPT_RESULTS, Stamp
from polybus.native.client.native_options import ClientOptions
from polybus.native.client.produce_queue import (
    PendingMessages,
    Produced,
    ProduceFuture,
    merge_messages,
)
from polybus.native.client.sender import FATAL

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.model.commit import CommitResult
    from polybus.native.client.group_fetch import FetchPart
    from polybus.native.inprocess.inprocess_bus import InProcessBus
    from polybus.native.port.native_port import NativePort
    from polybus.native.port.produce_stream import ProduceStream
    from polybus.native.protocol.answers import ProducerOpened
    from polybus.native.protocol.requests import ReadTicket

T = TypeVar("T")

MAX_IN_FLIGHT = KEPT_RESULTS  # as on the port


class InProcessTransport:
    """The transport of one client; `on_close` releases its share of the bus."""

    sends_again = False
    # The bus is there until it is closed, so that waiting for it is useless.
    options = ClientOptions(connect_timeout_s=0.0)

    def __init__(self, bus: InProcessBus, on_close: Callable[[], None]) -> None:
        self.url = bus.url
        self.bus = bus
        self.closed = Event()
        self.retry_timeout_s = 0.0
        self.caller = bus.port.new_caller(bus.identity, self.closed.is_set)
        self._on_close = on_close
        self._lock = Lock()

    def check_open(self) -> None:
        if os.getpid() != self.bus.pid:
            pid = self.bus.pid
            raise StoreClosed(
                f"this bus belongs to process {pid}, the parent of a fork; use it there"
            )
        if self.closed.is_set():
            raise ConnectionLost("the client is closed")

    @contextmanager
    def open_port(self) -> Iterator[NativePort]:
        """Yield the port. Closing the client meanwhile raises `ConnectionLost`, as over Flight."""
        self.check_open()
        try:
            yield self.bus.port
        except StoreClosed:
            self.check_open()
            raise

    def act_once(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        with self.open_port() as port:
            return _round_trip_json(port.act(self.caller, name, _encode_request(request)))

    def retry(self, step: Callable[[], T]) -> T:
        return step()

    def stream_fetch(self, request: dict[str, Any]) -> Iterator[FetchPart]:
        with self.open_port() as port:
            for answer, rows in port.stream_fetch(self.caller, _encode_request(request)):
                self.check_open()
                yield answer and _round_trip_json(answer), batch_of(rows) if rows.count else None

    def open_rows(self) -> InProcessRows:
        return InProcessRows(self)

    def open_stage_stream(self, stage: str, topic: str, schema: pa.Schema) -> InProcessStageStream:
        return InProcessStageStream(self, stage, topic, schema)

    def new_sender(self, opened: ProducerOpened, *, create: bool) -> InProcessSender:
        return InProcessSender(self, opened, create=create)

    def close(self) -> None:
        """End the waits of this client, then release the bus."""
        if os.getpid() != self.bus.pid:
            return  # a child of a fork must not close the bus of its parent
        with self._lock:
            if self.closed.is_set():
                return
            self.closed.set()
        self.bus.port.waits.check_callers()
        self._on_close()


class InProcessRows:
    """Reads of one caller, which is gone once the read is cancelled or the client closed."""

    def __init__(self, transport: InProcessTransport) -> None:
        self._transport = transport
        self._cancelled = False
        self._port = transport.bus.port
        self._caller = self._port.new_caller(
            transport.bus.identity, lambda: self._cancelled or transport.closed.is_set()
        )

    def is_cancelled(self) -> bool:
        return self._cancelled

    def read(self, ticket: ReadTicket) -> Iterator[pa.RecordBatch]:
        with self._transport.open_port() as port:
            reader = port.read(self._caller, ticket.encode())
            schema = read_schema(reader.columns)
            for rows in reader:
                batch = batch_of(rows)
                yield batch if schema is READ_SCHEMA else batch.select(schema.names)
                if self._cancelled:
                    return
                self._transport.check_open()

    def cancel(self) -> None:
        self._cancelled = True
        self._port.waits.check_callers()


class InProcessStageStream:
    """Batches for a topic of a stage."""

    def __init__(
        self, transport: InProcessTransport, stage: str, topic: str, schema: pa.Schema
    ) -> None:
        self.schema = schema
        self._stage = stage
        self._transport = transport
        with transport.open_port() as port:
            self._stream = port.produce(transport.caller, topic)
        self._staged: deque[Future[None]] = deque()

    def send(self, rows: pa.RecordBatch, stamp: None) -> None:
        with self._transport.open_port() as port:
            block = block_of(rows, port.wall_ns() // 1_000_000)
            self._staged.append(self._stream.stage(self._stage, block))

    def answer(self) -> dict[str, Any]:
        with self._transport.open_port():
            self._staged.popleft().result()
        return {}

    def close(self) -> None:
        """Do nothing; there is no connection to close."""


class InProcessSender:
    """Submits each batch to the port at once, on the thread of the caller."""

    def __init__(
        self, transport: InProcessTransport, opened: ProducerOpened, *, create: bool
    ) -> None:
        self._name = opened["producer"]
        self._epoch = opened["epoch"]
        self._create = create
        self._transport = transport
        self._bus = transport.bus
        self._caller = transport.caller
        self._counter = opened["last_counter"]
        self._streams: dict[str, ProduceStream] = {}
        self._changed = Condition()
        self._in_flight = 0
        self._closed_by: PolybusError | None = None

    @property
    def is_closed(self) -> bool:
        return self._closed_by is not None

    def put(self, call: PendingMessages) -> None:
        """Submit a batch. Blocks while `MAX_IN_FLIGHT` batches are in flight."""
        # In a child of a fork no thread would complete the future.
        self._transport.check_open()
        call.future.set_running_or_notify_cancel()  # a submitted batch cannot be cancelled
        try:
            self._store(call, merge_messages([call.messages]))
        except (Fenced, ConnectionLost):
            raise
        except StoreClosed:
            raise ConnectionLost("the bus was closed") from None
        except PolybusError as error:
            call.future.set_exception(error)

    def flush(self, timeout_s: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._in_flight, timeout_s)

    def close(self, timeout_s: float | None) -> bool:
        if os.getpid() != self._bus.pid:
            return False  # in a child of a fork no thread completes the batches in flight
        with self._changed:
            self._closed_by = self._closed_by or ConnectionLost("the producer is closed")
        return self.flush(timeout_s) and not isinstance(self._closed_by, FATAL)

    def _store(self, call: PendingMessages, batch: pa.RecordBatch) -> None:
        topic = call.topic
        most = self._bus.limits.max_batch_bytes
        if batch.nbytes > most:
            raise TooLarge(f"batch of {batch.nbytes} bytes exceeds the limit of {most}")
        port = self._bus.port
        block = block_of(batch, port.wall_ns() // 1_000_000)
        with self._changed:
            self._changed.wait_for(lambda: self._closed_by or self._in_flight < MAX_IN_FLIGHT)
            if self._closed_by is not None:
                raise self._closed_by
            stream = self._streams.get(topic)
            if stream is None:
                stream = port.produce(self._caller, topic, create=self._create)
                self._streams[topic] = stream
            # A refused batch leaves a gap, which is why the producer was opened as not dense.
            self._counter += 1
            stamp = Stamp(self._name, self._epoch, self._counter)
            stored = stream.produce(block, stamp, call.delivery)
            self._in_flight += 1
        # The store's thread must not run callbacks of the program.
        on_stored = partial(self._on_stored, call.future)
        stored.add_done_callback(lambda done: self._bus.answers.add(partial(on_stored, done)))

    def _on_stored(self, future: ProduceFuture, done: Future[CommitResult]) -> None:
        try:
            result = done.result()
            ids = result.id_range()
            # Only a delayed batch has none.
            produced = Produced(*ids, False) if ids else Produced(0, 0, False, due_of(result) or 0)
            future.set_result(produced)
        except Exception as error:
            if isinstance(error, FATAL):
                self._closed_by = self._closed_by or error
            if isinstance(error, StoreClosed):
                error = ConnectionLost("the bus was closed")
            future.set_exception(error)
        finally:
            with self._changed:
                self._in_flight -= 1
                self._changed.notify_all()


def _encode_request(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return _round_trip_json(request)
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedRequest(f"request must be encodable as JSON: {error}") from None


def _round_trip_json(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value as it would arrive over a connection."""
    decoded: dict[str, Any] = json.loads(json.dumps(given))
    return decoded
