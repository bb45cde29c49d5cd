"""Acts of the fault tests of the store, for children of a `ChildServer`.

The report of a child is a file: a line that was written before a kill is there after it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from polybus.store.contract import Store
from polybus.store.engine import Durability
from polybus.store.engine_registry import open_store
from polybus.store.lmdb import writer
from polybus.store.lmdb.lmdb_store import LmdbStore
from tests.rig.power import recorder
from tests.rig.store.checker import Reported, check, progress
from tests.rig.store.workload import PRODUCERS, prepare, work

VERIFIED = "v"
COMPACTED = "c"
LARGE_BYTES = 1 << 10  # of a child: the background committer writes most batches, not all
LOST = "l"  # with the number of acknowledged commits that an interval has lost


def reports(path: str) -> list[str]:
    """Return the complete lines of a report. A kill may have cut the last one short."""
    file = Path(path)
    text = file.read_text() if file.exists() else ""
    return text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]


def reporter(path: str, late: int) -> Callable[[str], None]:
    """Return a function that writes a line after `late` further ones, as a slow network does."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    held: deque[str] = deque()

    def say(line: str) -> None:
        held.append(line)
        if len(held) > late:
            os.write(fd, f"{held.popleft()}\n".encode())

    return say


def live(
    folder: str,
    report: str,
    durability: Durability,
    commits: int,
    late: int = 0,
    compact: bool = False,
) -> list[str]:
    """Check the store that earlier runs left, then run the workload. Returns faults."""
    writer.LARGE_BYTES = LARGE_BYTES  # type: ignore[misc]
    reported = Reported.of(reports(report))
    with open_store(f"lmdb:{folder}", durability=durability, commit_interval_ms=5) as store:
        faults = check(store, reported, strict=durability == "fsync")
        if faults:
            return faults
        prepare(store)
        reporter(report, 0)(VERIFIED)
        begun, say = begin(store, reported, durability), reporter(report, late)
        if lost := sum(max(0, acked - begun[number]) for number, acked in reported.acked.items()):
            reporter(report, 0)(f"{LOST} {lost}")
        with compacted(store, say, compact):
            work(store, begun, say, commits)
    return []


@contextmanager
def compacted(store: Store, say: Callable[[str], None], wanted: bool) -> Iterator[None]:
    """Compact the store repeatedly while the block runs."""
    over = threading.Event()
    assert isinstance(store, LmdbStore)

    def compact() -> None:
        while wanted and not over.is_set():
            store.compact()
            say(COMPACTED)
            over.wait(0.005)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(compact)
        try:
            yield
        finally:
            over.set()
        done.result()


def begin(store: Store, reported: Reported, durability: Durability) -> dict[int, int]:
    """Return the next counters: commits without acknowledgement are repeated.

    With intervals, acknowledged commits may be lost; then the stored progress counts.
    """
    if durability == "fsync":
        return reported.acked
    return {number: progress(store, number) or 0 for number in range(PRODUCERS + 1)}


def look(folder: str, lines: list[str], strict: bool = True) -> list[str]:
    """Open the store as its owner and check it. Opening must succeed."""
    with open_store(f"lmdb:{folder}") as store:
        return check(store, Reported.of(lines), strict=strict)


def record(folder: str, durability: Durability, commits: int, compact: bool = False) -> None:
    """Run the workload in a new folder under the recorder. Acknowledgements become marks."""
    writer.LARGE_BYTES = LARGE_BYTES  # type: ignore[misc]
    marks = recorder.Marks()

    def say(line: str) -> None:
        marks(line.encode())

    with open_store(f"lmdb:{folder}", durability=durability, commit_interval_ms=5) as store:
        prepare(store)
        with compacted(store, say, compact):
            work(store, {}, say, commits)
