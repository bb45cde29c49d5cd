"""Salvage of a damaged store: copies its intact messages to a new store.

It searches the raw file for entries and blocks by magic and checksum, so no page of LMDB
needs to be intact. Each value is contiguous in the file, so bytes with one of our magics
and a matching checksum are a value that was written once. It may be old, because LMDB does
not wipe freed pages. Messages keep the numbers of their topics, shards, offsets, ids and
times. A topic whose record is lost is named `salvaged-<number>`.

The file also holds data that is no longer in use: blocks from before they were merged (the
same messages), trimmed or dropped messages that were not overwritten (they reappear), and
uncommitted data of a crash, whose offsets were assigned again later. Where two pieces
disagree about an offset, the one with the later time is right.

Records, producers and unpublished stages have no checksums and are not salvaged.
"""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from polybus.errors import (
    Damaged,
    DataFolderInUse,
    DoesNotExist,
    PolybusError,
    UsageError,
    WrongFormat,
)
from polybus.kernel.blocks import Layout
from polybus.model import run_table
from polybus.model.block import cut_layout, open_layout
from polybus.model.topic import Topic
from polybus.store import folder_ownership
from polybus.store.contract import Progress, no_progress
from polybus.store.engine import MAX_LISTED, SalvageReport
from polybus.store.lmdb import log_entry, store_files, store_keys, stored_values
from polybus.store.lmdb.log_entry import LogEntry
from polybus.store.lmdb.store_files import StoreFiles
from polybus.store.lmdb.stored_values import NameRecord, StoreCounters
from polybus.store.lmdb.write_batch import Target, WriteBatch
from polybus.store.lmdb.write_txn import TransactionWriter

SEARCH_STEP_BYTES: Final = 16 << 20
GROUP_BYTES: Final = 32 << 20  # of one transaction of the new store


class RawEntry(NamedTuple):
    """An entry with intact tables, and the position of its value in the file."""

    entry: LogEntry
    at: int


class RawFile:
    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # A view, because slices of a mmap would be copies.
        self._view = memoryview(self._map)

    def __len__(self) -> int:
        return len(self._map)

    def entries(self, progress: Progress) -> Iterator[RawEntry]:
        for at in self._places(log_entry.MAGIC, progress):
            try:
                yield RawEntry(log_entry.decode(self._view[at:]), at)
            except Damaged:
                continue

    def topics(self) -> Iterator[tuple[Topic, int]]:
        """Yield topics and their revisions."""
        for at in self._places(stored_values.TOPIC_MAGIC, lambda done, total: None):
            try:
                yield stored_values.read_topic(self._view[at:])
            except Damaged:
                continue

    def layout(self, found: RawEntry) -> Layout | None:
        """Return the block of an entry, None if it is damaged."""
        try:
            layout = open_layout(found.entry.block(self._view[found.at :]))
        except (Damaged, WrongFormat):
            return None
        return layout if layout.count == found.entry.count else None

    def close(self) -> None:
        self._view.release()
        self._map.close()

    def _places(self, magic: bytes, progress: Progress) -> Iterator[int]:
        at, reported = self._map.find(magic), 0
        while at >= 0:
            yield at
            if at - reported >= SEARCH_STEP_BYTES:
                reported = at
                progress(at, len(self))
            at = self._map.find(magic, at + 1)


class SalvagePiece(NamedTuple):
    """Messages of a shard with offsets `first` to `end`, which start at `place` in a block."""

    first: int
    end: int
    runs: bytes  # of these messages
    found: RawEntry
    place: int = 0

    def time_at(self, offset: int) -> int:
        return run_table.time_at(self.runs, offset - self.first)

    def cut(self, start: int, end: int) -> SalvagePiece:
        if (start, end) == (self.first, self.end):
            return self
        by = start - self.first
        table = run_table.cut_runs(self.runs, by, end - self.first)
        return SalvagePiece(start, end, table, self.found, self.place + by)


