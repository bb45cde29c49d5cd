"""Writes lines to a file descriptor from its own thread.

stderr may be a pipe that is not read, a full disk or a stopped terminal. A write can then
block forever, and the event loop must never block. So the loop queues lines and a thread
writes them. The queue is bounded. Lines that do not fit, and lines that a closed pipe or a
full disk did not accept, are dropped and counted. The next successful write reports the count.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque

# About 2 MB of lines: a burst at start or stop fits, and a dead reader costs no more memory.
MAX_QUEUED_LINES = 10_000
# A traceback fits; a line with a whole message in it is cut.
MAX_LINE_CHARS = 64 * 1024
# Pause after a failed write, so that a closed pipe does not keep the thread busy.
RETRY_S = 0.01
# How long `close` waits until queued lines are written.
CLOSE_TIMEOUT_S = 1.0


class LineWriter:
    """`write` never blocks. `close` waits for queued lines, for a bounded time."""

    def __init__(self, fd: int) -> None:
        self.dropped = 0
        self._fd = fd
        self._lines: deque[str] = deque()
        self._reported = 0
        self._closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="polybus-log", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        with self._wake:
            if len(self._lines) >= MAX_QUEUED_LINES:
                self.dropped += 1
                return
            self._lines.append(line[:MAX_LINE_CHARS])
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._lines and not self._closing:
                    self._wake.wait()
                queued = list(self._lines)
                self._lines.clear()
                unreported = self.dropped - self._reported
            if not queued:
                return
            lines = [f"{line}\n".encode(errors="backslashreplace") for line in queued]
            if unreported:
                text = f"polybus: {unreported} log lines lost: stderr did not take them\n"
                lines.append(text.encode())
            lost = self._write_all(lines)
            with self._wake:
                if lost:  # the report on earlier losses is one of them and does not count
                    self.dropped += lost - bool(unreported)
                else:
                    self._reported += unreported

    def _write_all(self, lines: list[bytes]) -> int:
        """Write all lines. Returns the number of lines that were not written completely."""
        rest = memoryview(b"".join(lines))
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                select.select([], [self._fd], [], 1.0)
            except OSError:
                time.sleep(RETRY_S)
                # Count the lines from the end that have a part in the unwritten bytes.
                lost, unwritten = 0, len(rest)
                while unwritten > 0:
                    lost += 1
                    unwritten -= len(lines[-lost])
                return lost
        return 0
