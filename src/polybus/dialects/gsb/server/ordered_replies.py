"""Replies without a request id: they come in the order of their requests.

Most are known at once. A broadcast to a durable topic is answered when it is on disk, and
what was asked behind it is answered behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

# What an answer weighs that waits, for itself: an object, and a few bytes.
SLOT_BYTES = 128


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
            self._append(Slot(0, data))
        else:
            self._send(data)

    def promise(self, size: int) -> Slot:
        """A place for an answer that is still to come; `size` is what it is about."""
        return self._append(Slot(size))

    def fulfil(self, slot: Slot, data: bytes) -> None:
        slot.data = data
        while self._slots and (ready := self._slots[0].data) is not None:
            self.unsettled_bytes -= self._slots.popleft().weight
            self._send(ready)

    def _append(self, slot: Slot) -> Slot:
        self._slots.append(slot)
        self.unsettled_bytes += slot.weight
        return slot


class Slot:
    __slots__ = ("data", "weight")

    def __init__(self, size: int, data: bytes | None = None) -> None:
        self.weight = size + SLOT_BYTES
        self.data = data
