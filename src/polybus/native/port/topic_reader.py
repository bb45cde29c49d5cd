"""Reads of a range of a topic, chunk by chunk, with an optional wait for new messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from polybus.errors import MalformedRequest
from polybus.model.access_rule import SUBSCRIBE
from polybus.model.topic import ALL
from polybus.native.port.shard_waits import ANY_SHARD
from polybus.native.protocol.requests import ReadTicket

if TYPE_CHECKING:
    from polybus.model.rows import Rows
    from polybus.model.topic import Topic
    from polybus.native.port.native_port import Caller, NativePort

# A chunk is large enough that its fixed cost does not matter, and small enough that the
# first rows are sent early.
CHUNK_ROWS = 65_536
CHUNK_BYTES = 4 << 20
INT64_BYTES = 8


class TopicReader:
    """One read of one caller. Iteration yields chunks and checks access after rule changes."""

    def __init__(self, port: NativePort, caller: Caller, request: dict[str, object]) -> None:
        ticket = ReadTicket.decode(request)
        self._port = port
        self._caller = caller
        self._ticket = ticket
        self._topic = self._check_access()
        self._shard = ticket.shard
        if self._shard != ALL and self._shard not in self._topic.shards:
            raise MalformedRequest(f"topic {self._topic.name} has no shard {self._shard}")
        if ticket.start is None:
            bounds = port.store.bounds(self._topic.number)
            first_id, shards = bounds.first_id, bounds.shards
            self._position = first_id if self._shard == ALL else shards[self._shard].start
        else:
            self._position = ticket.start
        self._to = ticket.to
        self._wait_s = min(ticket.wait_ms / 1000, port.limits.max_wait_s)
        self.columns = ticket.columns

    def __iter__(self) -> Iterator[Rows]:
        rows_left = self._ticket.max_rows or 1 << 62
        bytes_left = self._ticket.max_bytes or 1 << 62
        while rows_left > 0 and bytes_left > 0 and (self._to is None or self._position < self._to):
            rows = self._chunk(rows_left, bytes_left) or self._skip_trimmed(rows_left, bytes_left)
            if rows:
                rows_left -= rows.count
                bytes_left -= rows.size_bytes
                self._port.access.durable.traffic.deliver(rows.count, rows.size_bytes)
                yield rows
            elif not self._has_more():
                return

    def _check_access(self) -> Topic:
        access = self._port.access
        self._generation = access.generation
        return access.get_topic(self._caller.identity, SUBSCRIBE, self._ticket.topic)

    def _check_access_again(self) -> None:
        """Raise `Denied` if the rules have changed and no longer allow the read."""
        if self._generation != self._port.access.generation:
            self._check_access()

    def _chunk(self, rows_left: int, bytes_left: int) -> Rows | None:
        self._check_access_again()
        rows = self._port.store.read(
            self._topic.number,
            self._shard,
            self._position,
            self._to,
            max_rows=min(rows_left, CHUNK_ROWS),
            max_bytes=min(bytes_left, CHUNK_BYTES),
        )
        if not rows.count:
            return None
        last = rows.ids if self._shard == ALL else rows.offsets
        self._position = int.from_bytes(last[-INT64_BYTES:], "little") + 1
        return rows

    def _skip_trimmed(self, rows_left: int, bytes_left: int) -> Rows | None:
        """Read up to the current end; if there are no rows before it, they were trimmed."""
        end = self._end()
        if end <= self._position:
            return None
        rows = self._chunk(rows_left, bytes_left)
        if rows is None:
            self._position = end
        return rows

    def _end(self) -> int:
        return self._port.store.end(self._topic.number, self._shard)

    def _has_more(self) -> bool:
        """Return whether there are messages at the position, now or before the wait ends."""
        if self._end() > self._position:
            return True
        if not self._wait_s or self._caller.is_gone():
            return False
        # Not on the shards of now: a reshard opens others.
        place = self._topic.number, ANY_SHARD if self._shard == ALL else self._shard
        caller = self._caller
        with self._port.waits.open_wait(
            [place], self._wait_s, caller.is_gone, caller.identity
        ) as waiting:
            while True:
                # Also before the first sleep: news before the wait began did not wake it.
                self._check_access_again()
                if self._end() > self._position:
                    return True
                if not waiting.sleep():
                    return False
