"""Reassembly of large messages from their PARTs.

A message in progress is identified by (topic, message id). Ids are random, so parts of any
number of publishers may be interleaved and in any order. Each part is handled as follows:

    completes its message          `add` returns the content
    new index                      stored
    an index received before       the first one stays; counted as a duplicate
    of a finished message          ignored; counted as a duplicate or as lost
    another count than before      the whole message is lost: "inconsistent"
    message grows past its limit   the whole message is lost: "too_large"
    no room in memory or table     the whole message is lost: "no_room"
    no further part for 30 s       the whole message is lost: "expired"

If there is no room, the new message is lost: those in progress can still finish, whereas
evicting them would, under load, let none finish. Later parts of a lost message are
recognised and dropped while its id is remembered, so that they take no room again.

Memory is charged as it is used, never by the count of a part: a count of 65535 allocates
nothing. The caller passes the clock in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from polybus.dialects.rqueue.client.notification_batch import PART_INDEX, Part
from polybus.dialects.rqueue.limits import RqueueLimits
from polybus.errors import BadFrame
from polybus.model.limits import MIB

Reason = Literal["expired", "inconsistent", "too_large", "no_room"]
REASONS: tuple[Reason, ...] = ("expired", "inconsistent", "too_large", "no_room")

# Memory of one stored chunk besides its bytes: the object and its dict entry.
PART_OVERHEAD_BYTES = 128

Key = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class PartLimits:
    """Limits of one Reassembler."""

    # Two messages of the largest size at a time, with the overhead of their chunks.
    max_bytes: int = 160 * MIB
    # Each costs about 500 bytes; no regular publisher has more in progress at once.
    max_messages: int = 1024
    # Ids of finished messages, so that their late parts are recognised.
    max_remembered: int = 4096
    max_message_bytes: int = RqueueLimits().max_message_bytes
    timeout_s: float = RqueueLimits().part_timeout_s


@dataclass(slots=True)
class _PartialMessage:
    count: int
    deadline: float
    chunks: dict[int, bytes] = field(default_factory=dict)
    size: int = 0

    @property
    def cost(self) -> int:
        return self.size + PART_OVERHEAD_BYTES * len(self.chunks)


class Reassembler:
    """Messages in progress. `lost` counts lost messages by reason."""

    def __init__(self, limits: PartLimits | None = None) -> None:
        self.limits = limits or PartLimits()
        self.completed = 0
        self.duplicates = 0
        self.lost_parts = 0
        self.lost: dict[Reason, int] = dict.fromkeys(REASONS, 0)
        self.held_bytes = 0
        # Both are ordered by their last event, so the oldest is always first.
        self._progress: dict[Key, _PartialMessage] = {}
        self._settled: dict[Key, bool] = {}  # True: delivered; False: lost

    def __len__(self) -> int:
        return len(self._progress)

    @property
    def lost_messages(self) -> int:
        return sum(self.lost.values())

    def add(self, part: Part, now: float) -> bytes | None:
        """Add one part. Returns the whole content if it was the last one missing.

        Raises BadFrame if its index is not below its count.
        """
        if not 0 <= part.index < part.count:
            raise BadFrame(PART_INDEX)
        self.expire(now)
        key = (part.topic, part.message_id)
        if key in self._settled:
            if self._settled[key]:
                self.duplicates += 1
            else:
                self.lost_parts += 1
            return None
        message = self._progress.get(key)
        if message is not None and part.index in message.chunks and message.count == part.count:
            self.duplicates += 1
            return None
        if reason := self._rejection_reason(message, part):
            self._discard(key, reason, extra=1)
            return None
        if message is None:
            message = _PartialMessage(part.count, 0.0)
        else:
            del self._progress[key]  # added again below, as the youngest
        message.deadline = now + self.limits.timeout_s
        self._progress[key] = message
        message.chunks[part.index] = part.chunk
        message.size += len(part.chunk)
        self.held_bytes += len(part.chunk) + PART_OVERHEAD_BYTES
        if len(message.chunks) < message.count:
            return None
        self._remove(key)
        self.completed += 1
        self._remember(key, delivered=True)
        return b"".join([message.chunks[index] for index in range(message.count)])

    def expire(self, now: float) -> int:
        """Drop messages whose next part is overdue. Returns their number."""
        late = 0
        while (first := next(iter(self._progress.items()), None)) and first[1].deadline <= now:
            self._discard(first[0], "expired", extra=0)
            late += 1
        return late

    def next_deadline(self) -> float | None:
        """Return the time of the next expiry if no further part arrives."""
        first = next(iter(self._progress.values()), None)
        return first.deadline if first else None

    def _rejection_reason(self, message: _PartialMessage | None, part: Part) -> Reason | None:
        if message is not None and message.count != part.count:
            return "inconsistent"
        size = (message.size if message else 0) + len(part.chunk)
        if size > self.limits.max_message_bytes:
            return "too_large"
        if self.held_bytes + len(part.chunk) + PART_OVERHEAD_BYTES > self.limits.max_bytes:
            return "no_room"
        if message is None and len(self._progress) >= self.limits.max_messages:
            return "no_room"
        return None

    def _discard(self, key: Key, reason: Reason, extra: int) -> None:
        if key in self._progress:
            self.lost_parts += len(self._remove(key).chunks)
        self.lost_parts += extra
        self.lost[reason] += 1
        self._remember(key, delivered=False)

    def _remove(self, key: Key) -> _PartialMessage:
        message = self._progress.pop(key)
        self.held_bytes -= message.cost
        return message

    def _remember(self, key: Key, delivered: bool) -> None:
        self._settled[key] = delivered
        if len(self._settled) > self.limits.max_remembered:
            del self._settled[next(iter(self._settled))]
