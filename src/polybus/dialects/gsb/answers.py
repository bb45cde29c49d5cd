"""Replies without a request id: they come in the order of their requests.

Most are known at once. A broadcast to a durable topic is answered when it is on disk, and
what was asked behind it is answered behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Answers:
    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._slots: deque[Slot] = deque()
        self.unsettled_bytes = 0

    def __len__(self) -> int:
        """How many wait, be it for those before them."""
        return len(self._slots)

    def add(self, data: bytes) -> None:
        if self._slots:
            self._slots.append(Slot(0, data))
        else:
            self._send(data)

    def promise(self, size: int) -> Slot:
        """A place for an answer that is still to come; `size` is what it is about."""
        slot = Slot(size)
        self._slots.append(slot)
        self.unsettled_bytes += size
        return slot

    def fulfil(self, slot: Slot, data: bytes) -> None:
        slot.data = data
        self.unsettled_bytes -= slot.size
        while self._slots and (ready := self._slots[0].data) is not None:
            self._slots.popleft()
            self._send(ready)


class Slot:
    __slots__ = ("data", "size")

    def __init__(self, size: int, data: bytes | None = None) -> None:
        self.size = size
        self.data = data
