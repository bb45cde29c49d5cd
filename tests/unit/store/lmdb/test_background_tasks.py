"""Scheduling of background tasks: a small share under load, no pause when idle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from polybus.store.lmdb import background_tasks
from polybus.store.lmdb.background_tasks import RECENT_S, SHARE, STEP_S, BackgroundTasks

GAP_S = 0.002  # between two commits


class Place:
    """Removal that has no end, and takes its time of a clock that stands else."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.steps = 0
        self.has_removals = True

    def remove_some(self, time_s: float) -> None:
        self.steps += 1
        self.now_s += time_s


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    made = Place()
    monkeypatch.setattr(background_tasks, "time", SimpleNamespace(monotonic=lambda: made.now_s))
    return made


@pytest.fixture
def work(place: Place) -> BackgroundTasks:
    unused: Any = SimpleNamespace()
    files: Any = SimpleNamespace(current=SimpleNamespace(pages=0, clear_dead_readers=lambda: None))
    txn_writer: Any = place
    return BackgroundTasks(unused, files, txn_writer, unused)


def test_background_tasks_take_their_share_under_load(place: Place, work: BackgroundTasks) -> None:
    """Also if the writer has time between two commits."""
    began_s = place.now_s
    while place.now_s < began_s + 10.0:
        work.run_step(True)
        place.now_s += GAP_S / 2
        work.run_step(False)
        place.now_s += GAP_S / 2
    share = place.steps * STEP_S / (place.now_s - began_s)
    assert SHARE / 2 < share <= SHARE * 1.1


def test_background_tasks_run_without_pause_when_idle(place: Place, work: BackgroundTasks) -> None:
    work.run_step(True)
    assert place.steps == 1
    assert work.wait_s() > 0
    place.now_s += RECENT_S + STEP_S / SHARE
    for _ in range(5):
        assert work.wait_s() == 0
        work.run_step(False)
    assert place.steps == 6
