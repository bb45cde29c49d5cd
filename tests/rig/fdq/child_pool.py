"""Many children at once, each a fork of one process that has imported what they need.

    with Brood() as brood:
        child = brood.start("consume", orders)
        child.signal(signal.SIGSTOP)
        child.signal(signal.SIGKILL)
        child.wait()                    # -9

As in `tests.rig.forked_child` a child costs a fork and not an interpreter's start, and one
that has ended stays a zombie until it was waited for: its number means nobody else.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.rig.forked_child import ChildFailed, die_with_the_parent

CHILDREN = "tests.rig.fdq.clients"


class Brood:
    """Children are functions of `module`; its dataclass `Orders` says what one is to do."""

    def __init__(self, module: str = CHILDREN) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.children: list[Child] = []

    def start(self, act: str, orders: Any) -> Child:
        pid = self.ask("start", act, asdict(orders))
        child = Child(self, pid, orders)
        self.children.append(child)
        return child

    def ask(self, *what: Any) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ChildFailed("the process that forks has ended")
        return int(line)

    def close(self) -> None:
        """All end with the process that forks."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Child:
    """One that runs, stands still, or is a zombie."""

    def __init__(self, brood: Brood, pid: int, orders: Any) -> None:
        self._brood = brood
        self._code: int | None = None
        self.pid = pid
        self.orders = orders

    @property
    def name(self) -> str:
        return str(self.orders.name)

    def signal(self, number: signal.Signals) -> None:
        if self._code is None:
            os.kill(self.pid, number)

    @property
    def has_ended(self) -> bool:
        if self._code is not None:
            return True
        state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2]
        return state.split()[0] == "Z"

    def wait(self) -> int:
        """Its exit code, or the signal that ended it, below zero."""
        if self._code is None:
            self._code = self._brood.ask("reap", self.pid)
        return self._code


# --- the process that forks


def _main(module: str) -> None:
    die_with_the_parent()
    children = importlib.import_module(module)
    gc.freeze()  # a child's collector would touch, and so copy, all that it shares
    for line in sys.stdin:
        what, *args = json.loads(line)
        answer = _start(children, *args) if what == "start" else _reap(*args)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


def _start(children: Any, act: str, orders: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:  # it never returns into its parent's code
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        getattr(children, act)(children.Orders(**orders))
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _reap(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    _main(sys.argv[1])
