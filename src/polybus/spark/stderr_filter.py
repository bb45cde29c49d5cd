"""Keeps what a program says while it starts to itself, unless it fails to.

Spark's Java writes to the terminal that it was started in, some of it before anything of
ours could tell it not to. So it is started with a pipe for its stderr: until it is up
what it says is held back, and lost if all went well; from then on it is passed on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

STDERR = 2
MARK = b"\0polybus: started\0"  # no program says that
CHUNK_BYTES = 65_536


@contextmanager
def hold_stderr(*, is_quiet: bool = True) -> Iterator[None]:
    """Programs started meanwhile have such a pipe; whoever else writes to stderr waits."""
    if not is_quiet:
        yield
        return
    terminal = os.dup(STDERR)
    reading, writing = os.pipe()
    passing = _StderrForwarder(reading, terminal)
    os.dup2(writing, STDERR)
    os.close(writing)
    passing.start()
    try:
        yield
    except BaseException:
        passing.release(show=True)
        raise
    else:
        passing.release(show=False)
    finally:
        os.dup2(terminal, STDERR)


class _StderrForwarder(Thread):
    """Ends with the last program that writes; it does not keep ours from ending."""

    def __init__(self, reading: int, terminal: int) -> None:
        super().__init__(name="polybus-spark-stderr", daemon=True)
        self._reading = reading
        self._terminal = terminal
        self._show = False
        self._released = Event()

    def run(self) -> None:
        try:
            self._pass_on(self._hold())
            while said := os.read(self._reading, CHUNK_BYTES):
                self._pass_on(said)
        except OSError:
            pass  # nobody is there to be told
        os.close(self._reading)

    def release(self, *, show: bool) -> None:
        """What was said up to now is shown or not, what is said from now on is."""
        self._show = show
        os.write(STDERR, MARK)
        self._released.wait()

    def _hold(self) -> bytes:
        """Reads up to the mark; what came behind it, and before it if that is to be shown."""
        held = b""
        while MARK not in held:
            held += os.read(self._reading, CHUNK_BYTES)
        before, _, behind = held.partition(MARK)
        if self._show:
            self._pass_on(before)
        self._released.set()
        return behind

    def _pass_on(self, said: bytes) -> None:
        if said:
            os.write(self._terminal, said)
