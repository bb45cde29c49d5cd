"""A store without room or without descriptors: acts for children of a `ChildServer`.

Commits continue until some are refused because the disk is full. No refused commit may be
stored, and every other must be. When there is room, the same commits with the same stamps
must succeed.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from polybus.errors import PolybusError, StoreFull
from polybus.model.commit import Append, Commit, RecordChange
from polybus.model.stamp import Stamp
from polybus.store.contract import Store
from polybus.store.engine import Durability
from polybus.store.engine_registry import open_store
from polybus.store.lmdb import lmdb_store as _loaded_once_for_all_children  # noqa: F401
from tests.rig.store.checker import Reported, check
from tests.rig.store.workload import PRODUCERS, block_of, name_of, pieces, prepare, progress_keys

REFUSALS = 20
AFTERWARDS = 40  # commits after there is room again
MOST = 100_000
PATIENCE_S = 60.0


class Filler:
    """Commits of all producers in turn, one in flight per producer; refused ones are retried."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._numbers = {topic.name: topic.number for topic in store.topics()}
        self.done = dict.fromkeys(range(PRODUCERS), 0)
        self.refused = 0

    def round(self) -> None:
        waiting = [(number, self._store.commit(self._commit(number))) for number in self.done]
        for number, future in waiting:
            try:
                future.result()
            except StoreFull:
                self.refused += 1
            else:
                self.done[number] += 1

    def until_it_works(self) -> int:
        """Retry until a commit succeeds. Returns the number of refusals.

        With intervals, the store first writes the commits that it resolved before.
        """
        before, deadline = self.refused, time.monotonic() + PATIENCE_S
        while self._is_refused():
            assert time.monotonic() < deadline, "there is room, and it is not used"
            time.sleep(0.005)
        return self.refused - before

    def _is_refused(self) -> bool:
        refused = self.refused
        self.round()
        return self.refused > refused

    def _commit(self, number: int) -> Commit:
        counter = self.done[number] + 1
        appends = tuple(
            Append(self._numbers[topic], shard, block_of(bodies))
            for topic, shard, bodies in pieces(number, counter)
        )
        record = self._store.get(b"opened/%d" % number)
        assert record is not None
        stamp = Stamp(name_of(number), int(record.value), counter)
        changes = tuple(RecordChange(key, b"%d" % counter) for key in progress_keys(number))
        return Commit(appends, changes=changes, stamp=stamp)

    def reported(self) -> Reported:
        return Reported(dict(self.done))


def fill_disk(folder: str, durability: Durability, ballast: str) -> dict[str, Any]:
    """Commit until the disk is full, then remove the file `ballast` and continue."""
    return fill(folder, durability, lambda: Path(ballast).unlink())


def fill_limit(folder: str, durability: Durability, limit: int) -> dict[str, Any]:
    """The same with a limit of the file size, which is then raised."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    make_room = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (hard, hard))
    return fill(folder, durability, make_room)


def fill(folder: str, durability: Durability, make_room: Callable[[], None]) -> dict[str, Any]:
    faults = []
    with open_store(f"lmdb:{folder}", durability=durability, commit_interval_ms=5) as store:
        prepare(store)
        filler = Filler(store)
        while filler.refused < REFUSALS and sum(filler.done.values()) < MOST:
            filler.round()
        before, refused = sum(filler.done.values()), filler.refused
        if durability == "fsync":  # with intervals, some commits are not yet written
            faults += check(store, filler.reported())
        make_room()
        tries = filler.until_it_works() if durability == "interval" else 0
        for _ in range(AFTERWARDS // PRODUCERS):
            filler.round()
        after = sum(filler.done.values())
        faults += check(store, filler.reported())
    with open_store(f"lmdb:{folder}") as store:
        faults += check(store, filler.reported())
    late = filler.refused - refused - tries
    return {
        "before": before,
        "after": after - before,
        "refused": refused,
        "late": late,
        "faults": faults,
    }


def drop_when_full(folder: str) -> dict[str, Any]:
    """Fill the disk with one topic and drop it. Returns the rows left and the later commits."""
    with open_store(f"lmdb:{folder}") as store:
        large, other = store.create("large", 2, {}), store.create("other", 1, {})
        written = 0
        for number in range(MOST):
            block = block_of([os.urandom(2000)] * 5)
            try:
                store.commit(Commit((Append(large.number, number % 2, block),))).result()
            except StoreFull:
                break
            written += 5
        try:
            store.drop("large")
            outcome = "dropped"
        except StoreFull:
            outcome = "full"
    with open_store(f"lmdb:{folder}") as store:
        topics = {topic.name: store.bounds(topic.number) for topic in store.topics()}
        left = (
            sum(shard.end - shard.start for shard in topics["large"].shards)
            if ("large" in topics)
            else 0
        )
        deadline = time.monotonic() + (PATIENCE_S if outcome == "dropped" else 0.0)
        later = 0
        while later < AFTERWARDS:
            try:
                append = Append(other.number, 0, block_of([os.urandom(2000)]))
                store.commit(Commit((append,))).result()
                later += 1
            except StoreFull:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.005)
    return {"written": written, "outcome": outcome, "left": left, "later": later}


# --- descriptors


def without_descriptors(folder: str, other: str) -> dict[str, Any]:
    """Use a store while the process has no free descriptor, and try to open another one."""
    with open_store(f"lmdb:{folder}") as store:
        prepare(store)
        filler = Filler(store)
        filler.round()
        before = sum(filler.done.values())
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest_descriptor() + 1, hard))
        taken = exhaust()
        for _ in range(10):
            filler.round()
        done = sum(filler.done.values()) - before
        faults = check(store, filler.reported())
        refusal = opening_fails(other)
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with open_store(f"lmdb:{other}") as second:
            prepare(second)
        faults += check(store, filler.reported())
    return {"faults": faults, "done": done, "refusal": refusal}


def highest_descriptor() -> int:
    return max(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208


def exhaust() -> list[int]:
    """Open every descriptor that the limit allows, and return them."""
    taken = []
    while True:
        try:
            taken.append(os.dup(0))
        except OSError:
            return taken


def opening_fails(folder: str) -> str:
    """Return the text of the error of opening a store, empty if it opens."""
    try:
        open_store(f"lmdb:{folder}").close()
    except PolybusError as error:
        return f"{type(error).__name__}: {error}"
    return ""