def choose_pieces(pieces: list[SalvagePiece]) -> Iterator[SalvagePiece]:
    """Yield pieces in order and without overlap, for each offset the newest one."""
    pieces = sorted(pieces, key=lambda piece: piece.first)
    covering: list[SalvagePiece] = []
    at = following = 0
    while covering or following < len(pieces):
        at = at if covering else max(at, pieces[following].first)
        while following < len(pieces) and pieces[following].first <= at:
            covering.append(pieces[following])
            following += 1
        covering = [piece for piece in covering if piece.end > at]
        if covering:
            # Of equally new pieces the longest: a merged block replaces its small parts.
            best = max(covering, key=lambda piece: (piece.time_at(at), piece.end))
            # It is valid up to the first later piece that is newer.
            end = best.end
            for index in range(following, len(pieces)):
                later = pieces[index]
                if later.first >= best.end:
                    break
                if later.time_at(later.first) > best.time_at(later.first):
                    end = later.first
                    break
            yield best.cut(at, end)
            at = end


def salvage(source: Path, target: Path, progress: Progress = no_progress) -> SalvageReport:
    """Copy the intact messages of a damaged store to a new one.

    Raises `DataFolderInUse` if a process owns the source, `UsageError` if the target is not
    empty. Removes the new store if it fails.
    """
    owner = folder_ownership.owner(source) if source.is_dir() else None
    if owner is not None:
        raise DataFolderInUse(f"{source} is in use (pid {owner}); stop that process first")
    if target.is_dir() and any(target.iterdir()):
        raise UsageError(f"{target} is not empty")
    try:
        data = store_files.current_generation(source) / store_files.DATA
    except PolybusError:
        # CURRENT is unreadable: take the newest generation.
        data = max(source.glob(f"[0-9]*/{store_files.DATA}"), default=source / store_files.DATA)
    if not data.is_file() or not data.stat().st_size:
        raise DoesNotExist(f"no store in {source}")
    existed = target.is_dir()
    try:
        with closing(RawFile(data)) as raw:
            return _Salvager(raw, target, progress).run()
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        if existed:
            target.mkdir()
        raise


