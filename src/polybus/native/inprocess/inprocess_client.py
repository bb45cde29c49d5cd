"""A handle on a bus inside the process, with the methods of `native.Client`.

Nothing can be lost between client and store, so nothing is sent again. Stamps still fence an
older producer of the same name.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Condition, Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from polybus.errors import (
    ConnectionLost,
    Fenced,
    MalformedRequest,
    PolybusError,
    Stale,
    StoreClosed,
    TooLarge,
    UnknownProducer,
)
from polybus.model.arrow import batch_of, block_of
from polybus.model.stamp import KEPT_RESULTS, Stamp
from polybus.native.client.group_fetch import split_by_shard
from polybus.native.client.produce_queue import Produced, check_bodies, check_rows, merge_messages
from polybus.native.client.producer_set import ProducerSet
from polybus.native.client.range_reader import NO_BOUND, ReadRange

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.model.commit import CommitResult
    from polybus.native.client.group_fetch import FetchPart
    from polybus.native.inprocess.inprocess_bus import InProcessBus
    from polybus.native.port.native_port import Caller
    from polybus.native.port.produce_stream import ProduceStream

MAX_IN_FLIGHT = KEPT_RESULTS  # as on the port
# After these errors the bus accepts no counter of this producer.
FATAL = (Fenced, UnknownProducer, Stale)


class Producer:
    """A producer of `InProcessClient.producer`. Thread-safe."""

    def __init__(
        self,
        core: InProcessBus,
        caller: Caller,
        opened: dict[str, Any],
        now_ms: Callable[[], int],
        *,
        is_named: bool,
        create: bool,
    ) -> None:
        self.name: str = opened["producer"]
        self.epoch: int = opened["epoch"]
        self._is_named = is_named
        self._create = create
        self._core = core
        self._caller = caller
        self._now_ms = now_ms
        self._counter: int = opened["last_counter"]
        self._streams: dict[str, ProduceStream] = {}
        self._changed = Condition()
        self._in_flight = 0
        self._closed_by: PolybusError | None = None

    @property
    def is_closed(self) -> bool:
        return self._closed_by is not None

    def produce(
        self, topic: str, bodies: Sequence[bytes], keys: Sequence[str | None] | None = None
    ) -> Future[Produced]:
        """Produce one atomic batch. The future is done when it is on disk; it cannot be cancelled.

        Blocks while `MAX_IN_FLIGHT` batches are in flight.
        """
        return self.produce_rows(
            topic, merge_messages([check_bodies(bodies, keys, self._now_ms())])
        )

    def produce_rows(self, topic: str, rows: pa.RecordBatch) -> Future[Produced]:
        """Produce a batch of the port's schema."""
        batch = check_rows(rows).batch
        future: Future[Produced] = Future()
        future.set_running_or_notify_cancel()
        try:
            self._store(topic, batch, future)
        except (Fenced, ConnectionLost):
            raise
        except PolybusError as error:
            future.set_exception(error)
        return future

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait for the outcome of all batches. Returns False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._in_flight, timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for batches in flight, then end the producer."""
        with self._changed:
            was_closed, self._closed_by = (
                self.is_closed,
                self._closed_by or ConnectionLost("the producer is closed"),
            )
        if self.flush(timeout_s) and not was_closed and not self._is_named:
            self._close_on_bus()

    def _store(self, topic: str, batch: pa.RecordBatch, future: Future[Produced]) -> None:
        most = self._core.limits.max_batch_bytes
        if batch.nbytes > most:
            raise TooLarge(f"batch of {batch.nbytes} bytes exceeds the limit of {most}")
        block = block_of(batch, self._now_ms())
        with self._changed:
            self._changed.wait_for(lambda: self._closed_by or self._in_flight < MAX_IN_FLIGHT)
            if self._closed_by is not None:
                raise self._closed_by
            stored = self._stream(topic).produce(block, self._next_stamp())
            self._in_flight += 1
        tell = partial(self._on_stored, future)
        stored.add_done_callback(lambda done: self._core.answers.add(partial(tell, done)))

    def _next_stamp(self) -> Stamp:
        self._counter += 1
        return Stamp(self.name, self.epoch, self._counter)

    def _stream(self, topic: str) -> ProduceStream:
        stream = self._streams.get(topic)
        if stream is None:
            stream = self._streams[topic] = self._core.port.produce(
                self._caller, topic, create=self._create
            )
        return stream

    def _on_stored(self, future: Future[Produced], done: Future[CommitResult]) -> None:
        try:
            ids = done.result().id_range()
            assert ids is not None  # a batch has at least one message
            future.set_result(Produced(*ids, False))
        except Exception as error:
            self._fail(future, error)
        finally:
            with self._changed:
                self._in_flight -= 1
                self._changed.notify_all()

    def _fail(self, future: Future[Produced], error: Exception) -> None:
        if isinstance(error, FATAL):
            self._closed_by = self._closed_by or error
        if isinstance(error, StoreClosed):
            error = ConnectionLost("the bus was closed")
        future.set_exception(error)

    def _close_on_bus(self) -> None:
        """Close the producer on the bus; no other client knows its name."""
        try:
            request = {"producer": self.name, "epoch": self.epoch}
            self._core.port.act(self._caller, "producer.close", request)
        except PolybusError:
            pass  # the bus expires it later


class InProcessReader:
    """An iterator of batches, for one thread. Any other thread may `cancel` it."""

    def __init__(
        self,
        core: InProcessBus,
        wanted: ReadRange,
        check: Callable[[], None],
        is_closed: Callable[[], bool],
    ) -> None:
        self._core = core
        self._wanted = wanted
        self._check = check
        self._is_closed = is_closed
        self._cancelled = False
        self._batches = self._read()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        return next(self._batches)

    def close(self) -> None:
        """End the read early; only for the thread that iterates."""
        self._batches.close()

    def cancel(self) -> None:
        self._cancelled = True
        self._core.port.waits.check_callers()

    def _is_over(self) -> bool:
        return self._cancelled or self._is_closed()

    def _read(self) -> Any:  # a generator, which mypy would not let be closed
        port, wanted = self._core.port, self._wanted
        caller = port.new_caller(self._core.identity, self._is_over)
        heard_s = time.monotonic()
        while not self._cancelled:
            self._check()
            left_s = max(0.0, wanted.wait_s - (time.monotonic() - heard_s))
            for rows in port.read(caller, wanted.ticket(left_s)):
                batch = batch_of(rows)
                is_all = wanted.advance(batch)
                yield batch
                if is_all or self._cancelled:
                    return
                self._check()
                heard_s = time.monotonic()
            if time.monotonic() - heard_s >= wanted.wait_s:
                return


class InProcessStage:
    """A stage. Batches are kept until it is published or its lease ends."""

    def __init__(
        self, core: InProcessBus, caller: Caller, name: str, now_ms: Callable[[], int]
    ) -> None:
        self.name = name
        self._core = core
        self._caller = caller
        self._now_ms = now_ms

    def put(
        self, topic: str, bodies: Sequence[bytes], keys: Sequence[str | None] | None = None
    ) -> None:
        """Put one batch. It is on disk when this returns."""
        self.put_rows(topic, merge_messages([check_bodies(bodies, keys, self._now_ms())]))

    def put_rows(self, topic: str, rows: pa.RecordBatch) -> None:
        """Put a batch of the port's schema. It is on disk when this returns."""
        block = block_of(check_rows(rows).batch, self._now_ms())
        self._core.port.produce(self._caller, topic).stage(self.name, block).result()

    def close(self) -> None:
        """Do nothing; a stage holds no stream here."""


