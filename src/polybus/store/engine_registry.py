"""From a URL to an engine: the only file that knows them all.

    memory:         a store of this call's own, gone when it is closed
    memory:NAME     shared by all who open it in this process
    lmdb:PATH       a folder; one process owns it, others may read it
    nats://HOST,…   still to come

An engine is imported when it is asked for: who uses `memory:` does not pay for LMDB.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from polybus.errors import AddressError, UsageError
from polybus.store.contract import Store

Durability = Literal["fsync", "interval"]

COMMIT_INTERVAL_MS = 50  # of `interval`: what a crash may lose, in time


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How a store is to be opened; what an engine has no use for, it does not look at."""

    read_only: bool = False
    durability: Durability = "fsync"
    commit_interval_ms: int = COMMIT_INTERVAL_MS
    wall_ns: Callable[[], int] = time.time_ns


def open_store(
    url: str,
    *,
    read_only: bool = False,
    durability: Durability = "fsync",
    commit_interval_ms: int = COMMIT_INTERVAL_MS,
    wall_ns: Callable[[], int] = time.time_ns,
) -> Store:
    """The store behind a URL. `AddressError` if there can be none."""
    if durability not in get_args(Durability):
        raise UsageError(f"durability is 'fsync' or 'interval', not {durability!r}")
    if commit_interval_ms < 1:
        raise UsageError(f"commit_interval_ms is at least 1, not {commit_interval_ms}")
    scheme, colon, place = url.partition(":")
    opener = _OPENERS.get(scheme) if colon else None
    if opener is None:
        known = ", ".join(f"{name}:" for name in _OPENERS)
        raise AddressError(f"{url!r} names no engine; there are {known}")
    return opener(place, StoreOptions(read_only, durability, commit_interval_ms, wall_ns))


def _open_memory(place: str, wishes: StoreOptions) -> Store:
    from polybus.store.memory.memory_store import MemoryStore
    from polybus.store.memory.shared_namespaces import open_named

    if wishes.read_only:
        raise UsageError("a store in memory has no other readers: open it for writing")
    return open_named(place) if place else MemoryStore(wall_ns=wishes.wall_ns)


def _open_lmdb(place: str, wishes: StoreOptions) -> Store:
    from polybus.store.lmdb.lmdb_store import LmdbStore

    if not place:
        raise AddressError("lmdb: needs the path of a folder: lmdb:PATH")
    return LmdbStore(
        Path(place),
        read_only=wishes.read_only,
        durability=wishes.durability,
        commit_interval_ms=wishes.commit_interval_ms,
        wall_ns=wishes.wall_ns,
    )


def _open_nats(place: str, wishes: StoreOptions) -> Store:
    raise AddressError(f"nats:{place}: this engine is still to come")


_OPENERS: dict[str, Callable[[str, StoreOptions], Store]] = {
    "memory": _open_memory,
    "lmdb": _open_lmdb,
    "nats": _open_nats,
}
