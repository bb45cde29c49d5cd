"""A producer: each message is stored exactly once, in order, across restarts of the bus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Self

from polybus.errors import PolybusError
from polybus.native.client.produce_queue import (
    SMALL_BYTES,
    PendingMessages,
    Produced,
    check_bodies,
    check_rows,
)
from polybus.native.client.sender import Sender

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.native.client.flight_connection import FlightConnection
    from polybus.native.protocol.answers import ProducerOpened

__all__ = ["Produced", "Producer"]

# After all answers only the end of the stream is left.
CLOSE_TIMEOUT_S = 5.0
# A failing program must not wait forever for an unreachable bus.
FAILING_CLOSE_S = 5.0


class Producer:
    """A producer of `Client.producer`. Thread-safe.

    Messages of one thread keep their order. A thread of the producer completes futures, so
    their callbacks must not wait for the producer.
    """

    def __init__(
        self,
        connection: FlightConnection,
        opened: ProducerOpened,
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
        """Produce one atomic batch. The future is done when the batch is on disk.

        Blocks while `max_waiting_bytes` are queued. Cancelling the future succeeds only
        before the batch is sent.
        """
        call = PendingMessages(topic, check_bodies(bodies, keys, self._now_ms()))
        self._sender.queue.put(call)
        return call.future

    def produce_rows(self, topic: str, rows: pa.RecordBatch) -> Future[Produced]:
        """Produce a batch of the port's schema: shard_key, body, insertion_ms, headers."""
        call = PendingMessages(topic, check_rows(rows))
        # A small batch is sent by the caller: waking the thread would take longer.
        is_small = call.messages.size_bytes < SMALL_BYTES
        self._sender.queue.put(call, wake=not is_small)
        if is_small:
            self._sender.send_inline()
        return call.future

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait for the outcome of all batches. Returns False after the timeout."""
        return self._sender.queue.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Send queued messages, then end the producer.

        After the timeout the remaining futures fail with `ConnectionLost`; their messages
        may still have been stored.
        """
        sender = self._sender
        sender.queue.close()
        if not sender.queue.flush(timeout_s):
            sender.abandon()
        elif sender.join(CLOSE_TIMEOUT_S) and not self._is_named and sender.fatal_error is None:
            self._is_named = True  # a second `close` must not close it on the bus again
            try:
                # No other client knows the name of an anonymous producer.
                request = {"producer": self.name, "epoch": self.epoch}
                self._connection.act_once("producer.close", request)
            except PolybusError:
                pass  # the bus expires it later

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(None if kind is None else FAILING_CLOSE_S)
