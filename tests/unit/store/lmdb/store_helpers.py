"""Helpers of the tests of the LMDB engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from polybus.model.commit import Append, Commit, CommitResult
from polybus.model.topic import Topic
from polybus.store.lmdb import store_keys
from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.store.lmdb.store_files import StoreFiles
from polybus.store.lmdb.writer_state import scan_prefix
from polybus.testing.conformance.sample_blocks import block

TIMEOUT_S = 60.0


def put(store: LmdbStore, topic: Topic, shard: int, *bodies: bytes) -> CommitResult:
    commit = Commit((Append(topic.number, shard, block(*bodies)),))
    return store.commit(commit).result(TIMEOUT_S)


def stage(store: LmdbStore, topic: Topic, *blocks: tuple[bytes, ...]) -> str:
    """Return a stage with these blocks for shard 0."""
    name = store.open_stage()
    appends = [Append(topic.number, 0, block(*bodies)) for bodies in blocks]
    store.stage(name, appends).result(TIMEOUT_S)
    return name


def count(path: Path, prefix: bytes) -> int:
    """Count the keys with a prefix, as another reader of the file sees them."""
    files = StoreFiles(path, read_only=True)
    try:
        with files.snapshot() as transaction:
            return sum(1 for _ in scan_prefix(transaction, prefix))
    finally:
        files.close()


def entries(store: LmdbStore) -> int:
    """Count the entries of the whole log."""
    return count(store.path, store_keys.LOG)


def elsewhere(source: str, *arguments: object) -> Any:
    """Return the JSON that a program in another process prints."""
    command = [sys.executable, "-c", source, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)
