"""One life of an ephemeral topic: from its Create until every reader has read its end.

An incarnation that was created while an earlier one still waits for its readers
is *pending*: what is produced is buffered until the earlier ones have gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from polybus.dialects.freud.server.ephemeral_topic import Life

if TYPE_CHECKING:
    from polybus.dialects.freud.server.pull_reader import PullReader
    from polybus.dialects.freud.server.unread_queue import Range
    from polybus.model.identity import Identity


class BufferedRange(NamedTuple):
    """`relayed`: push readers have had it already, because it came from one of theirs."""

    found: Range
    relayed: bool


class Incarnation(Life):
    buffer: list[BufferedRange]
    readers: dict[bytes, PullReader]

    def __init__(self, name: bytes, creator: Identity) -> None:
        self.creator = creator
        self.buffered_bytes = 0
        self.buffered_messages = 0
        self.deadline_s: float | None = None  # of its end, or of its buffer

    def append_buffer(self, found: Range, *, relayed: bool) -> None:
        self.buffered_bytes += found.size
        self.buffered_messages += len(found)
        last = self.buffer[-1] if self.buffer else None
        if last is None or last.relayed != relayed or not last.found.extend(found):
            self.buffer.append(BufferedRange(found, relayed))

    def take_buffer(self) -> list[BufferedRange]:
        buffered, self.buffer = self.buffer, []
        self.buffered_bytes = self.buffered_messages = 0
        return buffered
