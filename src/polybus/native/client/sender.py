"""How batches get through: once, in order, whatever happens on the way.

One thread sends (or who brings a small batch, where that is all there is to do), that of
the session reads answers. A batch gets its number when it is first sent, and is kept until
its outcome is known:

    answered                      its futures are told
    the connection is lost,       the outcome is not known: everything unanswered is sent
    the bus is not able to        again with the same numbers, and the bus knows a repeat
    refused by the bus            all numbers on their way are used up by commits of
                                  nothing. Whatever still lies on the way with such a
                                  number is then without effect; and if a number had been
                                  used after all, the bus says so. What is left gets new
                                  numbers: the refused one is told so (or is halved, if it
                                  may be the fault of a part), the others are sent again
    fenced, or forgotten          the producer is at its end: all are told so

So one number never stands for two contents, however late an earlier try arrives.

The bus keeps the answers to the last 16 numbers, and so many are on their way at
most. All of them are for one topic: before another's turn the first are awaited,
since numbers are the producer's, and streams could overtake each other.

What a producer has taken from its queue and has no outcome for, in the order of the queue.

The first ones are on their way: each has got its number when it was sent, and keeps it for
every further try. Behind a batch that was refused there may be others whose numbers were
used up with it (sending.py): those wait for new ones, like the halves of the refused one.

Such a half is *suspect*, and travels alone: nothing behind it must be sent twice because
of it. Else so many are on their way at once as the options allow.

Whoever calls holds the lock of the producer.
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
from polybus.native.client.produce_queue import ProduceBatch, Produced, ProduceQueue
from polybus.native.client.put_stream import PutSession


class InFlightBatches(deque[ProduceBatch]):
    def __init__(self, last_counter: int, max_in_flight: int) -> None:
        super().__init__()
        self._next = last_counter + 1
        self._max_in_flight = max_in_flight

    def sent_batches(self) -> list[ProduceBatch]:
        return [batch for batch in self if batch.counter]

    def first_unsent(self) -> ProduceBatch | None:
        """The first that waits for a new number."""
        return next((batch for batch in self if not batch.counter), None)

    def can_send(self, upcoming: ProduceBatch | None) -> bool:
        """May one more be sent: this one, or None for one that is still in the queue?"""
        on_their_way = self.sent_batches()
        if (upcoming and upcoming.is_suspect) or any(batch.is_suspect for batch in on_their_way):
            return not on_their_way
        return len(on_their_way) < self._max_in_flight

    def number(self, batch: ProduceBatch) -> None:
        """Before it is sent; one that has a number keeps it."""
        if not batch.counter:
            batch.counter = self._next
            self._next += 1

    def take_answered(self, counter: int) -> ProduceBatch:
        """Takes out the batch of this number. Answers come in order."""
        if not self or counter != self[0].counter:
            raise PeerError(f"an answer to {counter}, which was not asked")
        return self.popleft()

    def halve_first(self) -> None:
        self.extendleft(reversed(self.popleft().split()))


log = logging.getLogger("polybus.native")

# After these no number of this producer will ever be taken again.
FATAL = (Fenced, UnknownProducer, Stale, OutOfSequence)
# These may be the fault of one part of a batch alone; others are about the topic.
PARTIAL = (MalformedRequest, TooLarge, LimitReached)
# A bus that fails at the same batch again and again fails because of it.
MAX_TRIES = 4
WARN_AFTER_S = 5.0
EXISTING_ONLY = "existing"  # behind the topic in a path: it is not made


class Sender:
    """The thread of a producer. `changed` guards all that both threads touch."""

    def __init__(
        self,
        connection: FlightConnection,
        name: str,
        epoch: int,
        last_counter: int,
        *,
        create: bool = True,
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.fatal_error: PolybusError | None = None
        lock = Lock()
        self.changed = Condition(lock)
        self.queue = ProduceQueue(connection.options, self.changed, lock)
        self._connection = connection
        self._path_suffix = [] if create else [EXISTING_ONLY]
        self._unanswered = InFlightBatches(last_counter, connection.options.max_in_flight)
        self._session: PutSession | None = None
        self._step_lock = Lock()  # held by who does what is due
        self._is_abandoned = False
        self._pauses = connection.retry_delays()
        self._tries = 0
        self._progress_s = time.monotonic()
        self._has_warned = False
        self._thread = Thread(target=self._run, name=f"polybus-producer-{name}", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float | None) -> bool:
        """Whether the thread has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """All that has no outcome is failed, whatever the threads are waiting for."""
        with self.changed:
            self._is_abandoned = True
            self.changed.notify_all()
        self._fail_all(self.fatal_error or ConnectionLost("closed before the bus had answered"))

    def send_inline(self) -> None:
        """Sends what waits on the caller's thread, where that is all there is to do: to wake the
        thread would take longer. Opening streams, and all that goes wrong, is for the thread."""
        try:
            if self._step_lock.acquire(blocking=False):
                self._send_holding_lock()
        finally:
            with self.changed:
                if self._session is None or self._find_step() is not None:
                    self.changed.notify()

    def _send_holding_lock(self) -> None:
        try:
            with self._fail_on_error():
                if self._has_open_session() and self._current_step() == self._send:
                    self._send()
        except BaseException:  # Ctrl-C, at any point: the thread sends it again
            if self._session is not None:
                self._session.interrupt()
            raise
        finally:
            self._step_lock.release()

    def _has_open_session(self) -> bool:
        session = self._session
        return session is not None and session.is_open

    # --- the thread

    def _run(self) -> None:
        with self._fail_on_error():
            while self._wait_for_step() is not None:
                with self._step_lock:
                    duty = self._current_step()
                    if duty is not None:
                        duty()
        self._fail_all(self.fatal_error or ConnectionLost("closed before the bus had answered"))
        if not self._is_abandoned:
            self._end_session()

    def _wait_for_step(self) -> Callable[[], None] | None:
        """What is to be done, once there is something; None: nothing ever again."""
        with self.changed:
            while self.fatal_error is None and not self._is_abandoned and not self._is_done():
                duty = self._find_step()
                if duty is not None:
                    return duty
                self.changed.wait()
        return None

    def _current_step(self) -> Callable[[], None] | None:
        """What is to be done now, by who has the turn."""
        with self.changed:
            return None if self.fatal_error is not None or self._is_abandoned else self._find_step()

    @contextmanager
    def _fail_on_error(self) -> Iterator[None]:
        try:
            yield
        except PolybusError as error:
            self._fail_producer(error)
        except Exception as error:  # a defect of ours: nobody may wait for ever for it
            log.exception("producer %s has failed", self.name)
            self._fail_producer(PolybusError(f"the producer has failed: {error!r}"))

    def _is_done(self) -> bool:
        return self.queue.is_closed and not self._unanswered and self.queue.peek() is None

    def _find_step(self) -> Callable[[], None] | None:
        session = self._session
        if session is not None and not session.is_open:
            return self._recover if session.fault is not None else None
        if (upcoming := self._unanswered.first_unsent()) is not None:
            return self._send if self._unanswered.can_send(upcoming) else None
        first = self.queue.peek()
        if first is None:
            return None
        if self._unanswered and self.queue.is_small:
            return None  # it waits for company
        if session is None or session.accepts(first.topic, first.schema):
            return self._send if self._unanswered.can_send(None) else None
        return None if self._unanswered else self._end_session

    def _send(self) -> None:
        with self.changed:
            batch = self._unanswered.first_unsent() or self._take()
        if batch is not None:
            self._transmit([batch])

    def _take(self) -> ProduceBatch | None:
        batch = self.queue.take() if self.queue.peek() is not None else None
        if batch is not None:
            if not self._unanswered:
                self._progress_s = time.monotonic()
            self._unanswered.append(batch)
        return batch

    def _transmit(self, batches: list[ProduceBatch]) -> None:
        for batch in batches:
            if self._session is None:
                path = ["produce", batch.topic, *self._path_suffix]
                session = PutSession(self._connection, path, batch, self._on_answer, self._wake)
                with self.changed:
                    self._session = session
            if not self._session.is_open:
                return
            with self.changed:
                self._unanswered.number(batch)
            self._session.send(batch, self.name, self.epoch)

    def _end_session(self) -> None:
        session = self._session
        if session is not None:
            session.close()  # answers may still come: it is the session until then
            with self.changed:
                self._session = None

    # --- when something breaks

    def _recover(self) -> None:
        assert self._session is not None
        fault = self._session.fault
        assert fault is not None
        self._end_session()
        with self.changed:
            first = self._unanswered[0] if self._unanswered else None
        self._tries += 1
        if isinstance(fault, FATAL):
            self._fail_producer(fault)
        elif isinstance(fault, Unavailable) or (
            _is_outcome_unknown(fault) and self._tries < MAX_TRIES
        ):
            self._pause(fault)
            self._resend()
        elif first is not None:
            self._tries = 0
            self._refuse(first, fault)

    def _resend(self) -> None:
        with self.changed:
            batches = self._unanswered.sent_batches()
            if self._is_abandoned or self.fatal_error is not None:
                return
        self._transmit(batches)

    def _refuse(self, first: ProduceBatch, error: PolybusError) -> None:
        """Uses up all numbers on their way, then tells the first that it is refused."""
        overtaken = False
        with self.changed:
            batches = self._unanswered.sent_batches()
        for batch in batches:
            spans = self._void_counter(batch.counter)
            if spans is None:
                return
            batch.counter = 0
            if spans:
                overtaken = overtaken or batch is not first
                self._complete_stored(batch, spans)
        # With one behind it stored, the time of the first has passed: it is not tried again.
        self._fail_refused(first, error, may_halve=not overtaken)

    def _void_counter(self, counter: int) -> list[dict[str, Any]] | None:
        """What the number stands for: nothing from now on, or what was stored.

        Takes as long as it may take; None if the producer ends before.
        """
        stamp = {"producer": self.name, "epoch": self.epoch, "counter": counter}
        while self.fatal_error is None and not self._is_abandoned:
            try:
                done = self._connection.act("stage.publish", {"stages": [], "stamp": stamp})
                spans: list[dict[str, Any]] = done["spans"]
                return spans
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
            log.warning("producer %s waits: %s", self.name, fault)
        with self.changed:
            self.changed.wait_for(lambda: self._is_abandoned, next(self._pauses))

    def _complete_stored(self, batch: ProduceBatch, spans: list[dict[str, Any]]) -> None:
        first_id = min(span["first_id"] for span in spans)
        last_id = max(span["first_id"] + span["count"] - 1 for span in spans)
        with self.changed:
            if batch not in self._unanswered:
                return
            self._unanswered.remove(batch)
        batch.complete(Produced(first_id, last_id, True))
        self.queue.settle(batch)

    def _fail_refused(self, first: ProduceBatch, error: PolybusError, *, may_halve: bool) -> None:
        with self.changed:
            if not self._unanswered or self._unanswered[0] is not first:
                return  # it was stored after all
            if may_halve and len(first.parts) > 1 and isinstance(error, PARTIAL):
                self._unanswered.halve_first()
                return
            self._unanswered.popleft()
        first.fail(error)
        self.queue.settle(first)

    def _fail_producer(self, error: PolybusError) -> None:
        with self.changed:
            self.fatal_error = self.fatal_error or error
            self.changed.notify_all()
        self.queue.close(error)

    def _fail_all(self, error: PolybusError) -> None:
        self.queue.close(error)
        with self.changed:
            batches, never_sent = list(self._unanswered), self.queue.drain()
            self._unanswered.clear()
        for batch in batches:
            batch.fail(error)
            self.queue.settle(batch)
        for one in never_sent:
            one.future.set_exception(error)

    # --- what a session reports, on its thread

    def _on_answer(self, session: PutSession, answer: dict[str, Any]) -> None:
        produced = Produced(answer["first_id"], answer["last_id"], answer["duplicate"])
        with self.changed:
            if self._is_abandoned or self.fatal_error is not None:
                return
            batch = self._unanswered.take_answered(answer["counter"])
            self._pauses = self._connection.retry_delays()
            self._progress_s = time.monotonic()
            self._tries, self._has_warned = 0, False
            if self._has_more():
                self.changed.notify()  # there is a place: nobody waits until all are told
        batch.complete(produced)
        self.queue.settle(batch)

    def _has_more(self) -> bool:
        return self.queue.is_closed or bool(self.queue.peek() or self._unanswered.first_unsent())

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()


def _is_outcome_unknown(error: PolybusError) -> bool:
    """Nobody has said no: what the outcome is, another try will tell."""
    return isinstance(error, Unavailable | PeerError) or type(error) is PolybusError
