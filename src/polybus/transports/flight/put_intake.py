"""Batches of put streams: submitted to the bus, and answered when they are on disk.

The compiled port reads streams and applies back-pressure (`kernel.flight_port`). One thread
takes the batches of all streams and all finished commits at once, so many streams take the
interpreter lock no more often than one.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from polybus.errors import MalformedRequest, TooLarge
from polybus.kernel.flight_port import answer_batches
from polybus.model import arrow
from polybus.model.block import Block, Keys
from polybus.model.delivery_time import FIELDS as DELIVERY_FIELDS
from polybus.model.delivery_time import DeliveryTime
from polybus.model.stamp import Stamp
from polybus.transports.flight.flight_status import describe_error

if TYPE_CHECKING:
    from polybus.kernel.flight_port import BatchQueue, PendingBatch

T = TypeVar("T")

MAX_METADATA_BYTES = 4096
STAMP_FIELDS = 3  # of a batch without a delivery time, which nearly every batch is


class PutSlowPath(Generic[T]):
    """A thread for batches that may have to wait before they are submitted.

    The caller's right and the topic are known once a stream is open. After a change of the
    rules, or after a drop, they must be checked or created again, which waits for the event
    loop or a commit. The intake thread of all streams must not wait for that.

    Batches of a stream keep their order: while one is here, the next ones follow it.
    """

    def __init__(self, take: Callable[[T], None]) -> None:
        """The thread calls `take` with one batch after the other."""
        self._take = take
        self._queue: SimpleQueue[tuple[int, T] | None] = SimpleQueue()
        self._held: dict[int, int] = {}  # number of pending batches by stream
        self._lock = Lock()
        self._thread: Thread | None = None  # started on first use; most ports never need it

    def has_batches(self, stream: int) -> bool:
        """Return whether batches of a stream are pending here."""
        return stream in self._held

    def add(self, stream: int, batch: T) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._run, name="polybus-aside", daemon=True)
            self._thread.start()
        with self._lock:
            self._held[stream] = self._held.get(stream, 0) + 1
        self._queue.put((stream, batch))

    def close(self, timeout_s: float) -> None:
        """Process pending batches, for at most the timeout."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            stream, batch = entry
            try:
                self._take(batch)
            finally:
                # Only now: until the batch is taken, the next ones must follow it here.
                with self._lock:
                    left = self._held[stream] - 1
                    if left:
                        self._held[stream] = left
                    else:
                        del self._held[stream]


class PutTarget(NamedTuple):
    """Submits the batches of one stream and encodes their answers.

    Unless it `is_ready`, `submit` may block.
    """

    submit: Callable[[Block, Stamp | None, DeliveryTime | None], Future[Any]]
    encode_answer: Callable[[int | None, Any], bytes]
    is_ready: Callable[[], bool]


Arrival = tuple[PutTarget, "PendingBatch", bytes, int]  # with metadata and size
EncodedAnswers = list[tuple["PendingBatch", bytes]]


PendingAnswer = tuple[PutTarget, "PendingBatch", int | None]  # with the counter of the stamp


