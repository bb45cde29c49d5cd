"""Orders for processes of Spark that come by a point of the sink, and the proof of each.

An order is a file in $POLYBUS_ORDERS: the point, what is to be done, and at which passing,
`staged.kill.3`. Whoever comes by renames it to `staged.kill.2`, and so on, whatever process
it is; the one that counts to zero carries it out. `staged.kill.done` then holds who that was,
so a test can prove that it happened there, and once.

    kill self       SIGKILL: nobody gets a chance to tidy up
    kill driver     the same for the processes in the file `driver`, then for itself
    fail            raises
    fail always     raises, and so do all who come by later
    wait            goes on once the file `staged.go` is there

The points are calls of `passing` that a patch adds to a copy of `polybus.spark`. Of the sink:

    planned     the driver prepares an epoch: the last one is in Spark's commit log
    begun       a task has its first rows, and no stage yet
    mid-stage   it has put rows into its stage
    staged      all of them are on disk, and the task has not reported to the driver
    publishing  the driver is about to publish
    published   it has, and the epoch is not in Spark's commit log

Of the archive:

    mid-file    a task has written a part of a file
    written     all of its files are on disk, and the task has not reported to the driver
    archiving   the driver is about to add the files of a batch to the archive
    archived    it has, and the batch is not in Spark's commit log
    compacted   a large file is written, and the small ones still count
    trimming    retain is about to trim a topic
    trimmed     it has

Of the source, and of stats:

    reading     a task has handed a few rows to Spark
    counting    a batch is about to be counted
    counted     its sums are on disk, and the batch is not in Spark's commit log
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.rig.observer import until

FOLDER = "POLYBUS_ORDERS"
POINTS = (
    *("planned", "begun", "mid-stage", "staged", "publishing", "published"),
    *("mid-file", "written", "archiving", "archived", "compacted", "trimming", "trimmed"),
    *("reading", "counting", "counted"),
)
DRIVER = "driver"
DONE, GO, ALWAYS = "done", "go", "always"
PATIENCE_S = 120.0


class OrderedFailure(Exception):
    """A test wanted this."""


# --- in the process that comes by


def passing(point: str, detail: str = "") -> None:
    folder = Path(os.environ[FOLDER])
    if (folder / f"{point}.{ALWAYS}").exists():
        raise OrderedFailure(f"at {point}, as ordered for all")
    for what in ("kill", "fail", "wait"):
        order = _count_down(folder, f"{point}.{what}")
        if order is not None:
            _done(folder / f"{point}.{what}.{DONE}", order, detail)
            _carry_out(folder, point, order)


def _carry_out(folder: Path, point: str, order: str) -> None:
    what, *how = order.split()
    if what == "wait":
        until((folder / f"{point}.{GO}").exists, f"the word to go on at {point}", PATIENCE_S)
    elif what == "fail":
        if how == [ALWAYS]:
            (folder / f"{point}.{ALWAYS}").touch()
        raise OrderedFailure(f"at {point}, as ordered")
    else:
        pids = (folder / DRIVER).read_text().split() if how == [DRIVER] else []
        for pid in [*map(int, pids), os.getpid()]:
            os.kill(pid, signal.SIGKILL)


def _count_down(folder: Path, name: str) -> str | None:
    """The order, if it is this process's to carry out."""
    for order in folder.glob(f"{name}.[0-9]*"):
        left = int(order.suffix[1:]) - 1
        try:
            text = order.read_text()
            order.rename(order.with_suffix(f".{left}" if left else ".taken"))
        except FileNotFoundError:
            return _count_down(folder, name)  # another was faster
        return text if left == 0 else None
    return None


def _done(path: Path, order: str, detail: str) -> None:
    """On disk before anything is done: a killed process can write no more."""
    taken = path.with_suffix(".taken")
    taken.write_text(json.dumps({"order": order, "pid": os.getpid(), "detail": detail}))
    taken.rename(path)


# --- in the test


class Orders:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        return {FOLDER: str(self.folder)}

    def give(self, point: str, order: str, passings: int = 1) -> None:
        assert point in POINTS
        (self.folder / f"{point}.{order.split()[0]}.{passings}").write_text(order)

    def done(self, point: str, what: str) -> dict[str, Any] | None:
        """Who carried it out, if anybody did."""
        try:
            found: dict[str, Any] = json.loads((self.folder / f"{point}.{what}.{DONE}").read_text())
        except FileNotFoundError:
            return None
        return found

    def go(self, point: str) -> None:
        (self.folder / f"{point}.{GO}").touch()

    def forget(self) -> None:
        """All orders, carried out or not. Nobody comes by meanwhile."""
        for path in self.folder.glob("*.*"):
            path.unlink()


def driver_is(*pids: int) -> None:
    """Told by the driver: whom `kill driver` means."""
    (Path(os.environ[FOLDER]) / DRIVER).write_text(" ".join(map(str, pids)))
