"""A producer: messages by key into durable topics, each there once, in order per key.

A named one keeps its name across processes: a newer one of the same name fences the
older. What is checked here is each message; what travels are batches (`merging`), on the
streams of one or a few producers of the bus (`lines`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import pyarrow as pa

from polybus.dialects.fdq.client import fork_guard, message_columns
from polybus.dialects.fdq.client.message_batcher import MessageBatcher
from polybus.dialects.fdq.client.message_future import MessageFuture
from polybus.dialects.fdq.client.producer_pool import ProducerPool
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
from polybus.native import bus_client as buses

if TYPE_CHECKING:
    from polybus.dialects.fdq.client.envelope import MessageRequest
    from polybus.native import ClientOptions, Produced

# A program that fails must not wait for ever for a bus that is not there.
FAILING_CLOSE_S = 5.0


class Producer:
    """Any number of threads may use it. What one of them produces for a key stays in order.

    `create=False`: a topic that is not there is `DoesNotExist`, instead of being made.
    Futures are told by a thread of the producer: what is called back from there must not
    wait for the producer.
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
        merging = BatchOptions(linger_s, max_batch_rows, max_batch_bytes)
        if name == "":
            raise UsageError("a producer's name has at least one character; None is none")
        self._pid = fork_guard.pid
        self._bus = buses.connect(url, options)
        self._create = create
        try:
            self._pool = ProducerPool(self._bus, name, create=create)
        except BaseException:
            self._bus.close()
            raise
        self._batcher = MessageBatcher(merging, self._pool.send)
        self._known: set[str] = set()  # topics

    @property
    def name(self) -> str:
        """The one given; else what the bus calls it."""
        return self._pool.first.name

    @property
    def epoch(self) -> int:
        """How often this name was opened, this time included."""
        return self._pool.first.epoch

    @overload
    def produce(
        self,
        topic: str,
        shard_key: str | None,
        message: bytes,
        headers: Mapping[str, bytes] | None = None,
        *,
        wait: Literal[True] = True,
    ) -> Produced: ...

    @overload
    def produce(
        self,
        topic: str,
        shard_key: str | None,
        message: bytes,
        headers: Mapping[str, bytes] | None = None,
        *,
        wait: Literal[False],
    ) -> Future[Produced]: ...

    @overload
    def produce(
        self,
        topic: str,
        shard_key: str | None,
        message: bytes,
        headers: Mapping[str, bytes] | None = None,
        *,
        wait: bool,
    ) -> Produced | Future[Produced]: ...

    def produce(
        self,
        topic: str,
        shard_key: str | None,
        message: bytes,
        headers: Mapping[str, bytes] | None = None,
        *,
        wait: bool = True,
    ) -> Produced | Future[Produced]:
        """On disk when this returns; with `wait=False`, when its future is done.

        The ids are those of all that travelled together.
        """
        receipt, is_full = self.append(topic, shard_key, message, headers)
        if is_full or self._batcher.is_due():
            self._batcher.send_waiting()
        elif wait:
            self._batcher.send_if_free()
        return receipt.result() if wait else receipt

    @overload
    def produce_batch(
        self,
        topic: str,
        messages: Iterable[MessageRequest | tuple[Any, ...]] | pa.RecordBatch,
        *,
        wait: Literal[True] = True,
    ) -> Produced: ...

    @overload
    def produce_batch(
        self,
        topic: str,
        messages: Iterable[MessageRequest | tuple[Any, ...]] | pa.RecordBatch,
        *,
        wait: Literal[False],
    ) -> Future[Produced]: ...

    @overload
    def produce_batch(
        self,
        topic: str,
        messages: Iterable[MessageRequest | tuple[Any, ...]] | pa.RecordBatch,
        *,
        wait: bool,
    ) -> Produced | Future[Produced]: ...

    def produce_batch(
        self,
        topic: str,
        messages: Iterable[MessageRequest | tuple[Any, ...]] | pa.RecordBatch,
        *,
        wait: bool = True,
    ) -> Produced | Future[Produced]:
        """All of them or none, over all shards. A batch of Arrow has the native port's columns."""
        future = self.send_batch(topic, messages)
        return future.result() if wait else future

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits for the outcome of all that was produced; False if time is up."""
        fork_guard.check_process(self._pid, "producer")
        return self._batcher.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Sends what waits, then ends. What has no outcome when time is up is `ConnectionLost`.

        Such a message may have been stored all the same.
        """
        if self._pid != fork_guard.pid:
            return
        is_done = self._batcher.close(timeout_s)
        self._pool.close(None if is_done else 0.0)
        self._bus.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(None if error is None else FAILING_CLOSE_S)

    # --- for the async twin, too

    def append(
        self,
        topic: str,
        shard_key: str | None,
        message: bytes,
        headers: Mapping[str, bytes] | None = None,
    ) -> tuple[MessageFuture, bool]:
        """Takes a message, and says whether what waits is to be sent now."""
        if topic not in self._known or self._pid != fork_guard.pid:
            self.check_topic(topic)
        # What is plainly right, which is nearly all there ever is, goes without a call.
        if shard_key is not None and not (
            type(shard_key) is str and shard_key.isascii() and len(shard_key) <= MAX_KEY_BYTES
        ):
            message_columns.check_key(shard_key)
        if type(message) is not bytes or len(message) > MAX_MESSAGE_BYTES:
            message = message_columns.check_message(message)
        found = None if headers is None else message_columns.check_headers(headers)
        return self._batcher.add(topic, shard_key, message, found)

    def send_batch(
        self, topic: str, messages: Iterable[MessageRequest | tuple[Any, ...]] | pa.RecordBatch
    ) -> Future[Produced]:
        if topic not in self._known or self._pid != fork_guard.pid:
            self.check_topic(topic)
        return self._batcher.send_rows(topic, self._rows(topic, messages))

    def send_waiting(self) -> None:
        self._batcher.send_waiting()

    def check_topic(self, topic: str) -> None:
        """The first message for a topic: may it be one, and is it there?"""
        fork_guard.check_process(self._pid, "producer")
        topic_name.check_topic_name(topic)
        if not self._create:
            self._bus.act("topic.info", topic=topic)
        self._known.add(topic)

    def is_known_topic(self, topic: str) -> bool:
        """Would `add` not have to ask the bus?"""
        return self._create or topic in self._known

    def _rows(self, topic: str, messages: Any) -> pa.RecordBatch:
        if isinstance(messages, pa.RecordBatch):
            return message_columns.check_rows(messages)
        if isinstance(messages, str | bytes | Mapping):
            messages = [messages]  # which is then refused for what it is
        if not isinstance(messages, Iterable):
            raise MalformedRequest(f"a batch is a list of messages, not {type(messages).__name__}")
        now_ms = time.time_ns() // 1_000_000
        with_headers = self._batcher.wants_headers(topic)
        rows = message_columns.build_request_batch(messages, now_ms, with_headers=with_headers)
        if rows.num_columns > message_columns.SIMPLE_COLUMNS:
            self._batcher.has_headers(topic)
        return rows
