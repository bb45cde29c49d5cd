"""The interface below the client: the port of a running bus, or of a bus in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Event
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.native.client.group_fetch import FetchPart
    from polybus.native.client.native_options import ClientOptions
    from polybus.native.client.produce_queue import PendingMessages
    from polybus.native.protocol.answers import ProducerOpened
    from polybus.native.protocol.requests import ReadTicket

T = TypeVar("T")


class BatchSender(Protocol):
    """Delivers the batches of one producer, each exactly once and in order. Thread-safe."""

    @property
    def is_closed(self) -> bool: ...
    def put(self, call: PendingMessages) -> None:
        """Take the messages of a call and complete its future later. Blocks while it is full."""

    def flush(self, timeout_s: float | None) -> bool:
        """Wait for the outcome of all calls. Returns False after the timeout."""

    def close(self, timeout_s: float | None) -> bool:
        """Refuse further calls, then flush.

        Returns whether the producer can be closed on the bus: all calls have an outcome, and
        the bus has not ended it.
        """


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
    def new_sender(self, opened: ProducerOpened, *, create: bool) -> BatchSender: ...
    def close(self) -> None: ...
