"""Oracle of kernel/receive_buffer: one queue of bytes in front of a session.

The size of the offered buffer is not specified, only that it is not empty, so the test
passes the received bytes here.
"""

from __future__ import annotations

from collections.abc import Callable

Receive = Callable[[bytes, int, int], int]


class ReceiveBuffer:
    def __init__(self) -> None:
        self._queue = b""
        self.receive: Receive | None = None

    @property
    def held_bytes(self) -> int:
        return len(self._queue)

    def arrived(self, data: bytes) -> None:
        if self.receive is not None:
            self._queue += data
            self.redeliver()

    def redeliver(self) -> None:
        if self._queue and self.receive is not None:
            self._queue = self._queue[self.receive(self._queue, 0, len(self._queue)) :]
