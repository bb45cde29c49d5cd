"""Lines to a file descriptor, from a thread of its own.

stderr may be a pipe that nobody reads, a full disk or a stopped terminal; a
write to it can then block for ever, and the event loop must never block. So the
loop only queues lines; a thread writes them. The queue is bounded: when it is
full, lines are dropped and counted, and the first line that gets through again
says how many.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque

# Some 2 MB of lines: a burst at start or stop fits, a dead reader costs no more than this.
MAX_QUEUED_LINES = 10_000
# A traceback fits; a line with a whole message in it does not deserve more.
MAX_LINE_CHARS = 64 * 1024
# At the end: how long a reader of stderr may take for what is queued.
CLOSE_TIMEOUT_S = 1.0


class LineWriter:
    """`write` never blocks. `close` waits for what is queued, for a bounded time."""

    def __init__(self, fd: int) -> None:
        self.dropped = 0
        self._fd = fd
        self._lines: deque[str] = deque()
        self._told = 0
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
                lines = list(self._lines)
                self._lines.clear()
                if not lines:
                    return
                lost = self.dropped - self._told
                self._told = self.dropped
            if lost:
                lines.append(f"polybus: {lost} log lines lost: stderr was not read")
            self._put("".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))

    def _put(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:
                select.select([], [self._fd], [], 1.0)
            except OSError:
                time.sleep(
                    0.01
                )  # a closed pipe, a full disk: these lines are lost, the bus goes on
                return
