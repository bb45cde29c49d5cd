"""A producer: what is handed over arrives once, in order, whatever happens on the way.

One thread sends, another reads answers. Batches are numbered as they are sent and
kept until they are answered:

    answered                      its futures are told
    refused by the bus            nothing of it is stored, so its number is free: it is
                                  told no, and those behind it move up and are sent again
                                  (a merged batch is sent again in its parts first)
    the connection is lost,       the outcome is not known: everything unanswered is sent
    an answer makes no sense      again with the same numbers, and the bus knows a repeat
    fenced, or forgotten          the producer is at its end: all are told so

The bus keeps the answers to the last 16 numbers, and so many are on their way at
most. All of them are for one topic: before another's turn the first are awaited,
since numbers are the producer's, and streams could overtake each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from threading import Condition, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from polybus.errors import (
    ConnectionLost,
    Fenced,
    PolybusError,
    Stale,
    UnknownProducer,
)
from polybus.native.batching import Batch, Produced, Queue, Waiting, rows_of
from polybus.native.connection import PASSING, Connection
from polybus.native.faults import told
from polybus.native.stream import PutStream

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Produced", "Producer"]

# After these no stamp of this producer will ever be taken again.
FATAL = (Fenced, UnknownProducer, Stale)
UNKNOWN = ("", "error", "internal")  # codes that leave open whether anything was stored


class Producer:
    """Made by `Client.producer`. Closing waits until everything is answered."""

    def __init__(
        self, connection: Connection, name: str, epoch: int, last_counter: int, now_ms: Any
    ) -> None:
        self.name = name
        self.epoch = epoch
        self._connection = connection
        self._now_ms = now_ms
        self._queue = Queue(connection.options)
        self._next = last_counter + 1
        self._unanswered: deque[Batch] = deque()
        self._changed = Condition()
        self._session: Session | None = None
        self._pauses = connection.pauses()
        self._dead: PolybusError | None = None
        self._giving_up = False
        self._thread = Thread(target=self._run, name=f"polybus-producer-{name}", daemon=True)
        self._thread.start()

    def produce(
        self, topic: str, bodies: Sequence[bytes], keys: Sequence[str | None] | None = None
    ) -> Future[Produced]:
        """One atomic batch; the future is done when it is on disk."""
        return self.produce_rows(topic, rows_of(bodies, keys, self._now_ms()))

    def produce_rows(self, topic: str, rows: pa.RecordBatch) -> Future[Produced]:
        """The same, of a batch in the port's schema."""
        if self._dead is not None:
            raise self._dead
        one = Waiting(topic, rows)
        self._queue.put(one)
        return one.future

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits for the outcome of all that was handed over; False if time is up."""
        return self._queue.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Sends what waits, then ends. What has no outcome when time is up is `ConnectionLost`."""
        self._queue.close()
        self._queue.flush(timeout_s)
        with self._changed:
            self._giving_up = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- the sending thread

    def _run(self) -> None:
        try:
            while self._dead is None and (batch := self._queue.take()) is not None:
                self._send(batch)
            while self._dead is None and self._unanswered and not self._giving_up:
                self._await(lambda: not self._unanswered)
        finally:
            self._end_session()
            self._fail_all(self._dead or ConnectionLost("closed before the bus had answered"))

    def _send(self, batch: Batch) -> None:
        self._make_way(batch)
        with self._changed:
            batch.counter = self._next
            self._next += 1
            self._unanswered.append(batch)
        self._transmit([batch])

    def _make_way(self, batch: Batch) -> None:
        """Until there is a place for it, on a stream to its topic."""
        limit = self._connection.options.max_in_flight
        self._await(lambda: len(self._unanswered) < limit)
        session = self._session
        if session is not None and not session.takes(batch):
            self._await(lambda: not self._unanswered)
            self._end_session()

    def _await(self, done: Any) -> None:
        """Waits for something, and meanwhile mends what breaks."""
        while self._dead is None and not self._giving_up:
            with self._changed:
                self._changed.wait_for(lambda: done() or self._is_broken() or self._giving_up)
                if done() and not self._is_broken():
                    return
            if self._is_broken():
                self._recover()

    def _is_broken(self) -> bool:
        return self._session is not None and self._session.fault is not None

    def _transmit(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            if self._session is None:
                self._session = Session(self._connection, batch, self._answered, self._broken)
            self._session.send(batch, self.name, self.epoch)

    def _recover(self) -> None:
        session = self._session
        assert session is not None
        fault = session.fault
        assert fault is not None
        self._end_session()
        if isinstance(fault, FATAL):
            self._die(fault)
        elif isinstance(fault, PASSING) or fault.code in UNKNOWN:
            self._pause()
            self._transmit(list(self._unanswered))
        else:
            self._refuse_first(fault)
            self._transmit(list(self._unanswered))

    def _pause(self) -> None:
        pause_s = next(self._pauses)
        with self._changed:
            self._changed.wait_for(lambda: self._giving_up, pause_s)

    def _refuse_first(self, error: PolybusError) -> None:
        """The first one's number was not used up. All behind it get numbers anew."""
        with self._changed:
            if not self._unanswered:
                return
            first = self._unanswered.popleft()
            self._next = first.counter
            rest = list(self._unanswered)
            if len(first.parts) > 1:
                rest = [Batch(first.topic, [part]) for part in first.parts] + rest
            else:
                self._tell(first, error)
            self._unanswered = deque(rest)
            for batch in rest:
                batch.counter = self._next
                self._next += 1

    def _die(self, error: PolybusError) -> None:
        self._dead = error
        self._queue.close()

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _fail_all(self, error: PolybusError) -> None:
        while self._unanswered:
            self._tell(self._unanswered.popleft(), error)
        for one in self._queue.empty():
            one.future.set_exception(error)

    def _tell(self, batch: Batch, error: PolybusError) -> None:
        for part in batch.parts:
            part.future.set_exception(error)
        self._queue.settle(batch)

    # --- what a session reports, on its thread

    def _answered(self, answer: dict[str, Any]) -> None:
        with self._changed:
            batch = self._unanswered.popleft()
            self._pauses = self._connection.pauses()
            self._changed.notify_all()
        produced = Produced(answer["first_id"], answer["last_id"], answer["duplicate"])
        for part in batch.parts:
            part.future.set_result(produced)
        self._queue.settle(batch)

    def _broken(self) -> None:
        with self._changed:
            self._changed.notify_all()


class Session:
    """One stream to one topic and the thread that reads its answers, until something breaks."""

    def __init__(self, connection: Connection, first: Batch, on_answer: Any, on_fault: Any) -> None:
        self.fault: PolybusError | None = None
        self._topic = first.topic
        self._schema = first.parts[0].rows.schema
        self._on_answer = on_answer
        self._on_fault = on_fault
        self._stream: PutStream | None = None
        self._thread: Thread | None = None
        try:
            self._stream = PutStream(connection, ["produce", first.topic], self._schema)
        except PolybusError as error:
            self._fail(error)
            return
        self._thread = Thread(target=self._receive, name="polybus-answers", daemon=True)
        self._thread.start()

    def takes(self, batch: Batch) -> bool:
        same = batch.topic == self._topic
        return same and batch.parts[0].rows.schema.equals(self._schema)

    def send(self, batch: Batch, producer: str, epoch: int) -> None:
        """A failure is found by the thread that reads, or kept for it."""
        if self._stream is None or self.fault is not None:
            return
        stamp = {"producer": producer, "epoch": epoch, "counter": batch.counter}
        try:
            self._stream.send(batch.rows(), stamp)
        except PolybusError as error:
            if not self._thread_is_reading():
                self._fail(error)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.finish()
        if self._thread is not None:
            self._thread.join()

    def _thread_is_reading(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _receive(self) -> None:
        assert self._stream is not None
        try:
            while True:
                answer = self._stream.answer()
                if "error" in answer:
                    raise told(answer["error"])
                self._on_answer(answer)
        except PolybusError as error:
            self._fail(error)

    def _fail(self, error: PolybusError) -> None:
        if self.fault is None:
            self.fault = error
        self._on_fault()
