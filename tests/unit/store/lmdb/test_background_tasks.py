"""Scheduling of background tasks: a small share under load, no pause when idle."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polybus.store.lmdb import background_tasks
from polybus.store.lmdb.background_tasks import RECENT_S, SHARE, STEP_S, BackgroundTasks
from polybus.store.lmdb.disk_reserve import DiskReserve

GAP_S = 0.002  # between two commits


class EndlessRemoval:
    """A removal without an end, whose steps advance a clock that is otherwise stopped."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.steps = 0
        self.has_removals = True
        self.reserve = DiskReserve(Path("/missing"))

    def remove_some(self, time_s: float) -> None:
        self.steps += 1
        self.now_s += time_s


@pytest.fixture
def removal(monkeypatch: pytest.MonkeyPatch) -> EndlessRemoval:
    removal = EndlessRemoval()
    monkeypatch.setattr(background_tasks, "time", SimpleNamespace(monotonic=lambda: removal.now_s))
    return removal


@pytest.fixture
def tasks(removal: EndlessRemoval) -> BackgroundTasks:
    unused: Any = SimpleNamespace()
    files: Any = SimpleNamespace(current=SimpleNamespace(pages=0, clear_dead_readers=lambda: None))
    txn_writer: Any = removal
    return BackgroundTasks(unused, files, txn_writer, unused)


def test_background_tasks_take_their_share_under_load(
    removal: EndlessRemoval, tasks: BackgroundTasks
) -> None:
    """The share also holds if the writer is idle between two commits."""
    began_s = removal.now_s
    while removal.now_s < began_s + 10.0:
        tasks.run_step(True)
        removal.now_s += GAP_S / 2
        tasks.run_step(False)
        removal.now_s += GAP_S / 2
    share = removal.steps * STEP_S / (removal.now_s - began_s)
    assert SHARE / 2 < share <= SHARE * 1.1


def test_background_tasks_run_without_pause_when_idle(
    removal: EndlessRemoval, tasks: BackgroundTasks
) -> None:
    tasks.run_step(True)
    assert removal.steps == 1
    assert tasks.wait_s() > 0
    removal.now_s += RECENT_S + STEP_S / SHARE
    for _ in range(5):
        assert tasks.wait_s() == 0
        tasks.run_step(False)
    assert removal.steps == 6
