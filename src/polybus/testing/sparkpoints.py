"""Orders for processes of Spark that come by a point of the sink, and the proof of each.

An order is a file in $POLYBUS_ORDERS, named after the point and how many passings it takes:
`staged.3`. Whoever comes by renames it to `staged.2`, and so on, whatever process it is; the
one that makes it `staged.done` carries it out. The file then holds who that was, so a test
can prove that it happened there, and once.

    kill self       SIGKILL: nobody gets a chance to tidy up
    kill driver     the same for the processes in the file `driver`, then for itself
    fail            raises
    wait            goes on once the file `staged.go` is there
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polybus.spark.points import POINTS, VARIABLE
from polybus.testing.watch import until

FOLDER = "POLYBUS_ORDERS"
DRIVER = "driver"
DONE, GO = "done", "go"


class OrderedFailure(Exception):
    """A test wanted this."""


# --- in the process that comes by


def passing(point: str, detail: str) -> None:
    folder = Path(os.environ[FOLDER])
    order = _count_down(folder, point)
    if order is None:
        return
    what, *whom = order.split()
    if what == "kill":
        pids = [int(pid) for pid in (folder / DRIVER).read_text().split()]
        _done(folder, point, order, detail)
        for pid in pids if whom == [DRIVER] else []:
            os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    _done(folder, point, order, detail)
    if what == "fail":
        raise OrderedFailure(f"at {point}, as ordered")
    until((folder / f"{point}.{GO}").exists, f"the word to go on at {point}", 120.0)


def _count_down(folder: Path, point: str) -> str | None:
    """The order, if it is this process's to carry out."""
    for order in _waiting(folder, point):
        left = int(order.suffix[1:]) - 1
        try:
            text = order.read_text()
            order.rename(order.with_suffix(f".{left}" if left else ".taken"))
        except FileNotFoundError:
            return _count_down(folder, point)  # another was faster
        return text if left == 0 else None
    return None


def _waiting(folder: Path, point: str) -> Iterator[Path]:
    return (path for path in folder.glob(f"{point}.*") if path.suffix[1:].isdigit())


def _done(folder: Path, point: str, order: str, detail: str) -> None:
    """On disk before anything is done: a killed process can write no more."""
    text = json.dumps({"order": order, "pid": os.getpid(), "detail": detail})
    (folder / f"{point}.taken").write_text(text)
    (folder / f"{point}.taken").rename(folder / f"{point}.{DONE}")


# --- in the test


class Orders:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        return {VARIABLE: __name__, FOLDER: str(self.folder)}

    def give(self, point: str, order: str, passings: int = 1) -> None:
        assert point in POINTS
        self.forget(point)
        (self.folder / f"{point}.{passings}").write_text(order)

    def done(self, point: str) -> dict[str, Any] | None:
        """Who carried it out, if anybody did."""
        try:
            found: dict[str, Any] = json.loads((self.folder / f"{point}.{DONE}").read_text())
        except FileNotFoundError:
            return None
        return found

    def go(self, point: str) -> None:
        (self.folder / f"{point}.{GO}").touch()

    def forget(self, point: str) -> None:
        for path in self.folder.glob(f"{point}.*"):
            path.unlink()


def driver_is(*pids: int) -> None:
    """Told by the driver: whom `kill driver` means."""
    (Path(os.environ[FOLDER]) / DRIVER).write_text(" ".join(map(str, pids)))
