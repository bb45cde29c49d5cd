"""A producer of a bus inside the process: nothing can be lost on the way, so nothing is
sent again. Its stamps keep an older one of the same name out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Condition
from typing import TYPE_CHECKING, Any

from polybus.errors import (
    ConnectionLost,
    Fenced,
    PolybusError,
    Stale,
    StoreClosed,
    TooLarge,
    UnknownProducer,
)
from polybus.model.arrow import block_of
from polybus.model.stamp import KEPT_RESULTS, Stamp
from polybus.native.client.produce_messages import check_bodies, check_rows, merge_messages
from polybus.native.client.produce_queue import Produced

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.model.commit import CommitResult
    from polybus.native.inprocess.inprocess_bus import InProcessBus
    from polybus.native.port.native_port import Caller
    from polybus.native.port.produce_stream import ProduceStream

MAX_IN_FLIGHT = KEPT_RESULTS  # as over the port
# After these no number of this producer will ever be taken again.
FATAL = (Fenced, UnknownProducer, Stale)


class Producer:
    """Made by `Bus.producer`. Any number of threads may use it."""

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
        """One atomic batch; the future is done when it is on disk. It cannot be cancelled.

        Blocks while `MAX_IN_FLIGHT` are on their way already.
        """
        return self.produce_rows(
            topic, merge_messages([check_bodies(bodies, keys, self._now_ms())])
        )

    def produce_rows(self, topic: str, rows: pa.RecordBatch) -> Future[Produced]:
        """The same, of a batch in the port's schema."""
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
        """Waits for the outcome of all that was handed over; False if time is up."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._in_flight, timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Waits for what is on its way, then ends."""
        with self._changed:
            was_closed, self._closed_by = (
                self.is_closed,
                self._closed_by or ConnectionLost("it was closed"),
            )
        if self.flush(timeout_s) and not was_closed and not self._is_named:
            self._close_on_bus()

    def _store(self, topic: str, batch: pa.RecordBatch, future: Future[Produced]) -> None:
        most = self._core.limits.max_batch_bytes
        if batch.nbytes > most:
            raise TooLarge(f"a batch of {batch.nbytes} bytes: at most {most} are taken")
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
        """Nobody else knows its name, so the bus need not keep it."""
        try:
            request = {"producer": self.name, "epoch": self.epoch}
            self._core.port.act(self._caller, "producer.close", request)
        except PolybusError:
            pass  # it stays: a few bytes
