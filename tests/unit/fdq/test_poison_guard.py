"""Suspect runs begin one at a time, after the bus knows of them."""

from __future__ import annotations

from threading import Event, Thread
from typing import Any

import pytest

from polybus.dialects.fdq.client.executor import PoisonGuard
from polybus.dialects.fdq.client.group_member import ConsumerClosing

FIRST: Any = "first"
SECOND: Any = "second"


class Runs:
    """Two runs that want to begin, and the reports to the bus."""

    def __init__(self) -> None:
        self.reported: list[Any] = []
        self.refused: list[Any] = []
        self.stopping = Event()
        self.guard = PoisonGuard(self.reported.append, self.stopping)

    def begin(self, run: Any) -> Thread:
        thread = Thread(target=self._begin, args=(run,), daemon=True)
        thread.start()
        return thread

    def _begin(self, run: Any) -> None:
        try:
            self.guard.begin(run)
        except ConsumerClosing:
            self.refused.append(run)


@pytest.fixture
def runs() -> Runs:
    return Runs()


def test_second_suspect_run_is_reported_after_the_first_ended(runs: Runs) -> None:
    runs.guard.begin(FIRST)
    second = runs.begin(SECOND)
    runs.guard.end(SECOND)  # not the current run: no effect
    second.join(0.2)
    assert runs.reported == [FIRST]
    runs.guard.end(FIRST)
    second.join(10)
    assert runs.reported == [FIRST, SECOND]


def test_waiting_run_does_not_begin_when_the_consumer_closes(runs: Runs) -> None:
    runs.guard.begin(FIRST)
    second = runs.begin(SECOND)
    runs.stopping.set()
    second.join(10)
    assert (runs.reported, runs.refused) == ([FIRST], [SECOND])


def test_no_run_begins_after_closing(runs: Runs) -> None:
    runs.stopping.set()
    with pytest.raises(ConsumerClosing):
        runs.guard.begin(FIRST)
    assert runs.reported == []


def test_run_whose_report_failed_keeps_its_turn_until_it_ends() -> None:
    def refuse(run: Any) -> None:
        raise ConnectionError

    guard = PoisonGuard(refuse, Event())
    with pytest.raises(ConnectionError):
        guard.begin(FIRST)
    guard.end(FIRST)
    seen: list[Any] = []
    guard._report_start = seen.append
    guard.begin(SECOND)
    assert seen == [SECOND]
