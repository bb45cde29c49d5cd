"""What the fault tests of the store have done in children of a `Nursery`.

The report of a child is a file: a line that was written before a kill is there after it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from polybus.store.contract import Store
from polybus.store.lmdb import engine as _loaded_once_for_all_children  # noqa: F401
from polybus.store.opening import Durability, open_store
from polybus.testing import powercut
from polybus.testing.storecheck import Reported, check, progress
from polybus.testing.storework import PRODUCERS, prepare, work

VERIFIED = "v"


def reports(path: str) -> list[str]:
    """The lines of a report; one that a kill cut short was never said."""
    file = Path(path)
    text = file.read_text() if file.exists() else ""
    return text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]


def reporter(path: str, late: int) -> Callable[[str], None]:
    """Says each line when so many others have come after it: answers take their time."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    held: deque[str] = deque()

    def say(line: str) -> None:
        held.append(line)
        if len(held) > late:
            os.write(fd, f"{held.popleft()}\n".encode())

    return say


def live(
    folder: str, report: str, durability: Durability, commits: int, late: int = 0
) -> list[str]:
    """A life: looks at what the lives before left, then works on. Answers with faults."""
    said = Reported.of(line for line in reports(report) if line != VERIFIED)
    with open_store(f"lmdb:{folder}", durability=durability, commit_interval_ms=5) as store:
        faults = check(store, said, strict=durability == "fsync")
        if faults:
            return faults
        prepare(store)
        reporter(report, 0)(VERIFIED)
        work(store, begin(store, said, durability), reporter(report, late), commits)
    return []


def begin(store: Store, said: Reported, durability: Durability) -> dict[int, int]:
    """Where producers go on: what was not acknowledged is repeated.

    What an interval lost was acknowledged; there a producer goes by what is stored.
    """
    if durability == "fsync":
        return said.acked
    return {number: progress(store, number) or 0 for number in range(PRODUCERS + 1)}


def look(folder: str, lines: list[str], strict: bool = True) -> list[str]:
    """Opens what is there as its owner, and checks it; opening must work."""
    with open_store(f"lmdb:{folder}") as store:
        return check(store, Reported.of(lines), strict=strict)


def record(folder: str, durability: Durability, commits: int) -> None:
    """Works in a new folder under the recorder; acknowledgements become marks."""
    marks = powercut.Marks()
    with open_store(f"lmdb:{folder}", durability=durability, commit_interval_ms=5) as store:
        prepare(store)
        work(store, {}, lambda line: marks(line.encode()), commits)
