"""The bus is killed with -9 under eight producers, repeatedly, on the same port and data.

Their clients reconnect and send unanswered batches again with the same stamps. In the end
each message is stored once, in the order of its producer.
"""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import Future
from threading import Condition, Thread
from typing import Any

import pytest

from tests.rig.native_bus import NativeBus

PRODUCERS = 8
KILLS = 10
SOAK_KILLS = 300
TOPIC = "orders"
IN_FLIGHT = 24  # of a producer: more than the bus accepts, so that some are merged
MOST_MESSAGES = 20  # of one batch
MOST_ANSWERS = 150  # between a start and the next kill
PATIENCE_S = 60.0


class Progress:
    """The number of answered batches of all producers."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._answered = 0
        self.stopping = False
        self.failure: BaseException | None = None

    def note(self, future: Future[Any]) -> None:
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
            wanted = self._answered + count
            done = self._changed.wait_for(
                lambda: self._answered >= wanted or self.failure, PATIENCE_S
            )
            assert self.failure is None, f"a producer failed: {self.failure!r}"
            assert done, "the producers make no progress"


class Writer:
    """Produces numbered messages until `stopping`, then waits for all answers."""

    def __init__(self, bus: NativeBus, number: int, progress: Progress) -> None:
        self._bus = bus
        self._progress = progress
        self._choices = random.Random(number)
        self.name = f"w{number}"
        self.sent = 0
        self.duplicates = 0
        self.thread = Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            with self._bus.client() as client, client.producer(self.name) as producer:
                waiting: deque[Future[Any]] = deque()
                while not self._progress.stopping:
                    future = producer.produce(TOPIC, self._messages())
                    future.add_done_callback(self._progress.note)
                    waiting.append(future)
                    if len(waiting) > IN_FLIGHT:
                        self._settle(waiting.popleft())
                while waiting:
                    self._settle(waiting.popleft())
        except BaseException as error:
            self._progress.fail(error)

    def _settle(self, future: Future[Any]) -> None:
        self.duplicates += future.result(PATIENCE_S).duplicate

    def _messages(self) -> list[bytes]:
        count = self._choices.randint(1, MOST_MESSAGES)
        first = self.sent
        self.sent += count
        return [b"%s %d" % (self.name.encode(), first + at) for at in range(count)]


# A kill must happen between a commit and its answer; on a fast disk that takes more kills.
MOST_KILLS = 60


def count_repeats_over_kills(kills: int) -> int:
    """Return the number of batches that were stored before a kill and sent again after it."""
    choices = random.Random(7)
    with NativeBus() as bus:
        with bus.client() as client:
            client.create_topic(TOPIC, shards=4)
        progress = Progress()
        writers = [Writer(bus, number, progress) for number in range(PRODUCERS)]
        done = 0
        while done < kills or (
            done < MOST_KILLS and not any(writer.duplicates for writer in writers)
        ):
            progress.wait_for_more(choices.randint(1, MOST_ANSWERS))
            bus.kill()
            bus.start()
            done += 1
        progress.stopping = True
        for writer in writers:
            writer.thread.join(PATIENCE_S)
            assert not writer.thread.is_alive(), "a producer does not end"
        assert progress.failure is None, f"a producer failed: {progress.failure!r}"
        check(bus, writers)
        return sum(writer.duplicates for writer in writers)


def check(bus: NativeBus, writers: list[Writer]) -> None:
    """Check that each message is stored once, in the order of its producer."""
    found: dict[str, list[int]] = {writer.name: [] for writer in writers}
    with bus.client() as client:
        for batch in client.read(TOPIC):
            for body in batch.column("body").to_pylist():
                name, number = body.split()
                found[name.decode()].append(int(number))
    for writer in writers:
        got = found[writer.name]
        twice = len(got) - len(set(got))
        lost = set(range(writer.sent)) - set(got)
        assert (twice, lost) == (0, set()), f"{writer.name}: {twice} twice, {len(lost)} lost"
        assert got == list(range(writer.sent)), f"{writer.name}: out of order"


@pytest.mark.sabotage("stamps-off", expects=r"[1-9]\d* twice")
@pytest.mark.timeout(200)
def test_messages_are_stored_once_and_in_order_across_kills():
    duplicates = count_repeats_over_kills(KILLS)
    assert duplicates > 0, "no kill happened between a commit and its answer"


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_messages_are_stored_once_across_hundreds_of_kills():
    assert count_repeats_over_kills(SOAK_KILLS) > 0