class PutIntake:
    def __init__(
        self,
        queue: BatchQueue,
        max_batch_bytes: int,
        now_ms: Callable[[], int],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._queue = queue
        self._max_batch_bytes = max_batch_bytes
        self._now_ms = now_ms
        self._on_error = on_error
        self._done: deque[tuple[PendingAnswer, Future[Any]]] = deque()
        self._noting = Lock()
        self._slow_path: PutSlowPath[Arrival] = PutSlowPath(self._take_slowly)
        self._thread = Thread(target=self._run, name="polybus-intake", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end, after the queue was closed. Returns False after the timeout."""
        self._slow_path.close(timeout_s)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (arrivals := self._queue.pop_all()) is not None:
            answers: EncodedAnswers = []
            for arrival in arrivals:
                target = arrival[0]
                if self._slow_path.has_batches(id(target)) or not target.is_ready():
                    self._slow_path.add(id(target), arrival)
                else:
                    self._take(arrival, answers)
            while self._done:
                (target, pending, counter), outcome = self._done.popleft()
                try:
                    answer = target.encode_answer(counter, outcome.result())
                except Exception as error:
                    self._refuse(pending, counter, error, answers)
                else:
                    answers.append((pending, answer))
            if answers:  # in one step, which releases the interpreter lock once
                answer_batches(answers)

    def _take_slowly(self, arrival: Arrival) -> None:
        answers: EncodedAnswers = []
        self._take(arrival, answers)
        answer_batches(answers)

    def _take(self, arrival: Arrival, answers: EncodedAnswers) -> None:
        target, pending, metadata, size = arrival
        stamp = delivery = counter = None
        try:
            if metadata:
                fields = read_json(metadata, MAX_METADATA_BYTES, "app_metadata")
                if len(fields) != STAMP_FIELDS:
                    delivery, fields = _take_delivery(fields)
                if fields or delivery is None:
                    stamp = Stamp.parse(fields)
                    counter = stamp.counter
            outcome = target.submit(self._block(pending, size), stamp, delivery)
        except Exception as error:
            self._refuse(pending, counter, error, answers)
        else:
            outcome.add_done_callback(partial(self._on_done, (target, pending, counter)))

    def _block(self, pending: PendingBatch, size: int) -> Block:
        if size > self._max_batch_bytes:
            most = self._max_batch_bytes
            raise TooLarge(f"a batch of {size} bytes: at most {most} are taken")
        # Batches of the usual columns are taken from the received buffers, without Arrow.
        columns = pending.columns() if size >= 0 else None
        bodies = offsets = keys = key_offsets = times = None
        try:
            if columns is None:
                batch = pending.batch()
                if batch is None:
                    raise MalformedRequest("metadata without a batch")
                return arrow.block_of(batch, self._now_ms())
            bodies, offsets, keys, key_offsets, times = columns
            with arrow.BatchErrorTranslator():
                return Block.from_columns(
                    bodies,
                    offsets,
                    insertion_ms=self._now_ms() if times is None else times,
                    keys=None if keys is None or key_offsets is None else Keys(keys, key_offsets),
                )
        finally:
            # The views are valid only until `release`.
            columns = bodies = offsets = keys = key_offsets = times = None
            pending.release()

    def _on_done(self, pending: PendingAnswer, outcome: Future[Any]) -> None:
        """Queue a finished commit; only the first of many wakes the intake thread.

        Runs on the store's thread or on that of the slow path, hence the lock.
        """
        with self._noting:
            self._done.append((pending, outcome))
            is_first = len(self._done) == 1
        if is_first:
            self._queue.wake()

    def _refuse(
        self, pending: PendingBatch, counter: int | None, error: Exception, answers: EncodedAnswers
    ) -> None:
        self._on_error(error)
        refusal = {"counter": counter, "error": describe_error(error)}
        answers.append((pending, json.dumps(refusal).encode()))


def _take_delivery(fields: dict[str, Any]) -> tuple[DeliveryTime | None, dict[str, Any]]:
    """Return the delivery time in the metadata of a batch, and the fields of its stamp."""
    rest = {name: value for name, value in fields.items() if name not in DELIVERY_FIELDS}
    return DeliveryTime.parse(fields), rest


def read_json(raw: bytes, max_bytes: int, what: str) -> dict[str, Any]:
    """Return a JSON object; raise `MalformedRequest` if it is invalid or too large."""
    if len(raw) > max_bytes:
        raise MalformedRequest(f"{what} must have at most {max_bytes} bytes, got {len(raw)}")
    try:
        value = json.loads(str(raw, "utf-8")) if raw else {}
    except (ValueError, RecursionError):
        raise MalformedRequest(f"{what} must be JSON") from None
    if not isinstance(value, dict):
        raise MalformedRequest(f"{what} must be a JSON object")
    return value
