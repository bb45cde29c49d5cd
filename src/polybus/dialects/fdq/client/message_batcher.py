"""What is produced one by one travels together: many messages, one batch.

Messages of one topic wait together, each with a future of its own. If nothing is on its
way they are sent at once. Else they are sent when the first has waited for `linger_s`, or
enough have gathered; then whoever brought the last one sends them (and feels it if the bus
is slower than he is): to wake a thread for it takes longer. If somebody waits for an
outcome, or for `linger_s` one would wait long, any answer sends them, so that the bus sets
the pace.

    _order   held by whoever sends: what was taken first is handed over first
    _state   held for moments only: also by whoever tells outcomes, who must never wait
             for one who sends. For each message its plain lock is taken, which is quicker
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

from polybus.dialects.fdq.client.message_columns import Headers, build_batch, build_plain_batch
from polybus.dialects.fdq.client.message_future import MessageFuture, resolve_all
from polybus.errors import ConnectionLost

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.dialects.fdq.limits import BatchOptions
    from polybus.native import Produced

Send = Callable[[str, "pa.RecordBatch"], "Future[Produced]"]
Message = tuple[str | None, bytes, Headers | None]
LONG_LINGER_S = 0.01  # a linger from this on is cut short by any answer
# Whoever comes with a message so shortly before time is up sends, and so much after it the thread
# does: messages that come at a steady pace must not miss the moment by a little.
GRACE_S = 0.0005
ROW_BYTES = 64  # what a message costs beside its parts while it waits


class PendingMessages:
    """Messages of one topic that wait."""

    __slots__ = ("bytes", "condition", "has_headers", "messages", "receipts", "times_ms", "topic")

    def __init__(self, topic: str, has_headers: bool) -> None:
        self.topic = topic
        self.has_headers = has_headers
        self.messages: list[Message] = []
        self.times_ms = array("q")
        self.receipts: list[MessageFuture] = []
        self.condition = Condition()
        self.bytes = 0

    def rows(self) -> pa.RecordBatch:
        if not self.has_headers and (found := build_plain_batch(self.messages, self.times_ms)):
            return found
        keys, bodies, headers = zip(*self.messages, strict=True)
        return build_batch(keys, bodies, self.times_ms, headers if self.has_headers else None)


class MessageBatcher:
    """For any number of threads. `send` hands a batch over, and may block."""

    def __init__(
        self,
        merging: BatchOptions,
        send: Send,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._merging = merging
        self._send = send
        self._clock = clock
        self._wall_ns = wall_ns
        self._order = Lock()
        self._lock = Lock()
        self._state = Condition(self._lock)
        self._settled = Condition(self._lock)  # nothing waits, and nothing is on its way
        self._waiting: list[PendingMessages] = []
        self._open: dict[str, PendingMessages] = {}  # of those, where the next of a topic goes
        self._since_s = 0.0  # when the first of them came
        self._with_headers: set[str] = set()  # topics whose batches have them: all from then on
        self._bytes = 0
        self._rows = 0
        self._in_flight = 0
        self._is_flush_requested = False
        self._has_waiter = False  # somebody waits for the outcome of what waits
        self._closed = False
        self._thread: Thread | None = None
        self._is_timed_wait = False  # the thread looks again before what comes now is due

    def add(
        self, topic: str, key: str | None, body: bytes, headers: Headers | None
    ) -> tuple[MessageFuture, bool]:
        """Its receipt, and whether so much waits now that it must be sent."""
        now_ms = self._wall_ns() // 1_000_000
        size = ROW_BYTES + len(body) + (len(key) if key else 0)
        if headers:
            size += sum([len(name) + len(value) for name, value in headers])
        most = self._merging
        with self._lock:
            if self._closed:
                self._check_open()
            gathering = self._open.get(topic)
            if gathering is None or gathering.bytes + size > most.max_batch_bytes:
                gathering = self._begin(topic)
            if headers is not None:
                gathering.has_headers = True
            receipt = MessageFuture(gathering.condition)
            gathering.messages.append((key, body, headers))
            gathering.times_ms.append(now_ms)
            gathering.receipts.append(receipt)
            gathering.bytes += size
            self._bytes += size
            self._rows += 1
            is_full = self._rows >= most.max_batch_rows or self._bytes >= most.max_batch_bytes
        return receipt, is_full

    def is_due(self) -> bool:
        """Has the first of several waited for so long that whoever comes is to send them?"""
        return self._rows > 1 and self._in_flight > 0 and self._until_due_s() <= GRACE_S

    def send_waiting(self) -> None:
        """Hands over all that waits now; blocks while the bus takes no more."""
        with self._order:
            self._drain()

    def send_if_free(self) -> None:
        """Hands over at once what waits if nothing is on its way; else with the next answer."""
        with self._lock:
            is_free = not self._in_flight
            self._has_waiter = not is_free
        if is_free:
            self.send_waiting()

    def send_rows(self, topic: str, rows: pa.RecordBatch) -> Future[Produced]:
        """A batch of its own, behind all that waits."""
        with self._order:
            self._drain()
            with self._state:
                self._check_open()
                self._in_flight += 1
            return self._submit(topic, lambda: rows, None)

    def request_flush(self) -> None:
        """All that waits now is sent soon, by another thread."""
        with self._state:
            self._is_flush_requested = bool(self._waiting)
            self._state.notify()

    def wants_headers(self, topic: str) -> bool:
        """Have batches of this topic had headers? A change of columns is a new stream."""
        return topic in self._with_headers

    def has_headers(self, topic: str) -> None:
        """From now on."""
        self._with_headers.add(topic)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits for the outcome of all that was added; False if time is up."""
        self.request_flush()
        with self._settled:
            return self._settled.wait_for(
                lambda: not self._in_flight and not self._waiting, timeout_s
            )

    def close(self, timeout_s: float | None = None) -> bool:
        """Nothing more is taken; else as `flush`."""
        with self._state:
            self._closed = True
        return self.flush(timeout_s)

    # --- under _state

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionLost("this producer was closed")

    def _begin(self, topic: str) -> PendingMessages:
        gathering = self._open[topic] = PendingMessages(topic, topic in self._with_headers)
        if not self._waiting:
            self._since_s = self._clock()
            if not (self._in_flight and self._is_timed_wait):
                self._state.notify()
        self._waiting.append(gathering)
        if self._thread is None:
            self._thread = Thread(target=self._run, name="polybus-fdq-merging", daemon=True)
            self._thread.start()
        return gathering

    def _take(self) -> list[PendingMessages]:
        taken, self._waiting, self._open = self._waiting, [], {}
        self._rows = self._bytes = 0
        self._in_flight += len(taken)
        self._is_flush_requested = self._has_waiter = False
        return taken

    def _until_due_s(self) -> float:
        """How long what waits may still wait."""
        if self._is_flush_requested or not self._in_flight:
            return 0.0
        return self._since_s + self._merging.linger_s - self._clock()

    # --- under _order

    def _drain(self) -> None:
        with self._state:
            taken = deque(self._take())
        try:
            while taken:
                one = taken.popleft()
                if one.has_headers:
                    self._with_headers.add(one.topic)
                self._submit(one.topic, one.rows, one)
        finally:  # Ctrl-C: whoever waits for the rest hears of it
            for one in taken:
                self._on_done(one, _failed(ConnectionLost("whoever sent was interrupted")))

    def _submit(
        self, topic: str, rows: Callable[[], pa.RecordBatch], gathering: PendingMessages | None
    ) -> Future[Produced]:
        try:
            future = self._send(topic, rows())
        except Exception as error:  # whoever waits must hear of it, whatever it is
            future = _failed(error)
        except BaseException:
            self._on_done(gathering, _failed(ConnectionLost("whoever sent was interrupted")))
            raise
        future.add_done_callback(partial(self._on_done, gathering))
        return future

    # --- on threads of their own

    def _on_done(self, gathering: PendingMessages | None, done: Future[Produced]) -> None:
        """On the thread that knows the outcome."""
        error = ConnectionLost("it was called back") if done.cancelled() else done.exception()
        if gathering is not None:
            result = done.result() if error is None else None
            resolve_all(gathering.condition, gathering.receipts, result, error)
        with self._state:
            self._in_flight -= 1
            if self._waiting:
                if (
                    self._has_waiter
                    or not self._in_flight
                    or self._merging.linger_s >= LONG_LINGER_S
                ):
                    self._is_flush_requested = True
                    self._state.notify()
            elif not self._in_flight:
                self._settled.notify_all()

    def _run(self) -> None:
        while self._is_due():
            self.send_waiting()

    def _is_due(self) -> bool:
        """Waits until something is to be sent; False if nothing ever will be again."""
        with self._state:
            while True:
                if not self._waiting:
                    if self._closed:
                        return False
                    self._wait(self._merging.linger_s if self._in_flight else None)
                elif (left_s := self._until_due_s()) > 0:
                    self._wait(left_s)
                else:
                    return True

    def _wait(self, timeout_s: float | None) -> None:
        self._is_timed_wait = timeout_s is not None
        self._state.wait(None if timeout_s is None else timeout_s + GRACE_S)
        self._is_timed_wait = False


def _failed(error: Exception) -> Future[Produced]:
    future: Future[Produced] = Future()
    future.set_exception(error)
    return future
