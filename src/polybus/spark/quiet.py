"""Keeps what a program says while it starts to itself, unless it fails to.

Spark's Java writes to the terminal that it was started in, some of it before anything of
ours could tell it not to. So it is started with a pipe for its stderr: until it is up
what it says is held back, and lost if all went well; from then on it is passed on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, Thread

STDERR = 2


@contextmanager
def held_back(*, is_quiet: bool = True) -> Iterator[None]:
    """Programs started meanwhile have such a pipe; whoever else writes to stderr waits."""
    if not is_quiet:
        yield
        return
    terminal = os.dup(STDERR)
    reading, writing = os.pipe()
    passing = _Passing(reading, terminal)
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


class _Passing(Thread):
    """Ends with the program that writes; it does not keep ours from ending."""

    def __init__(self, reading: int, terminal: int) -> None:
        super().__init__(name="polybus-spark-stderr", daemon=True)
        self._reading = reading
        self._terminal = terminal
        self._lock = Lock()
        self._held: bytearray | None = bytearray()  # None: passed on

    def run(self) -> None:
        try:
            while said := os.read(self._reading, 65_536):
                with self._lock:
                    if self._held is None:
                        os.write(self._terminal, said)
                    else:
                        self._held += said
        except OSError:
            pass  # nobody is there to be told
        os.close(self._reading)

    def release(self, *, show: bool) -> None:
        with self._lock:
            held, self._held = self._held, None
            if show and held:
                os.write(self._terminal, held)
