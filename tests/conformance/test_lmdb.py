"""The LMDB engine passes the conformance suite with both durabilities."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from polybus.store.contract import Store
from polybus.store.engine import Durability
from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.testing.conformance import Check, Engine, checks, name_of


def lmdb(folder: Path, durability: Durability) -> Engine:
    """Return an engine whose stores have folders below this one and keep their clock."""
    opened: dict[int, tuple[Path, Callable[[], int]]] = {}
    numbers = itertools.count()

    def open_at(path: Path, wall_ns: Callable[[], int]) -> Store:
        store = LmdbStore(path, durability=durability, commit_interval_ms=1, wall_ns=wall_ns)
        opened[id(store)] = path, wall_ns
        return store

    def reopen(store: Store) -> Store:
        store.close()
        return open_at(*opened[id(store)])

    return Engine(lambda wall_ns: open_at(folder / str(next(numbers)), wall_ns), reopen)


CHECKS = checks(lmdb(Path(), "fsync"))


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_lmdb(check: Check, tmp_path: Path) -> None:
    check(lmdb(tmp_path, "fsync"))


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_lmdb_that_answers_when_queued(check: Check, tmp_path: Path) -> None:
    check(lmdb(tmp_path, "interval"))