class InProcessClient:
    """Made by `open_bus`. Blocking, for any number of threads.

    Requests and answers go through JSON here, too: a program that works with a bus inside
    the process works with one behind a port.
    """

    def __init__(
        self,
        core: InProcessBus,
        leave: Callable[[], None],
        *,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._core = core
        self._on_close = leave
        self._now_ms = now_ms
        self._lock = Lock()
        self._closed = False
        self._producers: ProducerSet[Producer] = ProducerSet()
        self._caller = core.port.new_caller(core.identity, lambda: self._closed)

    # --- producing

    def producer(self, name: str | None = None, *, create: bool = True) -> Producer:
        """A producer of this name, which fences an older one; without a name a new one.

        Its numbers may leave gaps: nothing is sent twice here, so a batch that was refused
        leaves the others alone.
        """
        opened = self.act("producer.open", producer=name or "", dense=False)
        kind = {"is_named": bool(name), "create": create}
        producer = Producer(self._core, self._caller, opened, self._now_ms, **kind)
        return self._producers.add(producer)

    def stage(self, lease_s: float = 600.0) -> InProcessStage:
        """A place for batches that become visible all at once, by `publish`."""
        opened = self.act("stage.new", lease_s=lease_s)
        return InProcessStage(self._core, self._caller, opened["stage"], self._now_ms)

    def publish(
        self, stages: Sequence[InProcessStage | str], stamp: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        """All that is in the stages becomes visible, at once. They are gone then."""
        names = [one if isinstance(one, str) else one.name for one in stages]
        return self.act("stage.publish", stages=names, stamp=stamp and dict(stamp))

    # --- reading

    def read(
        self,
        topic: str,
        shard: int | str = "all",
        start: int | None = None,
        end: int | None = None,
        *,
        max_rows: int = NO_BOUND,
        wait_s: float = 0.0,
    ) -> InProcessReader:
        """As `native.Client.read`."""
        self._check()
        wanted = ReadRange(topic, shard, start, end, max_rows, wait_s)
        return InProcessReader(self._core, wanted, self._check, lambda: self._closed)

    def fetch(self, **request: Any) -> tuple[dict[str, Any], list[pa.RecordBatch]]:
        """Run `group.fetch`. Returns its object and a batch per entry of "rows", in order."""
        answer, rows = next(self._stream_fetch(request))
        assert answer is not None  # without `follow` there is always an object
        return answer, split_by_shard(answer, rows)

    def follow(self, **request: Any) -> Iterator[FetchPart]:
        """Run `group.fetch` with `follow`. Yields objects, None for rows alone, and the rows."""
        return self._stream_fetch({**request, "follow": True})

    def _stream_fetch(self, request: dict[str, Any]) -> Iterator[FetchPart]:
        self._check()
        for answer, rows in self._core.port.stream_fetch(self._caller, _encode_request(request)):
            self._check()
            yield answer and _round_trip_json(answer), batch_of(rows) if rows.count else None

    # --- the rest

    def act(self, name: str, /, **request: Any) -> dict[str, Any]:
        """Run an action of the port by its name. Fields that are None are omitted."""
        self._check()
        return _round_trip_json(self._core.port.act(self._caller, name, _encode_request(request)))

    def hurry(self, timeout_s: float) -> None:
        """Do nothing; a bus in the process is always reachable."""

    def close(self, timeout_s: float | None = None) -> None:
        """Close the handle and its producers, and end its waits."""
        if os.getpid() != self._core.pid:
            return
        self._producers.close(timeout_s)
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._core.port.waits.check_callers()
        self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self) -> None:
        core = self._core
        if os.getpid() != core.pid:
            text = f"this bus belongs to process {core.pid}, the parent of a fork; use it there"
            raise StoreClosed(text)
        if self._closed:
            raise ConnectionLost("the client is closed")


def _encode_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request as decoded JSON, without fields that are None."""
    try:
        return _round_trip_json({key: value for key, value in request.items() if value is not None})
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedRequest(f"request must be encodable as JSON: {error}") from None


def _round_trip_json(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value as it would arrive over a connection."""
    found: dict[str, Any] = json.loads(json.dumps(given))
    return found
