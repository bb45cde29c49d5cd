"""A producer: keyed messages into durable topics, exactly once and in order per key.

A named producer keeps its name across processes; a newer one of the same name fences the
older. This module checks each message. `MessageBatcher` collects messages into batches, and
the batches travel on the streams of one or a few producers of the bus (`ProducerPool`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypedDict, Unpack

import pyarrow as pa

from polybus.dialects.fdq.client import envelope, fork_guard, message_columns
from polybus.dialects.fdq.client.message_batcher import MessageBatcher
from polybus.dialects.fdq.limits import (
    LINGER_S,
    MAX_BATCH_BYTES,
    MAX_BATCH_ROWS,
    MAX_KEY_BYTES,
    MAX_MESSAGE_BYTES,
    BatchOptions,
)
from polybus.errors import MalformedRequest, UsageError
from polybus.model import topic_name
from polybus.model.delivery_time import DeliveryTime
from polybus.native import bus_client as buses
from polybus.native.client.produce_queue import SIMPLE_SCHEMA, ProduceFuture, add_ttl

if TYPE_CHECKING:
    from polybus import native
    from polybus.dialects.fdq.client.envelope import MessageRequest
    from polybus.native import Client, ClientOptions, Produced

Messages: TypeAlias = "Iterable[MessageRequest | tuple[Any, ...]] | pa.RecordBatch"

# A program that fails must not wait forever for a bus that is down.
FAILING_CLOSE_S = 5.0
MAX_PRODUCERS = 8  # each has a stream and two threads


class DeliveryOptions(TypedDict, total=False):
    """When the bus appends messages, and how long groups get them; see `Producer.produce`."""

    delay_s: float | None
    deliver_at: datetime | float | None
    ttl_s: float | None


class ProducerPool:
    """The producers of the bus behind one FDQ producer.

    A producer of the bus sends to one topic at a time, because its sequence numbers are one
    series. A named FDQ producer therefore has exactly one. Without a name, topics are spread
    over a few, so that they do not wait for each other; a topic always keeps its producer.
    """

    def __init__(self, bus: Client, name: str | None, *, create: bool = True) -> None:
        self._bus = bus
        self._create = create
        self._is_named = name is not None
        self.first = bus.producer(name, create=create)  # has the name
        self._all = [self.first]
        self._of_topic: dict[str, native.Producer] = {}

    def send(
        self, topic: str, rows: pa.RecordBatch, delivery: DeliveryTime | None
    ) -> Future[Produced]:
        """Submit a batch. Only one thread may call this at a time."""
        producer = self._of_topic.get(topic)
        if producer is None:
            producer = self.first
            if self._of_topic and not self._is_named:
                if len(self._all) < MAX_PRODUCERS:
                    self._all.append(self._bus.producer(create=self._create))
                    producer = self._all[-1]
                else:
                    producer = self._all[len(self._of_topic) % MAX_PRODUCERS]
            self._of_topic[topic] = producer
        return producer.submit_rows(topic, rows, delivery)

    def close(self, timeout_s: float | None) -> None:
        for producer in self._all:
            producer.close(timeout_s)


class Producer:
    """Produces messages from any number of threads, in order per thread and key.

    With `create=False` a topic that does not exist raises `DoesNotExist`; otherwise it is
    created. A thread of the producer resolves the futures, so their callbacks must not wait
    for the producer.
    """

    def __init__(
        self,
        url: str | None = None,
        name: str | None = None,
        *,
        create: bool = True,
        linger_s: float = LINGER_S,
        max_batch_rows: int = MAX_BATCH_ROWS,
        max_batch_bytes: int = MAX_BATCH_BYTES,
        options: ClientOptions | None = None,
    ) -> None:
        batching = BatchOptions(linger_s, max_batch_rows, max_batch_bytes)
        if name == "":
            raise UsageError("producer name must have at least one character, or be None")
        self._pid = fork_guard.pid
        self._bus = buses.connect(url, options)
        self._create = create
        try:
            self._pool = ProducerPool(self._bus, name, create=create)
        except BaseException:
            self._bus.close()
            raise
        self._batcher = MessageBatcher(batching, self._pool.send)
        self._known: set[str] = set()  # topics that were checked

    @property
    def name(self) -> str:
        """The given name, or the one that the bus has chosen."""
        return self._pool.first.name

    @property
    def epoch(self) -> int:
        """How often this name was opened, including this time."""
        return self._pool.first.epoch

    def produce(
        self,
        topic: str,
        shard_key: str | None,
        message: bytes,
        headers: Mapping[str, bytes] | None = None,
        *,
        wait: bool = True,
        **options: Unpack[DeliveryOptions],
    ) -> Produced:
        """Produce one message; it is durable when this returns.

        Returns the ids of the batch that it travelled in. With `wait=False`, returns the
        future of `produce_nowait` instead, which has the right type.

        With `delay_s`, or `deliver_at` (a datetime with a time zone, or seconds since 1970),
        the bus appends the message when it is due, by its clock; the result has no ids. Groups
        do not get the message `ttl_s` seconds after it was appended.
        """
        if not wait:
            return self.produce_nowait(topic, shard_key, message, headers, **options)  # type: ignore[return-value]
        future, is_full = self.append(topic, shard_key, message, headers, **options)
        if is_full or self._batcher.is_due():
            self._batcher.send_pending()
        else:
            self._batcher.send_if_free()
        return future.result()

    def produce_nowait(
        self,
        topic: str,
        shard_key: str | None,
        message: bytes,
        headers: Mapping[str, bytes] | None = None,
        **options: Unpack[DeliveryOptions],
    ) -> Future[Produced]:
        """Take one message and return a future that is done when the message is durable."""
        future, is_full = self.append(topic, shard_key, message, headers, **options)
        if is_full or self._batcher.is_due():
            self._batcher.send_pending()
        return future

    def produce_batch(
        self,
        topic: str,
        messages: Messages,
        *,
        wait: bool = True,
        **options: Unpack[DeliveryOptions],
    ) -> Produced:
        """Produce all messages or none, over all shards. Options are those of `produce`.

        An Arrow batch must have the columns of the native port. With `wait=False`, returns
        the future of `produce_batch_nowait` instead, which has the right type.
        """
        future = self.produce_batch_nowait(topic, messages, **options)
        return future.result() if wait else future  # type: ignore[return-value]

    def produce_batch_nowait(
        self, topic: str, messages: Messages, **options: Unpack[DeliveryOptions]
    ) -> Future[Produced]:
        """Take a batch and return a future that is done when the batch is durable."""
        if topic not in self._known or self._pid != fork_guard.pid:
            self.check_topic(topic)
        delivery = DeliveryTime.from_options(options.get("delay_s"), options.get("deliver_at"))
        rows = self._build_rows(topic, messages)
        if (ttl_s := options.get("ttl_s")) is not None:
            rows = add_ttl(rows, ttl_s)
            self._batcher.topics_with_headers.add(topic)
        return self._batcher.send_rows(topic, rows, delivery)

    def _build_rows(self, topic: str, messages: Messages) -> pa.RecordBatch:
        if isinstance(messages, pa.RecordBatch):
            return message_columns.check_rows(messages)
        if isinstance(messages, str | bytes | Mapping):
            messages = [messages]  # so that the error names the type of the message
        if not isinstance(messages, Iterable):
            raise MalformedRequest(
                f"batch must be a list of messages, got {type(messages).__name__}"
            )
        now_ms = time.time_ns() // 1_000_000
        with_headers = topic in self._batcher.topics_with_headers
        rows = message_columns.build_request_batch(messages, now_ms, with_headers=with_headers)
        if rows.num_columns > len(SIMPLE_SCHEMA):
            self._batcher.topics_with_headers.add(topic)
        return rows

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait for the result of every produced message. Returns False on a timeout."""
        fork_guard.check_process(self._pid, "producer")
        return self._batcher.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Send pending messages, then disconnect.

        A message without a result after `timeout_s` fails with `ConnectionLost`. It may have
        been stored nevertheless.
        """
        if self._pid != fork_guard.pid:
            return
        is_done = self._batcher.close(timeout_s)
        self._pool.close(None if is_done else 0.0)
        self._bus.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(None if kind is None else FAILING_CLOSE_S)

    # --- shared with fdq.aio.Producer

    def append(
        self,
        topic: str,
        shard_key: str | None,
        message: bytes,
        headers: Mapping[str, bytes] | None = None,
        *,
        delay_s: float | None = None,
        deliver_at: datetime | float | None = None,
        ttl_s: float | None = None,
    ) -> tuple[ProduceFuture, bool]:
        """Check and queue a message. Returns its future and whether the queue must be sent."""
        if topic not in self._known or self._pid != fork_guard.pid:
            self.check_topic(topic)
        # Nearly every message passes these inline conditions, which saves two calls.
        if shard_key is not None and not (
            type(shard_key) is str and shard_key.isascii() and len(shard_key) <= MAX_KEY_BYTES
        ):
            envelope.check_key(shard_key)
        if type(message) is not bytes or len(message) > MAX_MESSAGE_BYTES:
            message = envelope.check_message(message)
        checked = None
        if headers is not None or ttl_s is not None:
            checked = envelope.check_headers(headers, ttl_s)
        delivery = None
        if delay_s is not None or deliver_at is not None:
            delivery = DeliveryTime.from_options(delay_s, deliver_at)
        return self._batcher.add(topic, shard_key, message, checked, delivery)

    def send_pending(self) -> None:
        self._batcher.send_pending()

    def check_topic(self, topic: str) -> None:
        """Check the topic of a first message: its name and, without `create`, its existence."""
        fork_guard.check_process(self._pid, "producer")
        topic_name.check_topic_name(topic)
        if not self._create:
            self._bus.act("topic.info", topic=topic)
        self._known.add(topic)

    def is_known_topic(self, topic: str) -> bool:
        """Return whether `append` for the topic makes no call to the bus."""
        return self._create or topic in self._known
