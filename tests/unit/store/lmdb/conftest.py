"""A store of its own for each test, with a topic of one shard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polybus.model.topic import Topic
from polybus.store.lmdb.lmdb_store import LmdbStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    with LmdbStore(tmp_path / "store") as store:
        yield store


@pytest.fixture
def topic(store: LmdbStore) -> Topic:
    return store.create("t", 1, {})
