"""Limits of the commits that wait for the disk."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import pytest

from polybus.errors import LimitReached, PolybusError
from polybus.model.commit import Append, Commit
from polybus.store.lmdb import interval_writer, writer_queue
from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.testing.conformance.sample_blocks import block

TIMEOUT_S = 30.0


class Stopped:
    """A store whose writer is blocked until `go`."""

    def __init__(self, store: LmdbStore) -> None:
        self.store = store
        self.topic = store.create("t", 1, {}).number
        self._go, stands = Event(), Event()

        def stand(_books: Any, _subject: None, _now_ns: int) -> None:
            stands.set()
            self._go.wait(TIMEOUT_S)

        writer: Any = store._writer
        writer.submit(stand)
        assert stands.wait(TIMEOUT_S)

    def commit(self, body: bytes = b"x") -> Any:
        return self.store.commit(Commit((Append(self.topic, 0, block(body)),)))

    def go(self) -> None:
        self._go.set()


@pytest.mark.parametrize(
    ("limit", "value"), [("MAX_WAITING", 3), ("MAX_WAITING_BYTES", 3 * len(block(b"x").data))]
)
def test_commits_beyond_the_queue_limits_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(writer_queue, limit, value)
    with LmdbStore(tmp_path) as store:
        stopped = Stopped(store)
        taken = [stopped.commit() for _ in range(3)]
        refused = [stopped.commit() for _ in range(2)]
        for one in refused:
            error = one.exception(TIMEOUT_S)
            assert isinstance(error, LimitReached)
            assert error.limit == limit
        stopped.go()
        assert [one.result(TIMEOUT_S).spans[0].first_offset for one in taken] == [0, 1, 2]
        assert stopped.commit().result(TIMEOUT_S).spans[0].first_offset == 3  # there is room again


def test_interval_backlog_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interval_writer, "MAX_BYTES", 1)  # one commit fills it
    monkeypatch.setattr(writer_queue, "MAX_WAITING", 2)
    with LmdbStore(tmp_path, durability="interval") as store:
        topic = store.create("t", 1, {}).number
        writer: Any = store._writer
        with writer._changed:  # nothing can be written meanwhile
            commit = Commit((Append(topic, 0, block(b"x")),))
            futures = [store.commit(commit) for _ in range(5)]
        errors = [future.exception(TIMEOUT_S) for future in futures]
    refused = [error for error in errors if error is not None]
    assert len(refused) == 2
    assert all(isinstance(error, LimitReached) for error in refused)


def test_close_is_exempt_from_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LmdbStore(tmp_path)
    stopped = Stopped(store)
    monkeypatch.setattr(writer_queue, "MAX_WAITING", 1)
    last = stopped.commit()
    stopped.go()
    store.close()
    assert last.result(TIMEOUT_S).spans
    assert isinstance(stopped.commit().exception(TIMEOUT_S), PolybusError)
