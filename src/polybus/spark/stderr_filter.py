"""Hold back the stderr of child processes while they start.

Spark's Java writes to its stderr before any setting can turn that off. It is therefore started
with a pipe as stderr. Its output is dropped if the start succeeds, and shown if it fails. Later
output is forwarded to the terminal.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from polybus.model.control_characters import ControlEscaper

STDERR = 2
MARK = b"\0polybus: started\0"  # marks the end of the start; does not occur in output
CHUNK_BYTES = 65_536


@contextmanager
def hold_stderr(*, is_quiet: bool = True) -> Iterator[None]:
    """Hold back stderr, of this process and of child processes started meanwhile."""
    if not is_quiet:
        yield
        return
    terminal = os.dup(STDERR)
    reading, writing = os.pipe()
    forwarder = _StderrForwarder(reading, terminal)
    os.dup2(writing, STDERR)
    os.close(writing)
    forwarder.start()
    try:
        yield
    except BaseException:
        forwarder.release(show=True)
        raise
    else:
        forwarder.release(show=False)
    finally:
        os.dup2(terminal, STDERR)


class _StderrForwarder(Thread):
    """Daemon thread that forwards the pipe until the last process that writes to it has ended."""

    def __init__(self, reading: int, terminal: int) -> None:
        super().__init__(name="polybus-spark-stderr", daemon=True)
        self._reading = reading
        self._terminal = terminal
        # Errors of Spark quote names and bodies.
        self._escaper = ControlEscaper() if os.isatty(terminal) else None
        self._show = False
        self._released = Event()

    def run(self) -> None:
        try:
            held = b""
            while MARK not in held:
                held += os.read(self._reading, CHUNK_BYTES)
            before, _, later = held.partition(MARK)
            if self._show:
                self._forward(before)
            self._released.set()
            self._forward(later)
            while output := os.read(self._reading, CHUNK_BYTES):
                self._forward(output)
        except OSError:
            pass  # the terminal is gone
        os.close(self._reading)

    def release(self, *, show: bool) -> None:
        """End holding back: show or drop the output up to now, forward later output."""
        self._show = show
        os.write(STDERR, MARK)
        self._released.wait()

    def _forward(self, output: bytes) -> None:
        if self._escaper is not None:
            output = self._escaper.escape(output).encode()
        if output:
            os.write(self._terminal, output)
