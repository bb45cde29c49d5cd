"""Reads: a range of a topic, chunk after chunk, and on to what comes while it waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from polybus.errors import MalformedRequest
from polybus.model.access_rule import SUBSCRIBE
from polybus.model.topic import ALL
from polybus.native.protocol.fields import ActionSchema, Arguments, Field

if TYPE_CHECKING:
    from polybus.model.rows import Rows
    from polybus.model.topic import Bounds, Topic
    from polybus.native.port.native_port import Caller, NativePort

# A chunk: large enough that what is done once for each costs nothing beside it, and
# small enough that the first rows are on their way soon.
CHUNK_ROWS = 65_536
CHUNK_BYTES = 4 << 20
INT64_BYTES = 8

READ_TICKET = ActionSchema(
    "read",
    "A range of a topic",
    (
        Field("topic", "text", "its name"),
        Field("shard", "shard", "a shard's number, or all", ALL),
        Field("from", "count", "the first offset (of all: id); absent: the first there is", None),
        Field("to", "count", "the first offset (id) that is not read", None),
        Field("max_rows", "count", "at most so many; 0: no bound", 0),
        Field(
            "max_bytes", "count", "about so many bytes of keys, bodies and headers; 0: no bound", 0
        ),
        Field("wait_ms", "count", "at the end, how long to wait for more", 0),
        Field("columns", "texts", "which of the columns are wanted; absent: all", None),
    ),
    "batches",
)


class TopicReader:
    """One read of one caller. Iterating gives chunks, and judges anew when rules change."""

    def __init__(self, port: NativePort, caller: Caller, request: dict[str, object]) -> None:
        given = READ_TICKET.read(request)
        self._port = port
        self._caller = caller
        self._given = given
        self._topic = self._check_access()
        self._shard = given["shard"]
        if self._shard != ALL and self._shard not in self._topic.shards:
            raise MalformedRequest(f"topic {self._topic.name} has no shard {self._shard}")
        self._position = self._start(given)
        self._to: int | None = given["to"]
        self._wait_s = min(given["wait_ms"] / 1000, port.limits.max_wait_s)
        self.columns: list[str] | None = given["columns"]

    def __iter__(self) -> Iterator[Rows]:
        rows_left = self._given["max_rows"] or 1 << 62
        bytes_left = self._given["max_bytes"] or 1 << 62
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
        return access.get_topic(self._caller.identity, SUBSCRIBE, self._given["topic"])

    def _start(self, given: Arguments) -> int:
        if given["from"] is not None:
            return int(given["from"])
        bounds = self._port.store.bounds(self._topic.number)
        return bounds.first_id if self._shard == ALL else bounds.shards[self._shard].start

    def _chunk(self, rows_left: int, bytes_left: int) -> Rows | None:
        if self._generation != self._port.access.generation:
            self._check_access()
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
        """Looks again up to where the topic ends now: if nothing is there, it was trimmed."""
        end = self._end(self._port.store.bounds(self._topic.number))
        if end <= self._position:
            return None
        rows = self._chunk(rows_left, bytes_left)
        if rows is None:
            self._position = end
        return rows

    def _end(self, bounds: Bounds) -> int:
        return bounds.next_id if self._shard == ALL else bounds.shards[self._shard].end

    def _has_more(self) -> bool:
        """Is there something behind the position now, or before the wait is over?"""
        bounds = self._port.store.bounds(self._topic.number)
        if self._end(bounds) > self._position:
            return True
        if not self._wait_s or self._caller.is_gone():
            return False
        shards = self._topic.shards if self._shard == ALL else (self._shard,)
        wanted = {(self._topic.number, shard): bounds.shards[shard].end for shard in shards}
        return bool(self._port.waits.wait(wanted, self._wait_s, self._caller.is_gone))
