"""Delivery of batches: exactly once and in order, across lost connections and restarts.

The producer's thread sends; a caller with a small batch sends inline if no other step is
due. The session's thread reads answers. A batch gets its counter when it is first sent and
is kept until its outcome is known:

    answered                      complete its futures
    connection lost, or the       the outcome is unknown: send all unanswered batches again
    bus is unavailable            with the same counters; the bus recognises repeats
    refused by the bus            void all counters in flight by empty commits. A batch that
                                  arrives later with such a counter has no effect, and if
                                  a counter was used already, the bus returns its result.
                                  The refused batch fails (or is split, if a part of it may
                                  be the cause); the others are sent with new counters
    fenced, or unknown producer   the producer fails with all its batches

Therefore one counter never stands for two contents, however late an earlier attempt arrives.

The bus keeps the answers to the last 16 counters, which also limits the batches in flight.
All of them go to one topic: before another topic's batch is sent, the earlier ones must be
answered, because counters belong to the producer and streams could overtake each other.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Lock, Thread
from typing import Any

from polybus.errors import (
    ConnectionLost,
    Fenced,
    LimitReached,
    MalformedRequest,
    OutOfSequence,
    PeerError,
    PolybusError,
    Stale,
    TooLarge,
    Unavailable,
    UnknownProducer,
)
from polybus.native.client.flight_connection import FlightConnection
from polybus.native.client.produce_queue import (
    SMALL_BYTES,
    MessageRows,
    PendingMessages,
    ProduceBatch,
    Produced,
    ProduceQueue,
)
from polybus.native.client.put_stream import PutSession

log = logging.getLogger("polybus.native")

# After these errors the bus accepts no counter of this producer.
FATAL = (Fenced, UnknownProducer, Stale, OutOfSequence)
# One part of a batch may cause these errors alone; other errors concern the topic.
PARTIAL = (MalformedRequest, TooLarge, LimitReached)
# If the bus fails at the same batch again and again, the batch is the cause.
MAX_TRIES = 4
WARN_AFTER_S = 5.0
# After all answers only the end of the stream is left.
CLOSE_TIMEOUT_S = 5.0
EXISTING_ONLY = "existing"  # after the topic in a path: do not create it


class InFlightBatches(deque[ProduceBatch]):
    """Batches without an outcome, in order. One without a counter was not sent yet, or refused."""

    def __init__(self, last_counter: int, max_in_flight: int) -> None:
        super().__init__()
        self._next = last_counter + 1
        self._max_in_flight = max_in_flight

    def sent_batches(self) -> list[ProduceBatch]:
        return [batch for batch in self if batch.counter]

    def first_unsent(self) -> ProduceBatch | None:
        """Return the first batch that needs a new counter."""
        return next((batch for batch in self if not batch.counter), None)

    def can_send(self, upcoming: ProduceBatch | None) -> bool:
        """Return whether a batch may be sent; None stands for one that is still queued."""
        in_flight = self.sent_batches()
        # A suspect travels alone: its refusal voids the counters of all batches in flight.
        if (upcoming and upcoming.is_suspect) or any(batch.is_suspect for batch in in_flight):
            return not in_flight
        return len(in_flight) < self._max_in_flight

    def number(self, batch: ProduceBatch) -> None:
        """Assign a counter before a batch is sent; a batch that has one keeps it."""
        if not batch.counter:
            batch.counter = self._next
            self._next += 1

    def take_answered(self, counter: int) -> ProduceBatch:
        """Remove and return the batch of this counter. Answers arrive in order."""
        if not self or counter != self[0].counter:
            raise PeerError(f"answer for counter {counter}, which is not in flight")
        return self.popleft()

    def halve_first(self) -> None:
        self.extendleft(reversed(self.popleft().split()))


class Sender:
    """The sending thread of a producer. `_changed` guards the state shared with the session."""

    def __init__(
        self,
        connection: FlightConnection,
        name: str,
        epoch: int,
        last_counter: int,
        *,
        create: bool,
    ) -> None:
        self._name = name
        self._epoch = epoch
        self._fatal_error: PolybusError | None = None
        lock = Lock()
        self._changed = Condition(lock)
        self._queue = ProduceQueue(connection.options, self._changed, lock)
        self._connection = connection
        self._path_suffix = [] if create else [EXISTING_ONLY]
        self._unanswered = InFlightBatches(last_counter, connection.options.max_in_flight)
        self._session: PutSession | None = None
        self._step_lock = Lock()  # held by the thread that executes a step
        self._is_abandoned = False
        self._pauses = connection.retry_delays()
        self._tries = 0
        self._progress_s = time.monotonic()
        self._has_warned = False
        self._thread = Thread(target=self._run, name=f"polybus-producer-{name}", daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return self._queue.is_closed

    def put(self, call: PendingMessages) -> None:
        # A small Arrow batch is sent by the caller: waking the thread would take longer.
        messages = call.messages
        is_inline = isinstance(messages, MessageRows) and messages.size_bytes < SMALL_BYTES
        self._queue.put(call, wake=not is_inline)
        if is_inline:
            self._send_inline()

    def flush(self, timeout_s: float | None) -> bool:
        return self._queue.flush(timeout_s)

    def close(self, timeout_s: float | None) -> bool:
        """Send queued messages. After the timeout, fail all batches without an outcome."""
        self._queue.close()
        if not self._queue.flush(timeout_s):
            with self._changed:
                self._is_abandoned = True
                self._changed.notify_all()
            self._fail_all(self._end_error())  # even while the threads wait
            return False
        self._thread.join(CLOSE_TIMEOUT_S)
        return not self._thread.is_alive() and self._fatal_error is None

    def _end_error(self) -> PolybusError:
        return self._fatal_error or ConnectionLost(
            "the producer was closed before the bus answered"
        )

    def _send_inline(self) -> None:
        """Send queued messages on the caller's thread if no other step is due.

        The sending thread opens streams and handles errors.
        """
        try:
            if self._step_lock.acquire(blocking=False):
                try:
                    with self._fail_on_error():
                        session = self._session
                        is_open = session is not None and session.is_open
                        if is_open and self._current_step() == self._send:
                            self._send()
                except BaseException:  # Ctrl-C, at any point: the sending thread repeats it
                    if self._session is not None:
                        self._session.interrupt()
                    raise
                finally:
                    self._step_lock.release()
        finally:
            with self._changed:
                if self._session is None or self._find_step() is not None:
                    self._changed.notify()

    # --- the sending thread

    def _run(self) -> None:
        with self._fail_on_error():
            while self._wait_for_step():
                # A caller may have taken the step meanwhile, so it is determined again.
                with self._step_lock:
                    step = self._current_step()
                    if step is not None:
                        step()
        self._fail_all(self._end_error())
        if not self._is_abandoned:
            self._end_session()

    def _wait_for_step(self) -> bool:
        """Wait until a step is due. Returns False if the producer has ended."""
        with self._changed:
            while self._fatal_error is None and not self._is_abandoned:
                if self._queue.is_closed and not self._unanswered and self._queue.peek() is None:
                    return False
                if self._find_step() is not None:
                    return True
                self._changed.wait()
        return False

    def _current_step(self) -> Callable[[], None] | None:
        """Return the step that is due. The caller must hold `_step_lock`."""
        with self._changed:
            return (
                None if self._fatal_error is not None or self._is_abandoned else self._find_step()
            )

    @contextmanager
    def _fail_on_error(self) -> Iterator[None]:
        try:
            yield
        except PolybusError as error:
            self._fail_producer(error)
        except Exception as error:  # a bug of this client: callers must not wait forever
            log.exception("producer %s failed", self._name)
            self._fail_producer(PolybusError(f"the producer failed: {error!r}"))

    def _find_step(self) -> Callable[[], None] | None:
        """Return the step that is due. The caller must hold `_changed`."""
        session = self._session
        if session is not None and not session.is_open:
            # A failed send is not a fault yet: the reading thread may still get an error answer.
            return self._recover if session.fault is not None else None
        if (upcoming := self._unanswered.first_unsent()) is not None:
            return self._send if self._unanswered.can_send(upcoming) else None
        first = self._queue.peek()
        if first is None:
            return None
        if self._unanswered and self._queue.is_small:
            return None  # wait for more messages to merge with
        if session is None or session.accepts(first.topic, first.schema):
            return self._send if self._unanswered.can_send(None) else None
        # A stream has one topic and one schema: it must be answered before the next is opened.
        return None if self._unanswered else self._end_session

    def _send(self) -> None:
        with self._changed:
            batch = self._unanswered.first_unsent()
            if batch is None and self._queue.peek() is not None:
                batch = self._queue.take()
                if batch is not None:
                    if not self._unanswered:
                        self._progress_s = time.monotonic()
                    self._unanswered.append(batch)
        if batch is not None:
            self._transmit([batch])

    def _transmit(self, batches: list[ProduceBatch]) -> None:
        for batch in batches:
            if self._session is None:
                path = ["produce", batch.topic, *self._path_suffix]
                session = PutSession(self._connection, path, batch, self._on_answer, self._on_fault)
                with self._changed:
                    self._session = session
            if not self._session.is_open:
                return
            with self._changed:
                self._unanswered.number(batch)
            self._session.send(batch, self._name, self._epoch)

    def _end_session(self) -> None:
        session = self._session
        if session is not None:
            session.close()  # answers may still arrive on this session until it is closed
            with self._changed:
                self._session = None

    # --- recovery

    def _recover(self) -> None:
        assert self._session is not None
        fault = self._session.fault
        assert fault is not None
        self._end_session()
        with self._changed:
            first = self._unanswered[0] if self._unanswered else None
        self._tries += 1
        if isinstance(fault, FATAL):
            self._fail_producer(fault)
        elif isinstance(fault, Unavailable) or (
            _is_outcome_unknown(fault) and self._tries < MAX_TRIES
        ):
            self._pause(fault)
            with self._changed:
                batches = self._unanswered.sent_batches()
                if self._is_abandoned or self._fatal_error is not None:
                    return
            self._transmit(batches)
        elif first is not None:
            self._tries = 0
            self._refuse(first, fault)

    def _refuse(self, first: ProduceBatch, error: PolybusError) -> None:
        """Void all counters in flight, then fail or split the first batch."""
        is_overtaken = False
        with self._changed:
            batches = self._unanswered.sent_batches()
        for batch in batches:
            done = self._void_counter(batch.counter)
            if done is None:
                return
            batch.counter = 0
            if (stored := _stored_batch(done)) is not None:  # an earlier attempt
                is_overtaken = is_overtaken or batch is not first
                with self._changed:
                    if batch not in self._unanswered:
                        continue
                    self._unanswered.remove(batch)
                batch.complete(stored)
                self._queue.settle(batch)
        with self._changed:
            if not self._unanswered or self._unanswered[0] is not first:
                return  # it was stored
            # If a later batch was stored, sending a part of the first again would break the order.
            if not is_overtaken and len(first.parts) > 1 and isinstance(error, PARTIAL):
                self._unanswered.halve_first()
                return
            self._unanswered.popleft()
        first.fail(error)
        self._queue.settle(first)

    def _void_counter(self, counter: int) -> dict[str, Any] | None:
        """Commit nothing with a counter. Returns the answer, which is that of an earlier commit.

        Retries until the bus answers. Returns None if the producer ends first.
        """
        stamp = {"producer": self._name, "epoch": self._epoch, "counter": counter}
        while self._fatal_error is None and not self._is_abandoned:
            try:
                return self._connection.act("stage.publish", {"stages": [], "stamp": stamp})
            except PolybusError as fault:
                if not _is_outcome_unknown(fault):
                    raise
                self._pause(fault)
        return None

    def _pause(self, fault: PolybusError) -> None:
        silent_s = time.monotonic() - self._progress_s
        limit_s = self._connection.options.produce_timeout_s
        if self._connection.closed.is_set() or (limit_s is not None and silent_s > limit_s):
            self._fail_producer(fault)
            return
        if silent_s > WARN_AFTER_S and not self._has_warned:
            self._has_warned = True
            log.warning("producer %s is waiting for the bus: %s", self._name, fault)
        with self._changed:
            self._changed.wait_for(lambda: self._is_abandoned, next(self._pauses))

    def _fail_producer(self, error: PolybusError) -> None:
        with self._changed:
            self._fatal_error = self._fatal_error or error
            self._changed.notify_all()
        self._queue.close(error)

    def _fail_all(self, error: PolybusError) -> None:
        self._queue.close(error)
        with self._changed:
            batches, never_sent = list(self._unanswered), self._queue.drain()
            self._unanswered.clear()
        for batch in batches:
            batch.fail(error)
            self._queue.settle(batch)
        for call in never_sent:
            call.future.set_exception(error)

    # --- callbacks of a session, on its thread

    def _on_answer(self, answer: dict[str, Any]) -> None:
        produced = _read_produced(answer)
        with self._changed:
            if self._is_abandoned or self._fatal_error is not None:
                return
            batch = self._unanswered.take_answered(answer["counter"])
            self._pauses = self._connection.retry_delays()
            self._progress_s = time.monotonic()
            self._tries, self._has_warned = 0, False
            has_more = self._queue.peek() or self._unanswered.first_unsent()
            if has_more or self._queue.is_closed:
                # A place is free; do not delay it until all futures are done.
                self._changed.notify()
        batch.complete(produced)
        self._queue.settle(batch)

    def _on_fault(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _read_produced(answer: dict[str, Any]) -> Produced:
    due_ns = answer.get("deliver_at_ns")
    if due_ns is not None:
        return Produced(0, 0, answer["duplicate"], due_ns)
    return Produced(answer["first_id"], answer["last_id"], answer["duplicate"])


def _stored_batch(done: dict[str, Any]) -> Produced | None:
    """Return what a voided counter had stored before, None if it had stored nothing."""
    if (due_ns := done.get("deliver_at_ns")) is not None:
        return Produced(0, 0, True, due_ns)
    spans = done["spans"]
    if not spans:
        return None
    first_id = min(span["first_id"] for span in spans)
    last_id = max(span["first_id"] + span["count"] - 1 for span in spans)
    return Produced(first_id, last_id, True)


def _is_outcome_unknown(error: PolybusError) -> bool:
    """Return whether another attempt is needed to learn the outcome."""
    return isinstance(error, Unavailable | PeerError) or type(error) is PolybusError
