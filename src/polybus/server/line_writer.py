"""Lines to a file descriptor, from a thread of its own.

stderr may be a pipe that is not read, a full disk or a stopped terminal; a
write to it can then block forever, and the event loop must never block. So the
loop only queues lines; a thread writes them. The queue is bounded: when it is
full, lines are dropped, as are those that a closed pipe or a full disk did not
take. All are counted, and once lines get through again the last of them says how many.
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
# After a write that failed: a closed pipe must not make a busy thread.
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
                if lost:  # among them the line about earlier ones, which is no loss itself
                    self.dropped += lost - bool(unreported)
                else:
                    self._reported += unreported

    def _write_all(self, lines: list[bytes]) -> int:
        """How many of them did not get through: a closed pipe, a full disk; the bus goes on."""
        rest = memoryview(b"".join(lines))
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                select.select([], [self._fd], [], 1.0)
            except OSError:
                time.sleep(RETRY_S)
                return _whole_or_part(lines, len(rest))
        return 0


def _whole_or_part(lines: list[bytes], size: int) -> int:
    """How many lines from the end have a part in the last `size` bytes."""
    count = 0
    while size > 0:
        count += 1
        size -= len(lines[-count])
    return count
