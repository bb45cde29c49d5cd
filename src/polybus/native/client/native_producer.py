"""A producer: each message is stored exactly once and in order.

This module checks messages. A sender delivers them: `Sender` over a connection, across restarts
of the bus, and `InProcessSender` to a bus in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import datetime
from typing import TYPE_CHECKING, Self

from polybus.errors import PolybusError
from polybus.model.delivery_time import DeliveryTime
from polybus.native.client.produce_queue import (
    MessageList,
    MessageRows,
    PendingMessages,
    Produced,
    add_ttl,
    check_bodies,
    check_rows,
    merge_messages,
)
from polybus.native.protocol.requests import ProducerClose

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.native.client.transport import Transport
    from polybus.native.protocol.answers import ProducerOpened

__all__ = ["Produced", "Producer"]

# A failing program must not wait forever for an unreachable bus.
FAILING_CLOSE_S = 5.0


class Producer:
    """A producer of `Client.producer`. Thread-safe.

    Messages of one thread keep their order. A thread of the producer completes futures, so
    their callbacks must not wait for the producer.
    """

    def __init__(
        self,
        connection: Transport,
        opened: ProducerOpened,
        now_ms: Callable[[], int],
        *,
        is_named: bool,
        create: bool,
    ) -> None:
        self.name: str = opened["producer"]
        self.epoch: int = opened["epoch"]
        self._connection = connection
        self._now_ms = now_ms
        # No other client knows the name of an anonymous producer: it ends on the bus as well.
        self._ends_on_bus = not is_named
        self._sender = connection.new_sender(opened, create=create)

    @property
    def is_closed(self) -> bool:
        return self._sender.is_closed

    def produce(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        *,
        delay_s: float | None = None,
        deliver_at: datetime | float | None = None,
        ttl_s: float | None = None,
    ) -> Future[Produced]:
        """Produce one atomic batch. The future is done when the batch is on disk.

        Blocks while `max_waiting_bytes` are queued, or 16 batches are in flight to a bus in
        this process. Cancelling the future succeeds only before the batch is sent.

        With `delay_s`, or `deliver_at` (a datetime with a time zone, or seconds since 1970),
        the bus appends the batch when it is due, by its clock; the result has no ids. Groups
        do not get its messages `ttl_s` seconds after they were appended.
        """
        delivery = DeliveryTime.from_options(delay_s, deliver_at)
        messages: MessageList | MessageRows = check_bodies(bodies, keys, self._now_ms())
        if ttl_s is not None:
            messages = check_rows(add_ttl(merge_messages([messages]), ttl_s))
        call = PendingMessages(topic, messages, delivery=delivery)
        self._sender.put(call)
        return call.future

    def produce_rows(
        self,
        topic: str,
        rows: pa.RecordBatch,
        *,
        delay_s: float | None = None,
        deliver_at: datetime | float | None = None,
        ttl_s: float | None = None,
    ) -> Future[Produced]:
        """Produce a batch of the port's schema: shard_key, body, insertion_ms, headers."""
        delivery = DeliveryTime.from_options(delay_s, deliver_at)
        return self.submit_rows(topic, rows if ttl_s is None else add_ttl(rows, ttl_s), delivery)

    def submit_rows(
        self, topic: str, rows: pa.RecordBatch, delivery: DeliveryTime | None
    ) -> Future[Produced]:
        """As `produce_rows`, with a checked delivery time."""
        call = PendingMessages(topic, check_rows(rows), delivery=delivery)
        self._sender.put(call)
        return call.future

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait for the outcome of all batches. Returns False after the timeout."""
        return self._sender.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Send queued messages, then end the producer.

        After the timeout the remaining futures fail with `ConnectionLost`; their messages
        may still have been stored. A bus in this process still completes them.
        """
        if self._sender.close(timeout_s) and self._ends_on_bus:
            self._ends_on_bus = False  # a second `close` must not close it on the bus again
            request = ProducerClose(producer=self.name, epoch=self.epoch)
            try:
                self._connection.act_once(request.action_name, request.encode())
            except PolybusError:
                pass  # the bus expires it later

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(None if kind is None else FAILING_CLOSE_S)
