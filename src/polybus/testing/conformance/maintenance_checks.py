"""Checks of maintenance: it changes no contents, or raises `NotSupported`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from polybus.errors import NotSupported
from polybus.testing.conformance.kit import Engine, all_bodies, append, contents, put


def check_yield_to_changes_no_contents(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        counts = iter(range(1_000_000))
        store.yield_to(lambda: next(counts))
        put(store, append(topic, 0, b"a"))
        assert all_bodies(store, topic) == [b"a"]


def check_compaction_keeps_the_contents(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 2, {})
        put(store, append(topic, 0, b"a"), append(topic, 1, b"b"))
        before = contents(store)
        try:
            sizes = store.compact()
        except NotSupported:
            sizes = (0, 0)
        assert all(size >= 0 for size in sizes)
        assert contents(store) == before
        put(store, append(topic, 0, b"c"))
        assert all_bodies(store, topic) == [b"a", b"b", b"c"]


def check_backup_is_written_or_not_supported(engine: Engine) -> None:
    with engine.fresh() as store, tempfile.TemporaryDirectory() as folder:
        topic = store.create("t", 1, {})
        put(store, append(topic, 0, b"a"))
        target = Path(folder) / "copy"
        try:
            written = store.backup(target)
        except NotSupported:
            assert not target.exists()
        else:
            assert written > 0
            assert any(target.iterdir())
        assert all_bodies(store, topic) == [b"a"]
