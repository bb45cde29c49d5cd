"""Produces to durable topics that wait for their commit, in the order of their answers.

A later Produce need not wait for an earlier commit: it gets the next slot. Commits fill slots
in any order, and slots are answered from the head. Every request other than a durable Produce
waits until all slots are answered, so that a Get after a Produce finds the message. The bytes
of all slots of a connection are bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from polybus.bus.request_outcome import RequestOutcome

if TYPE_CHECKING:
    from polybus.dialects.freud.server.request_scanner import ProduceRun

MESSAGE_BYTES = 16  # memory of a message beside its body, here and in its answer


class ProduceSlot:
    __slots__ = ("first_id", "outcome", "run", "size")

    def __init__(self, run: ProduceRun, outcome: RequestOutcome | None = None) -> None:
        self.run = run
        self.size = run_bytes(run)
        self.outcome = outcome
        self.first_id = 0


class ProduceSlots:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._slots: deque[ProduceSlot] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._slots)

    def has_room_for(self, run: ProduceRun) -> bool:
        """Return True if the run fits. One run always does: its bytes are in memory anyway."""
        return not self._slots or self._bytes + run_bytes(run) <= self._max_bytes

    def add(self, slot: ProduceSlot) -> None:
        self._slots.append(slot)
        self._bytes += slot.size

    def take_filled(self) -> Iterator[ProduceSlot]:
        """Remove and yield the slots at the head whose outcome is known."""
        while self._slots and self._slots[0].outcome is not None:
            slot = self._slots.popleft()
            self._bytes -= slot.size
            yield slot

    def clear(self) -> None:
        self._slots.clear()
        self._bytes = 0


def run_bytes(run: ProduceRun) -> int:
    return len(run.bodies) + MESSAGE_BYTES * run.count
