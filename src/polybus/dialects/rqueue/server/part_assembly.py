"""PARTs for readers of other dialects: put together before they enter a topic.

rqueue's own readers get PARTs as they come and put them together themselves. A
reader that pulls wants the whole message, so the server does it for them, per
connection that publishes, and only for topics that such a reader reads.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from polybus.dialects.rqueue.client.notification_batch import Part
from polybus.dialects.rqueue.parts import PartLimits, Reassembler

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.bus.connection import Connection
    from polybus.model.limits import RqueueLimits

PART_HEADER = struct.Struct(">16sHH")  # message id, index, count


class PartAssembler:
    """One for all rqueue connections of a bus; each has a Reassembler of its own, if any."""

    def __init__(self, broker: Broker, limits: RqueueLimits) -> None:
        self._broker = broker
        self._limits = PartLimits(
            max_message_bytes=limits.max_message_bytes, timeout_s=limits.part_timeout_s
        )
        self._in_progress: dict[Connection, Reassembler] = {}
        broker.on_tick.append(self.expire)

    def add(self, party: Connection, fragments: Sequence[tuple[bytes, bytes]]) -> None:
        parts = self._in_progress.setdefault(party, Reassembler(self._limits))
        before = parts.lost_messages
        for topic, body in fragments:
            message_id, index, count = PART_HEADER.unpack_from(body)
            part = Part(topic, message_id, index, count, body[PART_HEADER.size :])
            whole = parts.add(part, self._broker.now_s())
            if whole is not None:
                self._broker.publish_assembled(party, topic, whole)
        self._count(parts.lost_messages - before)

    def expire(self, now_s: float) -> None:
        for party, parts in list(self._in_progress.items()):
            self._count(parts.expire(now_s))
            if not len(parts):
                del self._in_progress[party]

    def discard(self, party: Connection) -> None:
        parts = self._in_progress.pop(party, None)
        if parts is not None:
            self._count(len(parts))

    def _count(self, lost: int) -> None:
        self._broker.counters.count("dropped", "incomplete_parts", lost)
