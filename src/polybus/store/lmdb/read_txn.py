"""Reads: short transactions in which blocks are verified and copied out as columns.

A shard is read from the entry that holds the start offset. `ALL` is a merge of shards by id:
entries are collected in the order of their first ids, and the result ends before the first
id of the next entry that was not collected. So the collector has enough only when enough of
its messages lie before that id. Two shards that were written in turn have interleaved ids,
and an entry of one without the other yields only a message or two.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Final, Protocol

from polybus.errors import Damaged, DoesNotExist, StoreFault, Trimmed
from polybus.model import run_table
from polybus.model.block import BlockSlice, Layout, gather
from polybus.model.rows import EMPTY, Rows
from polybus.model.topic import ALL, All, Bounds, ShardBounds, Topic
from polybus.store import request_checks
from polybus.store.contract import Excess, ShardRange
from polybus.store.lmdb import log_entry, store_keys, stored_values, topic_inspection
from polybus.store.lmdb.entry_cursor import EntryCursor
from polybus.store.lmdb.environment import Transaction
from polybus.store.lmdb.log_entry import LogEntry
from polybus.store.lmdb.quarantine import Quarantine
from polybus.store.lmdb.shard_merge import MergePositions, ShardMerge
from polybus.store.lmdb.store_files import ReadSnapshot, StoreFiles
from polybus.store.lmdb.writer_state import MAX_CACHED, scan_prefix

# Columns of a run, by which a message is found.
ID: Final = 0
TIME: Final = 1
INT64_BYTES: Final = 8


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
        self.pieces: list[BlockSlice] = []
        self._counted_at = 0
        self.has_enough = False  # after the last `collect`

    @property
    def is_full(self) -> bool:
        return self._rows >= self._max_rows or self._bytes >= self._max_bytes

    def begin_part(self, max_rows: int, parts: int) -> None:
        """Begin the next part: `max_rows` of its own, and an equal share of the bytes left."""
        self._enough_rows = self._rows + max_rows
        self._enough_bytes = self._bytes + (self._max_bytes - self._bytes) // parts
        self.has_enough = False

    @property
    def is_empty(self) -> bool:
        return not self.pieces

    def has_enough_below(self, below_id: int) -> bool:
        """Return True if there is enough before this id. May return False for too long."""
        if not self.has_enough or len(self.pieces) < self._counted_at:
            return False
        rows = size = 0
        for layout, table, _, _, start, end in self.pieces:
            good = min(end, run_table.place_of_id(bytes(table), below_id)) - start
            if good > 0:
                rows += good
                size += layout.size_bytes * good // layout.count
        # Counting takes time in proportion to the pieces, so it is repeated only when there
        # are half as many again.
        self._counted_at = len(self.pieces) * 3 // 2
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
                self.pieces.append(BlockSlice(layout, table, first, cursor.shard, low, high))
                self._rows += high - low
                self._bytes += layout.size_bytes * (high - low) // layout.count
            else:
                layout.close()
            reached = min(first + layout.count, end)
            self.has_enough = self._rows >= self._enough_rows or self._bytes >= self._enough_bytes
            # The blocks after this one are not opened: their checksums would cost time for
            # nothing.
            if self.has_enough or reached == end:
                break
        return reached

    def rows(self, name: str, from_id: int = 0, below_id: int = request_checks.MAX_NUMBER) -> Rows:
        if not self.pieces:
            return EMPTY
        try:
            return gather(
                self.pieces,
                from_id=from_id,
                below_id=below_id,
                max_rows=self._max_rows,
                max_bytes=self._max_bytes,
                by_piece=self._by_piece,
            )
        except Damaged as error:
            shard, offset = self.pieces[0].shard, self.pieces[0].first_offset
            where = f"topic {name!r}, shard {shard}, offset {offset} or later"
            raise Damaged(f"{where}: {error}") from error

    def close(self) -> None:
        for piece in self.pieces:
            piece.layout.close()


TopicCache = dict[int, tuple[bytes, Topic]]  # record and decoded topic, by number


class StoreReader:
    """Executes reads, each in its own transaction."""

    def __init__(self, files: StoreFiles, quarantine: Quarantine) -> None:
        self._files = files
        self._quarantine = quarantine
        self._topics: TopicCache = {}
        self._merge_positions = MergePositions()

    def topics(self) -> list[Topic]:
        with ReadSnapshot(self._files) as transaction:
            found = [
                topic
                for topic in topic_inspection.readable_topics(transaction)
                if topic.number not in self._quarantine
            ]
        return sorted(found, key=lambda topic: topic.name)

    def bounds(self, number: int) -> Bounds:
        with ReadSnapshot(self._files) as transaction:
            return self._begin(transaction, number).bounds()

    def end(self, number: int, shard: int | All) -> int:
        with ReadSnapshot(self._files) as transaction:
            txn = self._begin(transaction, number)
            if shard == ALL:
                return txn.next_id
            _, end, _ = txn.shard_state(request_checks.single_shard(txn.topic, shard))
            return end

    def read(
        self, number: int, shard: int | All, start: int, end: int, max_rows: int, max_bytes: int
    ) -> Rows:
        with ReadSnapshot(self._files) as transaction:
            txn = self._begin(transaction, number)
            if shard == ALL:
                read = partial(txn.read_all, self._merge_positions)
            else:
                request_checks.single_shard(txn.topic, shard)
                read = partial(txn.read_shard, shard)
            if end <= start:
                return EMPTY
            try:
                return read(start, end, max_rows, max_bytes)
            except Damaged:
                # Verify block by block, to return the messages before the damage.
                txn.later = False
                return read(start, end, max_rows, max_bytes)

    def read_parts(
        self, number: int, parts: Sequence[ShardRange], max_rows: int, max_bytes: int
    ) -> Rows:
        with ReadSnapshot(self._files) as transaction:
            txn = self._begin(transaction, number)
            for part in parts:
                request_checks.single_shard(txn.topic, part.shard)
            try:
                return txn.read_parts(parts, max_rows, max_bytes)
            except Damaged:
                txn.later = False
                return txn.read_parts(parts, max_rows, max_bytes)

    def find(self, number: int, shard: int | All, timestamp_ns: int) -> int:
        with ReadSnapshot(self._files) as transaction:
            txn = self._begin(transaction, number)
            if shard == ALL:
                return min([txn.find(one, TIME, timestamp_ns)[1] for one in txn.topic.shards])
            request_checks.single_shard(txn.topic, shard)
            return txn.find(shard, TIME, timestamp_ns)[0]

    def find_id(self, number: int, shard: int, message_id: int) -> int:
        with ReadSnapshot(self._files) as transaction:
            txn = self._begin(transaction, number)
            request_checks.single_shard(txn.topic, shard)
            return txn.find(shard, ID, message_id)[0]

    def find_excess(self, number: int, keep_bytes: int, max_blocks: int) -> Excess:
        with ReadSnapshot(self._files) as transaction:
            return self._begin(transaction, number).find_excess(keep_bytes, max_blocks)

    def _begin(self, transaction: Transaction, number: int) -> ReadTxn:
        self._quarantine.check(number)
        return ReadTxn(transaction, number, self._topics)


class ReadTxn:
    """Reads of one topic within one transaction."""

    def __init__(self, transaction: Transaction, number: int, topics: TopicCache) -> None:
        """Raises `DoesNotExist` if there is no such topic."""
        raw = transaction.get(store_keys.topic(number))
        state = transaction.get(store_keys.state(number))
        if raw is None or state is None:
            raise DoesNotExist(f"there is no topic number {number}")
        record = bytes(raw)
        known = topics.get(number)
        # A topic is decoded again only if its record changed.
        if known is None or known[0] != record:
            # Emptied instead of evicted one by one: it is rebuilt in a few reads.
            if len(topics) >= MAX_CACHED:
                topics.clear()
            known = topics[number] = record, stored_values.read_topic(record)[0]
        self._transaction = transaction
        self.topic = known[1]
        self.next_id: int
        self.time_ns: int
        self.next_id, self.time_ns = stored_values.TOPIC_STATE.unpack(state)
        # Checksums are compared while messages are copied, so memory is read once. Otherwise each
        # block is verified when it is opened.
        self.later = True

    def bounds(self) -> Bounds:
        shards = self._shard_bounds()
        first_id = self.next_id
        for shard, (start, end, _) in enumerate(shards):
            entry = self.cursor(shard).seek(start) if start < end else None
            if entry is not None:
                # The first entry of a shard may be partly trimmed.
                place = max(0, start - entry.first)
                first_id = min(first_id, run_table.id_at(entry.runs, place))
        return Bounds(first_id, self.next_id, self.time_ns, shards)

    def _shard_bounds(self) -> tuple[ShardBounds, ...]:
        number = self.topic.number
        # Bytes appended are in the shard state, which commits write; bytes removed are in the
        # upkeep record, which background steps write. So the two never conflict.
        removed = {
            store_keys.shard_of_state(key)[1]: stored_values.SHARD_UPKEEP.unpack(raw)[0]
            for key, raw in scan_prefix(self._transaction, store_keys.upkeep_of_topic(number))
        }
        shards = []
        for shard in self.topic.shards:
            start, end, added = self.shard_state(shard)
            size = added - removed.get(shard, 0) if start < end else 0
            shards.append(ShardBounds(start, end, size))
        return tuple(shards)

    def read_shard(self, shard: int, start: int, end: int, max_rows: int, max_bytes: int) -> Rows:
        with closing(RowCollector(max_rows, max_bytes)) as collector:
            try:
                self._collect(collector, shard, start, end)
            except StoreFault:
                # Return the messages before the damage. The next read starts at it and raises.
                if collector.is_empty:
                    raise
            return collector.rows(self.topic.name)

    def read_parts(self, parts: Sequence[ShardRange], max_rows: int, max_bytes: int) -> Rows:
        """Read several shards. Each part has an equal share of the bytes that are left."""
        with closing(RowCollector(max_rows, max_bytes, by_piece=True)) as collector:
            try:
                for at, (shard, start, end, most) in enumerate(parts):
                    if start < end and not collector.is_full:
                        collector.begin_part(most, len(parts) - at)
                        self._collect(collector, shard, start, end)
            except StoreFault:
                if collector.is_empty:
                    raise
            return collector.rows(self.topic.name)

    def _collect(self, collector: RowCollector, shard: int, start: int, end: int) -> None:
        """Collect messages of a shard. Raises `Trimmed` if it starts after `start`."""
        first, last, _ = self.shard_state(shard)
        if start < first:
            text = f"shard {shard} of {self.topic.name!r} starts at {first}, not at {start}"
            raise Trimmed(text, first)
        end = min(end, last)
        cursor = self.cursor(shard)
        entry = cursor.seek(start) if start < end else None
        while entry is not None and entry.first < end:
            collector.collect(cursor, start, end)
            if collector.has_enough or entry.end >= end:
                break
            entry = cursor.next()

    def read_all(
        self,
        positions: MergePositions,
        from_id: int,
        below_id: int,
        max_rows: int,
        max_bytes: int,
    ) -> Rows:
        """Merge all shards by id."""
        # Ids are assigned in order, so there is nothing to search.
        if from_id >= self.next_id:
            return EMPTY  # the most frequent read of a tail reader, and each shard takes time
        kept = positions.get(self.topic.number, from_id)
        # A topic that got more shards since then is searched again.
        if kept is not None and len(kept) == len(self.topic.shards):
            merge = ShardMerge(self, [(*position, None) for position in kept])
        else:
            merge = ShardMerge(self, [self._search_shard(n, from_id) for n in self.topic.shards])
        with closing(RowCollector(max_rows, max_bytes)) as collector:
            complete_below_id = merge.collect(collector, min(below_id, self.next_id))
            rows = collector.rows(self.topic.name, from_id, complete_below_id)
            if rows.count:
                last_id = int.from_bytes(rows.ids[-INT64_BYTES:], "little")
                after = merge.positions_after(last_id, collector.pieces)
                positions.put(self.topic.number, last_id + 1, after)
            elif merge.fault is not None:
                raise merge.fault
            return rows

    def _search_shard(self, shard: int, from_id: int) -> tuple[int, int, int, EntryCursor | None]:
        offset, first_id, cursor = self.find(shard, ID, from_id)
        return first_id, shard, offset, cursor if cursor.entry is not None else None

    def find(self, shard: int, column: int, wanted: int) -> tuple[int, int, EntryCursor]:
        """Find the first message of a shard with this id or time, or a later one.

        Returns its offset, its id, and a cursor at its entry. If there is none, returns the end
        of the shard, the next id of the topic, and a cursor without an entry.
        """
        start, end, _ = self.shard_state(shard)
        cursor = self.cursor(shard)
        # Ids are unique, so an entry that begins with the wanted id holds it. A time may be shared
        # by several entries, of which the first is wanted.
        place_of = run_table.place_of_id if column == ID else run_table.place_of_time
        below = wanted + 1 if column == ID else wanted
        entry = cursor.seek_last(start, end, column, below) if start < end else None
        while entry is not None:
            # The first entry of a shard may be partly trimmed.
            place = max(place_of(entry.runs, wanted), start - entry.first)
            if place < entry.count:
                return entry.first + place, run_table.id_at(entry.runs, place), cursor
            entry = cursor.next()
        return end, self.next_id, cursor

    def find_excess(self, keep_bytes: int, max_blocks: int) -> Excess:
        """Return the end of the oldest blocks, by shard, without which `keep_bytes` are left."""
        bounds = self._shard_bounds()
        excess = sum(shard.size_bytes for shard in bounds) - keep_bytes
        streams: list[tuple[int, int, EntryCursor]] = []

        def add_entry(shard: int, cursor: EntryCursor, entry: LogEntry | None) -> None:
            if entry is not None:
                heapq.heappush(streams, (run_table.last_id(entry.runs), shard, cursor))

        for number, shard in enumerate(bounds) if excess > 0 else ():
            # From the first stored entry, not from the start: a trimmed entry that is not removed
            # yet is part of the size and has the lowest ids, so it uses up the excess first.
            cursor = self.cursor(number)
            add_entry(number, cursor, cursor.seek(0) if shard.size_bytes else None)
        cuts: dict[int, int] = {}
        for _ in range(max_blocks):
            if not streams:
                return Excess(cuts, False)
            _, number, cursor = heapq.heappop(streams)
            entry = cursor.entry
            assert entry is not None
            if entry.kind == log_entry.EXTENT:
                size, end = self._cut_extent(cursor, entry, bounds[number].start, excess)
            else:
                size, end = entry.charged, entry.end
            excess -= size
            if excess < 0:
                return Excess(cuts, False)
            if end > bounds[number].start:
                cuts[number] = end
            add_entry(number, cursor, cursor.next())
        return Excess(cuts, True)

    def _cut_extent(
        self, cursor: EntryCursor, entry: LogEntry, start: int, excess: int
    ) -> tuple[int, int]:
        """Return size and end of the blocks of an extent that a trim may remove.

        Their messages are taken for equally large, because an extent may have very many blocks.
        """
        if entry.end <= start:
            return entry.charged, entry.end
        first = max(entry.first, start)
        left = entry.charged * (entry.end - first) // entry.count
        # The blocks before the start are part of the size until they are removed.
        is_pending = self._transaction.get(store_keys.trimmed(entry.topic, entry.shard)) is not None
        trimmed = entry.charged - left if is_pending else 0
        if trimmed + left <= excess:
            return trimmed + left, entry.end
        room = max(0, excess - trimmed)
        end = first + (entry.end - first) * room // max(left, 1)
        return excess, cursor.block_start(end)  # nothing is left for the next entry

    def shard_state(self, shard: int) -> tuple[int, int, int]:
        """Return start and end of a shard, and the bytes appended to it."""
        raw = self._transaction.get(store_keys.shard_state(self.topic.number, shard))
        return stored_values.SHARD_STATE.unpack(raw) if raw else (0, 0, 0)

    def cursor(self, shard: int) -> EntryCursor:
        number, name = self.topic.number, self.topic.name
        return EntryCursor(self._transaction, number, shard, name, later=self.later)
