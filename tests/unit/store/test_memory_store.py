"""The memory engine beyond the contract: its thread, and leases by the monotonic clock."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest

from polybus.errors import StageGone
from polybus.store.contract import ShardEnd
from polybus.store.memory.memory_store import MemoryStore
from polybus.testing.conformance.kit import all_bodies, append, put, stage


def threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name.startswith("polybus-memory")}


def test_thread_ends_with_the_last_close() -> None:
    before = threads()
    with MemoryStore() as store:
        store.create("t", 1, {})
        assert len(threads() - before) == 1
    assert threads() == before


def test_leases_use_the_monotonic_clock() -> None:
    now_s = [100.0]
    with MemoryStore(clock_s=lambda: now_s[0]) as store:
        topic = store.create("t", 1, {})
        kept, lost = stage(store, append(topic, 0, b"kept")), store.open_stage(10.0)
        store.renew(kept, 20.0)
        now_s[0] = 109.9
        store.stage(lost, [append(topic, 0, b"lost")]).result(30)
        now_s[0] = 110.0
        with pytest.raises(StageGone):
            put(store, stages=[lost])
        put(store, stages=[kept])
        assert all_bodies(store, topic) == [b"kept"]


def test_a_failing_listener_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail(news: Sequence[ShardEnd]) -> None:
        raise KeyError("on purpose")

    with MemoryStore() as store, caplog.at_level(logging.ERROR):
        topic = store.create("t", 1, {})
        store.watch(fail)
        put(store, append(topic, 0, b"x"))
    assert [record.name for record in caplog.records] == ["polybus.store"]
    assert "on purpose" in caplog.text
