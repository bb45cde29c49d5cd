"""A producer: what is handed over arrives once, in order, whatever happens on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from polybus.errors import PolybusError
from polybus.native.client.produce_queue import (
    SMALL_BYTES,
    MessageList,
    MessageRows,
    PendingMessages,
    Produced,
    check_bodies,
    check_rows,
)
from polybus.native.client.sender import Sender

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.native.client.flight_connection import FlightConnection

__all__ = ["Produced", "Producer"]

# After everything was answered only a farewell is left.
CLOSE_TIMEOUT_S = 5.0
# A program that fails must not wait for ever for a bus that is not there.
FAILING_CLOSE_S = 5.0


class Producer:
    """Made by `Client.producer`. Any number of threads may use it.

    What one thread hands over arrives in that order. Futures are told by a thread of
    the producer: what is called back from there must not wait for the producer.
    """

    def __init__(
        self,
        connection: FlightConnection,
        opened: dict[str, Any],
        now_ms: Callable[[], int],
        *,
        is_named: bool,
        create: bool = True,
    ) -> None:
        self.name: str = opened["producer"]
        self.epoch: int = opened["epoch"]
        self._is_named = is_named
        self._connection = connection
        self._now_ms = now_ms
        self._sender = Sender(
            connection, self.name, self.epoch, opened["last_counter"], create=create
        )

    @property
    def is_closed(self) -> bool:
        return self._sender.queue.is_closed

    def produce(
        self, topic: str, bodies: Sequence[bytes], keys: Sequence[str | None] | None = None
    ) -> Future[Produced]:
        """One atomic batch; the future is done when it is on disk.

        Blocks while `max_waiting_bytes` wait already. A future that could be cancelled
        was never sent.
        """
        return self._enqueue(topic, check_bodies(bodies, keys, self._now_ms()))

    def produce_rows(self, topic: str, rows: pa.RecordBatch) -> Future[Produced]:
        """The same, of a batch in the port's schema: shard_key, body, insertion_ms, headers."""
        one = PendingMessages(topic, check_rows(rows))
        is_small = one.messages.size_bytes < SMALL_BYTES
        self._sender.queue.put(one, wake=not is_small)
        if is_small:
            self._sender.send_inline()
        return one.future

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits for the outcome of all that was handed over; False if time is up."""
        return self._sender.queue.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Sends what waits, then ends. What has no outcome when time is up is `ConnectionLost`.

        Such a message may have been stored all the same.
        """
        sender = self._sender
        sender.queue.close()
        is_done = sender.queue.flush(timeout_s)
        if not is_done:
            sender.abandon()
        elif sender.join(CLOSE_TIMEOUT_S) and not self._is_named and sender.fatal_error is None:
            self._close_on_bus()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(None if error is None else FAILING_CLOSE_S)

    def _enqueue(self, topic: str, messages: MessageList | MessageRows) -> Future[Produced]:
        one = PendingMessages(topic, messages)
        self._sender.queue.put(one)
        return one.future

    def _close_on_bus(self) -> None:
        """Nobody else knows its name, so the bus need not keep it."""
        self._is_named = True
        try:
            self._connection.act_once(
                "producer.close", {"producer": self.name, "epoch": self.epoch}
            )
        except PolybusError:
            pass  # it stays: a few bytes
