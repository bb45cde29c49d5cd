"""Reads: short transactions in which blocks are verified and copied out as columns.

A shard is read from the entry that holds the start offset. `ALL` is a merge of shards by id:
entries are collected in the order of their first ids, and the result ends before the first
id of the next entry that was not collected. So the collector has enough only when enough of
its messages lie before that id. Two shards that were written in turn have interleaved ids,
and an entry of one without the other yields only a message or two.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Protocol

from polybus.errors import Damaged, DoesNotExist, StoreFault, Trimmed
from polybus.model import run_table
from polybus.model.block import BlockSlice, Layout, gather
from polybus.model.rows import EMPTY, Rows
from polybus.model.topic import ALL, All, Bounds, ShardBounds, Topic
from polybus.store import request_checks
from polybus.store.contract import ShardRange
from polybus.store.lmdb import store_keys, stored_values
from polybus.store.lmdb.entry_cursor import EntryCursor
from polybus.store.lmdb.environment import Transaction
from polybus.store.lmdb.store_files import ReadSnapshot, StoreFiles
from polybus.store.lmdb.writer_state import MAX_CACHED, scan_prefix

Before = Callable[[int, int], bool]  # predicate on the first id and time of an entry
PlaceOf = Callable[[bytes], int]  # position of a message by its run table


class EntrySpan(Protocol):
    """A range of offsets, from `first` to `end` (exclusive)."""

    @property
    def first(self) -> int: ...
    @property
    def end(self) -> int: ...


class EntryPosition(Protocol):
    """A position at an entry: an `EntryCursor`, or a `RecentEntry`."""

    @property
    def shard(self) -> int: ...
    @property
    def entry(self) -> EntrySpan | None: ...
    def blocks(self, start: int) -> Iterator[tuple[Layout, bytes, int]]: ...


class RowCollector:
    """Block slices for one read: collected up to its limits, then copied out."""

    def __init__(self, max_rows: int, max_bytes: int, *, by_piece: bool = False) -> None:
        self._max_rows = self._enough_rows = max_rows
        self._max_bytes = self._enough_bytes = max_bytes
        self._by_piece = by_piece
        self._rows = 0
        self._bytes = 0
        self._pieces: list[BlockSlice] = []
        self._counted_at = 0

    @property
    def has_enough(self) -> bool:
        return self._rows >= self._enough_rows or self._bytes >= self._enough_bytes

    @property
    def is_full(self) -> bool:
        return self._rows >= self._max_rows or self._bytes >= self._max_bytes

    def begin_part(self, max_rows: int, parts: int) -> None:
        """Begin the next part: `max_rows` of its own, and an equal share of the bytes left."""
        self._enough_rows = self._rows + max_rows
        self._enough_bytes = self._bytes + (self._max_bytes - self._bytes) // parts

    @property
    def is_empty(self) -> bool:
        return not self._pieces

    def has_enough_below(self, below_id: int) -> bool:
        """Return True if there is enough before this id. May return False for too long."""
        if not self.has_enough or len(self._pieces) < self._counted_at:
            return False
        rows = size = 0
        for layout, table, _, _, start, end in self._pieces:
            good = min(end, run_table.place_of_id(bytes(table), below_id)) - start
            if good > 0:
                rows += good
                size += layout.size_bytes * good // layout.count
        # Counting takes time in proportion to the pieces, so it is repeated only when there
        # are half as many again.
        self._counted_at = len(self._pieces) * 3 // 2
        return rows >= self._max_rows or size >= self._max_bytes

    def collect(self, cursor: EntryPosition, start: int, end: int) -> int:
        """Collect messages of the current entry between two offsets, up to the limits.

        Returns the offset that was reached.
        """
        entry = cursor.entry
        assert entry is not None
        reached = start
        for layout, table, first in cursor.blocks(max(0, start - entry.first)):
            low, high = max(0, start - first), min(layout.count, end - first)
            # Parts are limited one by one, so a slice must not take more rows than its part may.
            if self._by_piece:
                high = min(high, low + self._enough_rows - self._rows)
            # Bytes are estimated from the share of messages: exact sizes would need a look at
            # each.
            if low < high:
                self._pieces.append(BlockSlice(layout, table, first, cursor.shard, low, high))
                self._rows += high - low
                self._bytes += layout.size_bytes * (high - low) // layout.count
            else:
                layout.close()
            reached = min(first + layout.count, end)
            # The blocks after this one are not opened: their checksums would cost time for
            # nothing.
            if self.has_enough or reached == end:
                break
        return reached

    def rows(self, name: str, from_id: int = 0, below_id: int = request_checks.MAX_NUMBER) -> Rows:
        if not self._pieces:
            return EMPTY
        try:
            return gather(
                self._pieces,
                from_id=from_id,
                below_id=below_id,
                max_rows=self._max_rows,
                max_bytes=self._max_bytes,
                by_piece=self._by_piece,
            )
        except Damaged as error:
            shard, offset = self._pieces[0].shard, self._pieces[0].first_offset
            where = f"topic {name!r}, shard {shard}, offset {offset} or later"
            raise Damaged(f"{where}: {error}") from error

    def close(self) -> None:
        for piece in self._pieces:
            piece.layout.close()


class StoreReader:
    """Executes reads, each in its own transaction."""

    def __init__(self, files: StoreFiles) -> None:
        self._files = files
        self._topics: dict[int, tuple[bytes, Topic]] = {}

    def topics(self) -> list[Topic]:
        with self._files.snapshot() as transaction:
            found = [
                stored_values.read_topic(raw)[0]
                for _, raw in scan_prefix(transaction, store_keys.TOPICS)
            ]
        return sorted(found, key=lambda topic: topic.name)

    def bounds(self, number: int) -> Bounds:
        with self._begin(number) as txn:
            shards = txn.bounds()
            firsts = [
                txn.first_id(shard, at.start)
                for shard, at in enumerate(shards)
                if at.start < at.end
            ]
            return Bounds(min(firsts, default=txn.next_id), txn.next_id, txn.time_ns, shards)

    def read(
        self, number: int, shard: int | All, start: int, end: int, max_rows: int, max_bytes: int
    ) -> Rows:
        with self._begin(number) as txn:
            request_checks.shard_of(txn.topic, shard)
            if end <= start:
                return EMPTY
            try:
                with closing(RowCollector(max_rows, max_bytes)) as collector:
                    return txn.read(collector, shard, start, end, later=True)
            except Damaged:
                # Verify block by block, to return the messages before the damage.
                with closing(RowCollector(max_rows, max_bytes)) as collector:
                    return txn.read(collector, shard, start, end, later=False)

    def read_parts(
        self, number: int, parts: Sequence[ShardRange], max_rows: int, max_bytes: int
    ) -> Rows:
        with self._begin(number) as txn:
            for part in parts:
                request_checks.shard_of(txn.topic, part.shard)
            try:
                return txn.read_parts(parts, max_rows, max_bytes, later=True)
            except Damaged:
                return txn.read_parts(parts, max_rows, max_bytes, later=False)

    def find(self, number: int, shard: int | All, timestamp_ns: int) -> int:
        with self._begin(number) as txn:
            request_checks.shard_of(txn.topic, shard)
            if shard == ALL:
                ids = [txn.find_time(shard, timestamp_ns)[1] for shard in txn.topic.shards]
                return min(ids)
            return txn.find_time(shard, timestamp_ns)[0]

    def _begin(self, number: int) -> ReadTxnContext:
        return ReadTxnContext(self._files.snapshot(), number, self.topic)

    def topic(self, number: int, raw: bytes) -> Topic:
        """Return a decoded topic, from the cache if its record did not change."""
        known = self._topics.get(number)
        if known is None or known[0] != raw:
            # Emptied instead of evicted one by one: it is rebuilt in a few reads.
            if len(self._topics) >= MAX_CACHED:
                self._topics.clear()
            known = self._topics[number] = raw, stored_values.read_topic(raw)[0]
        return known[1]


class ReadTxnContext:
    """A read transaction for one topic, for the length of a `with`."""

    __slots__ = ("_decode", "_number", "_snapshot", "_txn")

    def __init__(
        self, snapshot: ReadSnapshot, number: int, decode: Callable[[int, bytes], Topic]
    ) -> None:
        self._snapshot = snapshot
        self._number = number
        self._decode = decode

    def __enter__(self) -> ReadTxn:
        transaction = self._snapshot.__enter__()
        try:
            raw = transaction.get(store_keys.topic(self._number))
            state = transaction.get(store_keys.state(self._number))
            if raw is None or state is None:
                raise DoesNotExist(f"there is no topic number {self._number}")
            self._txn = ReadTxn(transaction, self._decode(self._number, bytes(raw)), state)
        except BaseException as error:
            self._snapshot.__exit__(type(error), error, error.__traceback__)
            raise
        return self._txn

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._txn.close()
        self._snapshot.__exit__(kind, error, trace)


class ReadTxn:
    """Reads of one topic within one transaction."""

    def __init__(self, transaction: Transaction, topic: Topic, state: memoryview) -> None:
        self._transaction = transaction
        self._cursors: list[EntryCursor] = []
        self._later = False
        self.topic = topic
        self.next_id, self.time_ns = stored_values.TOPIC_STATE.unpack(state)

    def shard_range(self, shard: int) -> tuple[int, int]:
        raw = self._transaction.get(store_keys.shard_state(self.topic.number, shard))
        start, end, _ = stored_values.SHARD_STATE.unpack(raw) if raw else (0, 0, 0)
        return start, end

    def open_cursor(self, shard: int) -> EntryCursor:
        number, name = self.topic.number, self.topic.name
        cursor = EntryCursor(self._transaction, number, shard, name, later=self._later)
        self._cursors.append(cursor)
        return cursor

    def bounds(self) -> tuple[ShardBounds, ...]:
        number = self.topic.number
        # Bytes appended are in the shard state, which commits write; bytes removed are in the
        # upkeep record, which background steps write. So the two never conflict.
        removed = {
            store_keys.shard_of_state(key)[1]: stored_values.SHARD_UPKEEP.unpack(raw)[0]
            for key, raw in scan_prefix(self._transaction, store_keys.upkeep_of_topic(number))
        }
        found = []
        for shard in self.topic.shards:
            raw = self._transaction.get(store_keys.shard_state(number, shard))
            start, end, added = stored_values.SHARD_STATE.unpack(raw) if raw else (0, 0, 0)
            size = added - removed.get(shard, 0) if start < end else 0
            found.append(ShardBounds(start, end, size))
        return tuple(found)

    def first_id(self, shard: int, start: int) -> int:
        entry = self.open_cursor(shard).seek(start)
        if entry is None:
            return int(self.next_id)
        return run_table.id_at(entry.runs, max(0, start - entry.first))

    def read(
        self, collector: RowCollector, shard: int | All, start: int, end: int, *, later: bool
    ) -> Rows:
        """If `later`, checksums are compared while messages are copied: memory is read once."""
        self._later = later
        if shard == ALL:
            return self.read_all(collector, start, end)
        return self.read_shard(collector, shard, start, end)

    def read_shard(self, collector: RowCollector, shard: int, start: int, end: int) -> Rows:
        end = self._checked_end(shard, start, end)
        try:
            self._read_shard(collector, shard, start, end)
        except StoreFault:
            # Return the messages before the damage. The next read starts at it and raises.
            if collector.is_empty:
                raise
        return collector.rows(self.topic.name)

    def read_parts(
        self, parts: Sequence[ShardRange], max_rows: int, max_bytes: int, *, later: bool
    ) -> Rows:
        """Read several shards. Each part has an equal share of the bytes that are left."""
        self._later = later
        with closing(RowCollector(max_rows, max_bytes, by_piece=True)) as collector:
            try:
                for at, (shard, start, end, most) in enumerate(parts):
                    if start < end and not collector.is_full:
                        end = self._checked_end(shard, start, end)
                        collector.begin_part(most, len(parts) - at)
                        self._read_shard(collector, shard, start, end)
            except StoreFault:
                if collector.is_empty:
                    raise
            return collector.rows(self.topic.name)

    def _checked_end(self, shard: int, start: int, end: int) -> int:
        first, last = self.shard_range(shard)
        if start < first:
            text = f"shard {shard} of {self.topic.name!r} starts at {first}, not at {start}"
            raise Trimmed(text, first)
        return min(end, last)

    def _read_shard(self, collector: RowCollector, shard: int, start: int, end: int) -> None:
        cursor = self.open_cursor(shard)
        entry = cursor.seek(start) if start < end else None
        while entry is not None and entry.first < end:
            collector.collect(cursor, start, end)
            if collector.has_enough or entry.end >= end:
                break
            entry = cursor.next()

    def read_all(self, collector: RowCollector, from_id: int, below_id: int) -> Rows:
        # Ids are assigned in order, so there is nothing to search.
        if from_id >= self.next_id:
            return EMPTY  # the most frequent read of a tail reader, and each shard takes time
        streams = [
            (first_id, offset, self._cursors[-1])
            for shard in self.topic.shards
            for offset, first_id in [self.find_id(shard, from_id)]
            if self._cursors[-1].entry is not None and first_id < below_id
        ]
        # A heap by first id, which is unique, so that cursors are never compared.
        heapq.heapify(streams)
        fault: StoreFault | None = None
        while (
            streams and streams[0][0] < below_id and not collector.has_enough_below(streams[0][0])
        ):
            first_id, offset, cursor = heapq.heappop(streams)
            entry = cursor.entry
            assert entry is not None
            try:
                offset = collector.collect(cursor, offset, entry.end)
                # If the next entry cannot be read, the merge must stop right after the messages
                # that were collected.
                first_id = run_table.id_at(entry.runs, offset - 1 - entry.first) + 1
                if offset == entry.end:
                    entry = cursor.next()
            except StoreFault as error:
                # Return the messages before the damage. The next read starts at it and raises.
                fault = error
                heapq.heappush(streams, (first_id, offset, cursor))
                break
            if entry is not None:
                offset = max(offset, entry.first)
                first_id = run_table.id_at(entry.runs, offset - entry.first)
                heapq.heappush(streams, (first_id, offset, cursor))
        if streams:
            # Later ids of the collected entries must wait: uncollected messages come before them.
            below_id = min(below_id, streams[0][0])
        rows = collector.rows(self.topic.name, from_id, below_id)
        if fault is not None and not rows.count:
            raise fault
        return rows

    def find_id(self, shard: int, wanted: int) -> tuple[int, int]:
        """Return the first offset with this id or a later one, and its id; else the ends."""
        return self._find(
            shard,
            lambda first_id, _: first_id <= wanted,
            lambda table: run_table.place_of_id(table, wanted),
        )

    def find_time(self, shard: int, timestamp_ns: int) -> tuple[int, int]:
        """Return the first offset with this time or a later one, and its id; else the ends."""
        return self._find(
            shard,
            lambda _, time_ns: time_ns < timestamp_ns,
            lambda table: run_table.place_of_time(table, timestamp_ns),
        )

    def _find(self, shard: int, before: Before, place_of: PlaceOf) -> tuple[int, int]:
        start, end = self.shard_range(shard)
        cursor = self.open_cursor(shard)
        entry = cursor.seek_last(start, end, before) if start < end else None
        while entry is not None:
            # The first entry of a shard may be partly trimmed.
            place = max(place_of(entry.runs), start - entry.first)
            if place < entry.count:
                return entry.first + place, run_table.id_at(entry.runs, place)
            entry = cursor.next()
        return end, self.next_id

    def close(self) -> None:
        for cursor in self._cursors:
            cursor.close()
