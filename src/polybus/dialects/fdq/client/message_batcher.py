"""Batches of messages that callers produce one by one.

Pending messages of one topic form a batch, and each message has a future. If nothing is in
flight, a batch is sent at once. Otherwise it is sent when its first message has waited for
`linger_s`, or when it is full. The caller that brings the last message sends it, because
waking a thread takes longer; so callers feel the back-pressure of a slow bus. If a caller
waits for a result, or `linger_s` is long, any response sends the pending batches, and the bus
sets the pace.

The queue of a producer of the bus (`native/client/produce_queue.py`) merges calls, too, by
other rules, so the two are separate. It keeps the order of calls over all topics and gives
each call its own ids and its own outcome: a call can be cancelled, and a refused batch is
split to find the call at fault. Here a message joins the pending batch of its topic whatever
came between, all messages of a batch share its outcome, and the bounds and `linger_s` hold
for all topics together, which several producers of the bus send.

    _order   held while sending, so that batches are submitted in the order they were taken
    _state   held for moments only, also by the thread that resolves futures, which must never
             wait for a sender. `add` takes its plain lock, which is faster than the condition
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING

from polybus.dialects.fdq.client.envelope import Headers
from polybus.dialects.fdq.client.message_columns import build_plain_batch
from polybus.errors import ConnectionLost
from polybus.kernel.task_future import finish_all
from polybus.model.delivery_time import DeliveryTime
from polybus.native.client.produce_queue import ProduceFuture, build_batch

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.dialects.fdq.limits import BatchOptions
    from polybus.native import Produced

Send = Callable[[str, "pa.RecordBatch", DeliveryTime | None], "Future[Produced]"]
PendingMessage = tuple[str | None, bytes, Headers | None]
LONG_LINGER_S = 0.01  # a linger of at least this is cut short by any response
# A caller that arrives within GRACE_S of the linger deadline sends, and the thread wakes
# GRACE_S after it: callers at a steady pace must not miss the deadline by a little.
GRACE_S = 0.0005
ROW_BYTES = 64  # memory of a pending message beside its key, body and headers
INTERRUPTED = "the sending thread was interrupted"


class MessageBatch:
    """Pending messages of one topic and delivery time, which become one batch."""

    __slots__ = ("bytes", "delivery", "futures", "has_headers", "messages", "times_ms", "topic")

    def __init__(self, topic: str, has_headers: bool, delivery: DeliveryTime | None) -> None:
        self.topic = topic
        self.delivery = delivery
        self.has_headers = has_headers
        self.messages: list[PendingMessage] = []
        self.times_ms = array("q")
        self.futures: list[ProduceFuture] = []
        self.bytes = 0

    def build_rows(self) -> pa.RecordBatch:
        if not self.has_headers and (rows := build_plain_batch(self.messages, self.times_ms)):
            return rows
        keys, bodies, headers = zip(*self.messages, strict=True)
        return build_batch(keys, bodies, self.times_ms, headers if self.has_headers else None)


class MessageBatcher:
    """Batches messages for any number of threads. `send` submits a batch and may block."""

    def __init__(
        self,
        options: BatchOptions,
        send: Send,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._options = options
        self._send = send
        self._clock = clock
        self._wall_ns = wall_ns
        self._order = Lock()
        self._lock = Lock()
        self._state = Condition(self._lock)
        self._idle = Condition(self._lock)  # notified when nothing is pending or in flight
        self._pending: list[MessageBatch] = []
        # The batch that takes a topic's next message; delayed messages have batches of their own.
        self._open: dict[str | tuple[str, DeliveryTime], MessageBatch] = {}
        self._since_s = 0.0  # when the first pending message arrived
        # Every later batch of these topics has the headers column, because a change of columns
        # opens a new stream.
        self.topics_with_headers: set[str] = set()
        self._bytes = 0
        self._rows = 0
        self._in_flight = 0
        self._is_flush_requested = False
        self._has_waiter = False  # a caller waits for the result of a pending message
        self._closed = False
        self._thread: Thread | None = None
        self._is_timed_wait = False  # the thread wakes before a message added now is due

    def add(
        self,
        topic: str,
        key: str | None,
        body: bytes,
        headers: Headers | None,
        delivery: DeliveryTime | None = None,
    ) -> tuple[ProduceFuture, bool]:
        """Queue a message. Returns its future and whether the queue is full and must be sent."""
        now_ms = self._wall_ns() // 1_000_000
        size = ROW_BYTES + len(body) + (len(key) if key else 0)
        if headers:
            size += sum([len(name) + len(value) for name, value in headers])
        options = self._options
        with self._lock:
            if self._closed:
                self._check_open()
            batch = self._open.get(topic if delivery is None else (topic, delivery))
            if batch is None or batch.bytes + size > options.max_batch_bytes:
                batch = self._begin(topic, delivery)
            if headers is not None:
                batch.has_headers = True
            future = ProduceFuture()
            future.set_running_or_notify_cancel()  # a running future cannot be cancelled
            batch.messages.append((key, body, headers))
            batch.times_ms.append(now_ms)
            batch.futures.append(future)
            batch.bytes += size
            self._bytes += size
            self._rows += 1
            is_full = self._rows >= options.max_batch_rows or self._bytes >= options.max_batch_bytes
        return future, is_full

    def is_due(self) -> bool:
        """Return whether several messages are pending and their linger deadline has come."""
        return self._rows > 1 and self._in_flight > 0 and self._until_due_s() <= GRACE_S

    def send_pending(self) -> None:
        """Submit all pending messages. Blocks while the bus takes no more."""
        with self._order:
            self._drain()

    def send_if_free(self) -> None:
        """Submit pending messages now if nothing is in flight, else with the next response."""
        with self._lock:
            is_free = not self._in_flight
            self._has_waiter = not is_free
        if is_free:
            self.send_pending()

    def send_rows(
        self, topic: str, rows: pa.RecordBatch, delivery: DeliveryTime | None = None
    ) -> Future[Produced]:
        """Submit a batch of its own, after all pending messages."""
        with self._order:
            self._drain()
            with self._state:
                self._check_open()
                self._in_flight += 1
            return self._submit(topic, lambda: rows, None, delivery)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait for the result of every added message. Returns False on a timeout."""
        with self._idle:
            self._is_flush_requested = bool(self._pending)
            self._state.notify()
            return self._idle.wait_for(lambda: not self._in_flight and not self._pending, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Take no more messages, then flush."""
        with self._state:
            self._closed = True
        return self.flush(timeout_s)

    # --- callers hold _state

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionLost("producer is closed")

    def _begin(self, topic: str, delivery: DeliveryTime | None) -> MessageBatch:
        batch = MessageBatch(topic, topic in self.topics_with_headers, delivery)
        self._open[topic if delivery is None else (topic, delivery)] = batch
        if not self._pending:
            self._since_s = self._clock()
            # A thread in a timed wait looks in time anyway; waking it would cost a switch.
            if not (self._in_flight and self._is_timed_wait):
                self._state.notify()
        self._pending.append(batch)
        if self._thread is None:
            self._thread = Thread(target=self._run, name="polybus-fdq-batcher", daemon=True)
            self._thread.start()
        return batch

    def _until_due_s(self) -> float:
        """Return how long the pending messages may still wait."""
        if self._is_flush_requested or not self._in_flight:
            return 0.0
        return self._since_s + self._options.linger_s - self._clock()

    # --- callers hold _order

    def _drain(self) -> None:
        with self._state:
            taken, self._pending, self._open = deque(self._pending), [], {}
            self._rows = self._bytes = 0
            self._in_flight += len(taken)
            self._is_flush_requested = self._has_waiter = False
        try:
            while taken:
                batch = taken.popleft()
                if batch.has_headers:
                    self.topics_with_headers.add(batch.topic)
                self._submit(batch.topic, batch.build_rows, batch, batch.delivery)
        finally:  # after Ctrl-C the futures of the rest must still be resolved
            for batch in taken:
                self._on_done(batch, _failed_future(ConnectionLost(INTERRUPTED)))

    def _submit(
        self,
        topic: str,
        build_rows: Callable[[], pa.RecordBatch],
        batch: MessageBatch | None,
        delivery: DeliveryTime | None,
    ) -> Future[Produced]:
        try:
            future = self._send(topic, build_rows(), delivery)
        except Exception as error:  # any error must reach the futures, or their callers hang
            future = _failed_future(error)
        except BaseException:
            self._on_done(batch, _failed_future(ConnectionLost(INTERRUPTED)))
            raise
        future.add_done_callback(partial(self._on_done, batch))
        return future

    # --- on other threads

    def _on_done(self, batch: MessageBatch | None, done: Future[Produced]) -> None:
        """Resolve the futures of a batch, on the thread that got the response."""
        error = ConnectionLost("produce was cancelled") if done.cancelled() else done.exception()
        if batch is not None:
            result = done.result() if error is None else None
            finish_all(batch.futures, result, error)
        with self._state:
            self._in_flight -= 1
            if self._pending:
                if (
                    self._has_waiter
                    or not self._in_flight
                    or self._options.linger_s >= LONG_LINGER_S
                ):
                    self._is_flush_requested = True
                    self._state.notify()
            elif not self._in_flight:
                self._idle.notify_all()

    def _run(self) -> None:
        """Send pending batches when they are due, until the batcher is closed and empty."""
        while True:
            with self._state:
                while not self._pending or self._until_due_s() > 0:
                    if self._pending:
                        self._wait(self._until_due_s())
                    elif self._closed:
                        return
                    else:
                        self._wait(self._options.linger_s if self._in_flight else None)
            self.send_pending()

    def _wait(self, timeout_s: float | None) -> None:
        self._is_timed_wait = timeout_s is not None
        self._state.wait(None if timeout_s is None else timeout_s + GRACE_S)
        self._is_timed_wait = False


def _failed_future(error: Exception) -> Future[Produced]:
    future: Future[Produced] = Future()
    future.set_exception(error)
    return future
