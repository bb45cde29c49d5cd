"""A plain version of dialects/freud/server/unread_queue: a list of messages.

A message is (id, time, body); a range is a list of messages. How the kernel gathers them
into chunks shows only in how many it hands out at once, so `take` gets that number.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple


class Message(NamedTuple):
    id: int
    time_ns: int
    body: bytes
    notice: bool = False


class Writer:
    def __init__(self) -> None:
        self._last_ns = 0

    def time(self, now_ns: int) -> int:
        self._last_ns = max(self._last_ns, now_ns)
        return self._last_ns

    def write(self, first_id: int, offsets: bytes, bodies: bytes, now_ns: int) -> list[Message]:
        ends = array("i", offsets)
        if not ends or ends[0] != 0 or ends[-1] != len(bodies) or list(ends) != sorted(ends):
            raise ValueError("offsets")
        stamp = self.time(now_ns)
        return [
            Message(first_id + at, stamp, bodies[ends[at] : ends[at + 1]])
            for at in range(len(ends) - 1)
        ]


class Unread:
    """`taken` has the messages that were handed out and neither confirmed nor returned."""

    def __init__(self) -> None:
        self.unread: list[Message] = []
        self.taken: list[Message] = []
        self.gone = False

    @property
    def held_messages(self) -> int:
        return len([one for one in self.unread + self.taken if not one.notice])

    @property
    def held_bytes(self) -> int:
        return sum(len(one.body) for one in self.unread + self.taken if not one.notice)

    def put(self, messages: list[Message]) -> None:
        self.unread += messages

    def take(self, count: int) -> list[Message]:
        first, self.unread = self.unread[:count], self.unread[count:]
        self.taken += first
        return first

    def give_back(self, messages: list[Message]) -> None:
        self.confirm(messages)
        self.unread = sorted(self.unread + messages)

    def confirm(self, messages: list[Message]) -> None:
        for one in messages:
            self.taken.remove(one)

    def end(self) -> int:
        lost = len([one for one in self.unread if not one.notice])
        self.unread = []
        self.gone = True
        return lost
