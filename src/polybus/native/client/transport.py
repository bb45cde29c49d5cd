"""The interface below the client: the port of a running bus, or of a bus in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from threading import Event
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.native.client.group_fetch import FetchPart
    from polybus.native.client.native_options import ClientOptions
    from polybus.native.client.produce_queue import Produced
    from polybus.native.protocol.answers import ProducerOpened
    from polybus.native.protocol.requests import ReadTicket

T = TypeVar("T")


class BusProducer(Protocol):
    """Stores each batch exactly once, in order. Each call is one atomic batch."""

    name: str
    epoch: int

    @property
    def is_closed(self) -> bool: ...
    def produce(
        self, topic: str, bodies: Sequence[bytes], keys: Sequence[str | None] | None = None
    ) -> Future[Produced]: ...
    def produce_rows(self, topic: str, rows: pa.RecordBatch) -> Future[Produced]: ...
    def flush(self, timeout_s: float | None = None) -> bool: ...
    def close(self, timeout_s: float | None = None) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class RowSource(Protocol):
    """The reads of one `Reading`, one after the other."""

    def is_cancelled(self) -> bool: ...
    def read(self, ticket: ReadTicket) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a ticket; the bus ends a read that waits too long."""

    def cancel(self) -> None:
        """End the current read and all later ones. Any thread may call this."""


class StageStream(Protocol):
    """Batches of one schema for one topic of a stage. Answers come in order."""

    schema: pa.Schema

    def send(self, rows: pa.RecordBatch, stamp: None) -> None: ...
    def answer(self) -> dict[str, Any]:
        """Wait for the next answer. It has the key "error" if the bus refused the batch."""

    def close(self) -> None: ...


class Transport(Protocol):
    """Thread-safe. Calls block and raise the errors of `polybus.errors`."""

    url: str
    options: ClientOptions
    closed: Event
    # Time to repeat calls while the bus is unreachable.
    retry_timeout_s: float
    # Whether a batch may be sent twice. If so, the bus must refuse counters that leave gaps.
    sends_again: bool

    def check_open(self) -> None:
        """Raise `ConnectionLost` if the transport was closed."""

    def act_once(self, name: str, request: dict[str, Any]) -> dict[str, Any]: ...
    def retry(self, step: Callable[[], T]) -> T:
        """Run a step, and again while the bus is unreachable."""

    def stream_fetch(self, request: dict[str, Any]) -> Iterator[FetchPart]:
        """Run `group.fetch`. Yields objects, None for rows alone, and the rows."""

    def open_rows(self) -> RowSource: ...
    def open_stage_stream(self, stage: str, topic: str, schema: pa.Schema) -> StageStream: ...
    def new_producer(
        self,
        opened: ProducerOpened,
        now_ms: Callable[[], int],
        *,
        is_named: bool,
        create: bool,
    ) -> BusProducer: ...
    def close(self) -> None: ...
