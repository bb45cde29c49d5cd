"""Replies without a request id: they come in the order of their requests.

Most are known at once. A broadcast to a durable topic is answered when it is on disk, and
what was asked behind it is answered behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

# What an answer weighs that waits, for itself: an object, and a few bytes.
SLOT_BYTES = 128


class OrderedReplies:
    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._slots: deque[ReplySlot] = deque()
        self.pending_bytes = 0

    def __len__(self) -> int:
        """How many wait, be it for those before them."""
        return len(self._slots)

    def add(self, data: bytes) -> None:
        if self._slots:
            self._append(ReplySlot(0, data))
        else:
            self._send(data)

    def reserve(self, size: int) -> ReplySlot:
        """A place for an answer that is still to come; `size` is what it is about."""
        return self._append(ReplySlot(size))

    def fulfil(self, slot: ReplySlot, data: bytes) -> None:
        slot.data = data
        while self._slots and (ready := self._slots[0].data) is not None:
            self.pending_bytes -= self._slots.popleft().weight
            self._send(ready)

    def _append(self, slot: ReplySlot) -> ReplySlot:
        self._slots.append(slot)
        self.pending_bytes += slot.weight
        return slot


class ReplySlot:
    __slots__ = ("data", "weight")

    def __init__(self, size: int, data: bytes | None = None) -> None:
        self.weight = size + SLOT_BYTES
        self.data = data
