"""Children that may be killed: started in a few milliseconds, one after the other.

    with Nursery("tests.rig.store.child", env) as nursery:
        child = nursery.start("work", folder, 7)     # storechild.work(folder, 7), in a child
        child.kill()                                 # SIGKILL, or let it end
        ended = child.wait()                         # how it ended; what it answered

A process of its own imports the module once and then forks for each child, so a child
costs a fork and not an interpreter's start; and it is not the process of the tests,
whose threads no fork would survive. The module must start no thread when imported.

A child's answer is JSON, in a file: what was written there before a kill is still there
after it. A child that is dead stays a zombie until it was waited for here, so that its
number cannot come to mean somebody else.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

PR_SET_PDEATHSIG = 1


class Ended(NamedTuple):
    """`signal` is what killed it, 0 if nothing did; `failure` is a traceback."""

    signal: int
    answer: Any = None
    failure: str = ""


class Nursery:
    """The process that forks. One child at a time."""

    def __init__(self, module: str, env: Mapping[str, str] | None = None) -> None:
        # pytest's output and the child's words must not get between answers.
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(env or {})},
            text=True,
        )
        self._folder = tempfile.TemporaryDirectory(prefix="pb-nursery-")
        self._answer = Path(self._folder.name, "answer")

    def start(self, act: str, *args: Any) -> Child:
        self._answer.unlink(missing_ok=True)
        self._say([str(self._answer), act, *args])
        return Child(self, int(self._hear()))

    def run(self, act: str, *args: Any) -> Ended:
        return self.start(act, *args).wait()

    def ask(self, act: str, *args: Any) -> Any:
        """What the child answers; one that fails, or dies, fails here."""
        ended = self.run(act, *args)
        if ended.signal or ended.failure:
            raise ChildFailed(f"{act}: signal {ended.signal}\n{ended.failure}")
        return ended.answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def reap(self) -> Ended:
        """Waits for the child's end and lets go of it."""
        status = int(self._hear())
        self._say("reap")
        if status < 0:
            return Ended(-status)
        return Ended(0, **json.loads(self._answer.read_text()))

    def _say(self, what: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildFailed("the process that forks has ended")
        return line


class ChildFailed(Exception):
    """A child that was to answer did not."""


class Child:
    """One that runs, or is a zombie."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def ended(self) -> bool:
        """Dead, and not waited for."""
        state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2]
        return state.split()[0] == "Z"

    def wait(self) -> Ended:
        return self._nursery.reap()


# --- the process that forks


def die_with_the_parent(parent: int | None = None) -> None:
    """However it ends: nobody else would end us.

    Who was forked says by whom: the parent may have ended before we ask.
    """
    parent = parent or os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _main(module: str) -> None:
    die_with_the_parent()
    acts = importlib.import_module(module)
    gc.freeze()  # a child's collector would touch, and so copy, all that it shares
    for line in sys.stdin:
        answer, act, *args = json.loads(line)
        own, pid = os.getpid(), os.fork()
        if pid == 0:
            die_with_the_parent(own)
            _live(Path(answer), acts, act, args)
        _tell(pid)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        _tell(0 if ended.si_code == os.CLD_EXITED else -ended.si_status)
        sys.stdin.readline()
        os.waitpid(pid, 0)


def _tell(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def _live(path: Path, acts: Any, act: str, args: list[Any]) -> None:
    """The child's whole life. It never returns into its parent's code."""
    # Its words go to where errors go: stdout belongs to the talk with the tests.
    os.dup2(2, 1)
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        said = {"answer": getattr(acts, act)(*args)}
    except BaseException:
        said = {"failure": traceback.format_exc()}
    path.write_text(json.dumps(said))
    os._exit(0)


if __name__ == "__main__":
    _main(sys.argv[1])
