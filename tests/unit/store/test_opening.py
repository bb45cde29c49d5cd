"""From a URL to an engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from polybus.errors import AddressError, UsageError
from polybus.model.commit import Commit
from polybus.store.engine_registry import open_store
from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.store.memory.memory_store import MemoryStore


def test_memory_is_the_callers_own() -> None:
    with open_store("memory:") as one, open_store("memory:") as other:
        assert isinstance(one, MemoryStore)
        one.create("t", 1, {})
        assert other.topics() == []


def test_memory_with_a_name_is_shared() -> None:
    with open_store("memory:a") as one, open_store("memory:a") as same:
        with open_store("memory:b") as other:
            topic = one.create("t", 1, {})
            assert same.topics() == [topic]
            assert other.topics() == []
        one.close()
        assert same.topics() == [topic]


def test_memory_with_a_name_goes_with_the_last() -> None:
    with open_store("memory:a") as first:
        first.create("t", 1, {})
    with open_store("memory:a") as later:
        assert later.topics() == []


def test_lmdb_is_a_folder(tmp_path: Path) -> None:
    with open_store(f"lmdb:{tmp_path / 'data'}") as store:
        assert isinstance(store, LmdbStore)
        topic = store.create("t", 1, {})
        with open_store(f"lmdb:{tmp_path / 'data'}", read_only=True) as reader:
            assert reader.topics() == [topic]


def test_the_wall_clock_is_passed_on(tmp_path: Path) -> None:
    for url in ("memory:", f"lmdb:{tmp_path / 'data'}"):
        with open_store(url, wall_ns=lambda: 77) as store:
            assert store.commit(Commit()).result(30).timestamp_ns == 77


@pytest.mark.parametrize("url", ["", "memory", "redis:x", "lmdb:", "nats://h", "/path", ":x"])
def test_what_names_no_engine(url: str) -> None:
    with pytest.raises(AddressError):
        open_store(url)


def test_settings_that_make_no_sense(tmp_path: Path) -> None:
    url = f"lmdb:{tmp_path / 'data'}"
    with pytest.raises(UsageError, match="durability"):
        open_store(url, durability="never")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="commit_interval_ms"):
        open_store(url, commit_interval_ms=0)
    with pytest.raises(UsageError, match="memory"):
        open_store("memory:", read_only=True)
    assert not (tmp_path / "data").exists()


def test_memory_does_not_load_lmdb() -> None:
    program = (
        "import sys; from polybus.store.engine_registry import open_store;"
        "open_store('memory:').close();"
        "print([name for name in ('lmdb', 'pyarrow', 'asyncio') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
