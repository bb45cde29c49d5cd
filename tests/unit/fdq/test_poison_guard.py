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
        self.told: list[Any] = []
        self.refused: list[Any] = []
        self.stopping = Event()
        self.care = PoisonGuard(self.told.append, self.stopping)

    def begin(self, run: Any) -> Thread:
        thread = Thread(target=self._begin, args=(run,), daemon=True)
        thread.start()
        return thread

    def _begin(self, run: Any) -> None:
        try:
            self.care.begin(run)
        except ConsumerClosing:
            self.refused.append(run)


@pytest.fixture
def runs() -> Runs:
    return Runs()


def test_second_suspect_run_is_reported_after_the_first_ended(runs: Runs) -> None:
    runs.care.begin(FIRST)
    second = runs.begin(SECOND)
    runs.care.end(SECOND)  # not the current run: no effect
    second.join(0.2)
    assert runs.told == [FIRST]
    runs.care.end(FIRST)
    second.join(10)
    assert runs.told == [FIRST, SECOND]


def test_waiting_run_does_not_begin_when_the_consumer_closes(runs: Runs) -> None:
    runs.care.begin(FIRST)
    second = runs.begin(SECOND)
    runs.stopping.set()
    second.join(10)
    assert (runs.told, runs.refused) == ([FIRST], [SECOND])


def test_no_run_begins_after_closing(runs: Runs) -> None:
    runs.stopping.set()
    with pytest.raises(ConsumerClosing):
        runs.care.begin(FIRST)
    assert runs.told == []


def test_run_whose_report_failed_keeps_its_turn_until_it_ends() -> None:
    def refuse(run: Any) -> None:
        raise ConnectionError

    care = PoisonGuard(refuse, Event())
    with pytest.raises(ConnectionError):
        care.begin(FIRST)
    care.end(FIRST)
    seen: list[Any] = []
    care._report_start = seen.append
    care.begin(SECOND)
    assert seen == [SECOND]
