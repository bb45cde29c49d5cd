"""Faults at points of the Spark processes, ordered by a test, with a proof of each.

An order is a file in $POLYBUS_ORDERS with the point, the action and the number of passings, such as
`staged.kill.3`. A process that passes the point renames it to `staged.kill.2`, and so on, in any
process. The process that counts to zero executes the order. `staged.kill.done` then has its process
id, so that a test can prove that the fault happened at this point, once.

    kill self       SIGKILL: no cleanup runs
    kill driver     SIGKILL to the processes in the file `driver`, then to itself
    fail            raise an error
    fail always     raise an error at this passing and at every later one
    wait            continue when the file `staged.go` exists

The points are calls of `passing` that a patch adds to a copy of `polybus.spark`. In the sink:

    planned     the driver prepares an epoch; the previous one is in Spark's commit log
    begun       a task has its first rows and no stage
    mid-stage   a task has put rows into its stage
    staged      all rows are on disk, and the task has not reported to the driver
    publishing  the driver is about to publish
    published   the driver has published, and the epoch is not in Spark's commit log

In the archive:

    mid-file    a task has written a part of a file
    written     all files of a task are on disk, and it has not reported to the driver
    archiving   the driver is about to add the files of a batch to the archive
    archived    the driver has added them, and the batch is not in Spark's commit log
    compacted   a merged file is written, and the small ones are still listed
    trimming    retain is about to trim a topic
    trimmed     retain has trimmed it

In the source and in stats:

    reading     a task has given some rows to Spark
    counting    a batch is about to be counted
    counted     the sums are on disk, and the batch is not in Spark's commit log
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
    """Raised by order of a test."""


# --- in the process under test


def passing(point: str, detail: str = "") -> None:
    folder = Path(os.environ[FOLDER])
    if (folder / f"{point}.{ALWAYS}").exists():
        raise OrderedFailure(f"at {point}, as ordered for all")
    for what in ("kill", "fail", "wait"):
        order = _count_down(folder, f"{point}.{what}")
        if order is not None:
            _record_done(folder / f"{point}.{what}.{DONE}", order, detail)
            _execute(folder, point, order)


def _execute(folder: Path, point: str, order: str) -> None:
    what, *how = order.split()
    if what == "wait":
        until((folder / f"{point}.{GO}").exists, f"permission to continue at {point}", PATIENCE_S)
    elif what == "fail":
        if how == [ALWAYS]:
            (folder / f"{point}.{ALWAYS}").touch()
        raise OrderedFailure(f"at {point}, as ordered")
    else:
        pids = (folder / DRIVER).read_text().split() if how == [DRIVER] else []
        for pid in [*map(int, pids), os.getpid()]:
            os.kill(pid, signal.SIGKILL)


def _count_down(folder: Path, name: str) -> str | None:
    """Count a passing. Returns the order if this process must execute it."""
    for order in folder.glob(f"{name}.[0-9]*"):
        left = int(order.suffix[1:]) - 1
        try:
            text = order.read_text()
            order.rename(order.with_suffix(f".{left}" if left else ".taken"))
        except FileNotFoundError:
            return _count_down(folder, name)  # another process counted first
        return text if left == 0 else None
    return None


def _record_done(path: Path, order: str, detail: str) -> None:
    """Record the execution on disk before it happens: a killed process can write nothing."""
    taken = path.with_suffix(".taken")
    taken.write_text(json.dumps({"order": order, "pid": os.getpid(), "detail": detail}))
    taken.rename(path)


# --- in the test


class FaultOrders:
    """The orders of a test."""

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
        """Return the process that executed the order; None if no process did."""
        try:
            text = (self.folder / f"{point}.{what}.{DONE}").read_text()
        except FileNotFoundError:
            return None
        record: dict[str, Any] = json.loads(text)
        return record

    def go(self, point: str) -> None:
        (self.folder / f"{point}.{GO}").touch()

    def clear(self) -> None:
        """Remove all orders, executed or not. No process may be running."""
        for path in self.folder.glob("*.*"):
            path.unlink()


def set_driver_processes(*pids: int) -> None:
    """Record the processes that `kill driver` kills. Called by the driver."""
    (Path(os.environ[FOLDER]) / DRIVER).write_text(" ".join(map(str, pids)))