@dataclass
class _Salvager:
    raw: RawFile
    target: Path
    progress: Progress
    pieces: dict[Target, list[SalvagePiece]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    blocks: int = 0
    messages: int = 0
    size: int = 0

    def run(self) -> SalvageReport:
        self._search()
        topics = self._topics()
        files = StoreFiles(self.target, read_only=False)
        try:
            self._txn_writer = TransactionWriter(files)
            for topic in topics:
                self._store(topic)
            # Numbers of lost topics may be higher, but nothing in the new store refers to them.
            highest = max([topic.number for topic in topics], default=0) + 1
            batch = WriteBatch()
            batch.put(store_keys.COUNTERS, StoreCounters(topic=highest, version=highest).encode())
            self._txn_writer.write(batch)
        finally:
            files.close()
        self.progress(len(self.raw), len(self.raw))
        lost = tuple(self.lost[:MAX_LISTED])
        return SalvageReport(len(topics), self.blocks, self.messages, self.size, lost)

    # --- search

    def _search(self) -> None:
        staged: dict[tuple[int, int, int], dict[int, RawEntry]] = {}
        extents: list[LogEntry] = []
        for found in self.raw.entries(self.progress):
            entry = found.entry
            if entry.kind == log_entry.EXTENT:
                extents.append(entry)
                continue
            layout = self.raw.layout(found)
            if layout is None:
                continue  # usually an old copy whose end was overwritten
            layout.close()
            if entry.kind == log_entry.STAGED:
                stage = entry.parts[0].stage
                staged.setdefault((stage, entry.topic, entry.shard), {})[entry.first] = found
            else:
                self._add(entry, SalvagePiece(entry.first, entry.end, entry.runs, found))
        for extent in extents:
            self._extent(extent, staged)

    def _extent(
        self, extent: LogEntry, staged: dict[tuple[int, int, int], dict[int, RawEntry]]
    ) -> None:
        place = 0
        for part in extent.parts:
            held = staged.get((part.stage, extent.topic, extent.shard), {})
            for first, found in held.items():
                start = place + first
                end = start + found.entry.count
                # An old copy may disagree with the extent: a piece that does not fit is ignored.
                if end <= extent.count:
                    table = run_table.cut_runs(extent.runs, start, end)
                    at = extent.first
                    self._add(extent, SalvagePiece(at + start, at + end, table, found))
            place += part.count

    def _add(self, entry: LogEntry, piece: SalvagePiece) -> None:
        self.pieces.setdefault((entry.topic, entry.shard), []).append(piece)

    def _topics(self) -> list[Topic]:
        newest: dict[int, tuple[int, Topic]] = {}
        for topic, revision in self.raw.topics():
            # The file may hold several versions of a record; the highest revision is the last.
            if revision >= newest.get(topic.number, (0, topic))[0]:
                newest[topic.number] = revision, topic
        found = {number: topic for number, (_, topic) in newest.items()}
        for number, shard in self.pieces:
            found[number] = _with_shard(found.get(number), number, shard)
        # Names must be unique: one that was created again belongs to the newest topic.
        taken: set[str] = set()
        topics = []
        for number, topic in sorted(found.items(), reverse=True):
            name = f"salvaged-{number}" if topic.name in taken else topic.name
            taken.add(name)
            topics.append(Topic(name, number, topic.generations, topic.settings))
        return topics[::-1]

    # --- into the new store

    def _store(self, topic: Topic) -> None:
        batch = WriteBatch()
        next_id, time_ns = 1, 0
        for shard in topic.shards:
            start, end, size = None, 0, 0
            for piece in self._chosen(topic, shard):
                start = piece.first if start is None else start
                last = run_table.read_runs(piece.runs)[-1]
                next_id = max(next_id, last.first_id + last.count)
                time_ns = max(time_ns, last.timestamp_ns)
                size += self._put(batch, topic.number, shard, piece)
                end = piece.end
                if batch.size >= GROUP_BYTES:
                    self._txn_writer.write(batch)
                    batch = WriteBatch()
            raw = stored_values.SHARD_STATE.pack(end if start is None else start, end, size)
            batch.put(store_keys.shard_state(topic.number, shard), raw)
        batch.put(store_keys.state(topic.number), stored_values.TOPIC_STATE.pack(next_id, time_ns))
        batch.put(store_keys.topic(topic.number), stored_values.encode_topic(topic, topic.number))
        # Ends of former topics of the name are lost with its record.
        name = NameRecord(topic.number, True, next_id, ())
        batch.put(store_keys.name(topic.name.encode()), stored_values.encode_name(name))
        self._txn_writer.write(batch)

    def _chosen(self, topic: Topic, shard: int) -> Iterator[SalvagePiece]:
        """Yield the pieces of a shard, and note gaps between them as lost."""
        at: int | None = None
        for piece in choose_pieces(self.pieces.get((topic.number, shard), [])):
            if at is not None and piece.first > at:
                self.lost.append(
                    f"topic {topic.name!r}, shard {shard}: offsets {at} to {piece.first - 1}"
                )
            at = piece.end
            yield piece

    def _put(self, batch: WriteBatch, topic: int, shard: int, piece: SalvagePiece) -> int:
        """Add a piece to the batch as an entry of the log. Returns its bytes."""
        layout = self.raw.layout(piece.found)
        assert layout is not None
        count = piece.end - piece.first
        with layout:
            block = cut_layout(layout, piece.place, piece.place + count)
        size = block.size_bytes
        entry = LogEntry(log_entry.BLOCK, topic, shard, piece.first, count, size, piece.runs)
        batch.put(store_keys.log(topic, shard, piece.first), log_entry.encode(entry, block.data))
        batch.size += size
        self.blocks += 1
        self.messages += count
        self.size += size
        return size


def _with_shard(topic: Topic | None, number: int, shard: int) -> Topic:
    """Return the topic with at least this shard: its record may be lost or outdated."""
    if topic is None:
        return Topic(f"salvaged-{number}", number, (shard + 1,))
    missing = shard + 1 - len(topic.shards)
    if missing <= 0:
        return topic
    *sealed, last = topic.generations
    grown = (last + missing,) if topic.name == f"salvaged-{number}" else (last, missing)
    return Topic(topic.name, number, (*sealed, *grown), topic.settings)
