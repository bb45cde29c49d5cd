"""Rounds in which the bus is killed with -9 under producers, over and over, on one data folder.

A test defines its producers (`KilledProducer`) and how it reads the topic back. The rounds go
on until a kill has fallen between a commit and its answer: only then has a batch been sent
again that was stored already.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from threading import Condition, Thread
from typing import Any, TypeVar

from tests.rig.native_bus import NativeBus

PATIENCE_S = 60.0


class Progress:
    """The number of answered calls of all producers, and the first failure."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._answered = 0
        self.stopping = False
        self.failure: BaseException | None = None

    def on_answer(self, future: Future[Any]) -> None:
        with self._changed:
            self._answered += 1
            self.failure = self.failure or future.exception()
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self.failure = error
            self._changed.notify_all()

    def wait_for_more(self, count: int) -> None:
        with self._changed:
            target = self._answered + count
            is_reached = self._changed.wait_for(
                lambda: self._answered >= target or self.failure, PATIENCE_S
            )
            assert self.failure is None, f"a producer failed: {self.failure!r}"
            assert is_reached, "the producers do not go on"


class KilledProducer:
    """Produces until the rounds stop, then waits for all answers.

    `max_unanswered` calls are in flight: more than the client sends at once, so that some of
    them are merged.
    """

    max_unanswered: int

    def __init__(self, bus: NativeBus, number: int, progress: Progress) -> None:
        self.bus = bus
        self.number = number
        self.choices = random.Random(number)
        self.sent = 0
        self.duplicates = 0
        self._progress = progress
        self.thread = Thread(target=self._run, daemon=True)
        self.thread.start()

    def open(self) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def produce(self, producer: Any) -> Future[Any]:
        """Produce the next messages and add their number to `sent`."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            with self.open() as producer:
                unanswered: deque[Future[Any]] = deque()
                while not self._progress.stopping or unanswered:
                    if not self._progress.stopping:
                        future = self.produce(producer)
                        future.add_done_callback(self._progress.on_answer)
                        unanswered.append(future)
                    if self._progress.stopping or len(unanswered) > self.max_unanswered:
                        self.duplicates += unanswered.popleft().result(PATIENCE_S).duplicate
        except BaseException as error:
            self._progress.fail(error)


P = TypeVar("P", bound=KilledProducer)


def kill_bus(
    bus: NativeBus,
    open_producers: Callable[[Progress], Sequence[P]],
    kills: int,
    max_kills: int,
    max_answers: int,
) -> Sequence[P]:
    """Kill and restart the bus at least `kills` times, each after at most `max_answers` answers.

    Continues up to `max_kills` times until a producer has seen a duplicate. Returns the
    producers, which have ended.
    """
    choices = random.Random(7)
    progress = Progress()
    producers = open_producers(progress)
    done = 0
    while done < kills or (done < max_kills and not any(one.duplicates for one in producers)):
        progress.wait_for_more(choices.randint(1, max_answers))
        bus.kill()
        bus.start()
        done += 1
    progress.stopping = True
    for producer in producers:
        producer.thread.join(PATIENCE_S)
        assert not producer.thread.is_alive(), "a producer does not end"
    assert progress.failure is None, f"a producer failed: {progress.failure!r}"
    return producers


def check_stored_once(stored: Sequence[int], produced: Sequence[int], source: str) -> None:
    """Each produced number must be stored once, in order."""
    twice = len(stored) - len(set(stored))
    lost = set(produced) - set(stored)
    assert (twice, lost) == (0, set()), f"{source}: {twice} twice, {len(lost)} lost"
    assert list(stored) == list(produced), f"{source}: out of order"
