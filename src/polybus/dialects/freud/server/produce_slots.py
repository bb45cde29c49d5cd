"""Reply slots: Produces that are on their way to the disk, in the order they were asked for.

A commit takes a disk's time, and the next Produce need not wait for it: it gets a
slot behind the first. Slots are filled in whatever order commits end, and answered
from the head on, so answers keep the order of the requests. Everything but a Produce
to a durable topic waits until all slots are answered: a Get behind a Produce finds
what was produced. What all slots of a connection hold is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from polybus.bus.request_outcome import RequestOutcome

MESSAGE_BYTES = 16  # what a message holds beside its body, here and in its answer


class ProduceSlot:
    __slots__ = ("first_id", "group", "outcome", "size")

    def __init__(self, group: Any, outcome: RequestOutcome | None = None) -> None:
        self.group = group
        self.size = group_bytes(group)
        self.outcome = outcome
        self.first_id = 0


class ProduceSlots:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._slots: deque[ProduceSlot] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._slots)

    def has_room_for(self, group: Any) -> bool:
        """One always fits: it was read already."""
        return not self._slots or self._bytes + group_bytes(group) <= self._max_bytes

    def add(self, slot: ProduceSlot) -> None:
        self._slots.append(slot)
        self._bytes += slot.size

    def take_filled(self) -> Iterator[ProduceSlot]:
        """Those at the head whose outcome is known; they are no longer here."""
        while self._slots and self._slots[0].outcome is not None:
            slot = self._slots.popleft()
            self._bytes -= slot.size
            yield slot

    def clear(self) -> None:
        self._slots.clear()
        self._bytes = 0


def group_bytes(group: Any) -> int:
    return len(group.bodies) + MESSAGE_BYTES * int(group.count)
