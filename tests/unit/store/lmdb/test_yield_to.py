"""Transactions are small while the foreground of the process is active."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from polybus.kernel import task_future
from polybus.model.commit import Append, Commit
from polybus.store.lmdb import writer
from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.testing.conformance.sample_blocks import block

BODY = bytes(100_000)
COMMITS = 12
TIMEOUT_S = 30.0


def group_sizes(store: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of groups of commits that were queued while the writer was blocked."""
    topic = store.create("t", 1, {}).number
    go, is_blocked = Event(), Event()
    sizes: list[int] = []
    run_tasks = task_future.run_tasks

    def block_writer(_state: Any, _subject: None, _now_ns: int) -> None:
        is_blocked.set()
        go.wait(TIMEOUT_S)

    def counted(group: list[Any], *rest: Any) -> Any:
        sizes.append(len(group))
        return run_tasks(group, *rest)

    thread: Any = store._writer
    thread.submit(block_writer)
    assert is_blocked.wait(TIMEOUT_S)
    monkeypatch.setattr(task_future, "run_tasks", counted)
    futures = [store.commit(Commit((Append(topic, 0, block(BODY)),))) for _ in range(COMMITS)]
    go.set()
    for future in futures:
        future.result(TIMEOUT_S)
    return sizes


def test_without_foreground_work_commits_share_a_transaction(tmp_path: Path, monkeypatch):
    with LmdbStore(tmp_path) as store:
        assert group_sizes(store, monkeypatch) == [COMMITS]


def test_groups_are_small_while_the_foreground_is_active(tmp_path: Path, monkeypatch):
    with LmdbStore(tmp_path) as store:
        store.yield_to(count(1).__next__)
        assert group_sizes(store, monkeypatch) == [2] * 6


def test_groups_are_large_after_the_foreground_ended(tmp_path: Path, monkeypatch):
    with LmdbStore(tmp_path) as store:
        store.yield_to(lambda: 5)
        store.create("before", 1, {})  # the count does not grow after this
        assert group_sizes(store, monkeypatch) == [COMMITS]


@pytest.mark.parametrize("yielding", [True, False])
def test_rest_after_a_large_group_is_in_proportion_to_its_work(
    tmp_path: Path, monkeypatch, yielding
):
    rests: list[float] = []
    worked_s = count(0.0, 0.25)
    clock = SimpleNamespace(thread_time=worked_s.__next__, sleep=rests.append)
    monkeypatch.setattr(writer, "time", clock)
    with LmdbStore(tmp_path) as store:
        store.yield_to(count(1).__next__ if yielding else int)
        topic = store.create("t", 1, {}).number
        for body in (b"small", bytes(writer.REST_AFTER_BYTES)):
            store.commit(Commit((Append(topic, 0, block(body)),))).result(TIMEOUT_S)
    assert rests == ([0.25 * writer.REST_FACTOR] if yielding else [])
