"""A write batch: the changes of one transaction, collected first and written in few calls.

While LMDB copies data, no other Python thread can run, so writing a whole transaction in one
call would block the event loop for milliseconds. The batch is written in pieces, in the
order of the keys, and other threads run between two pieces.

Small blocks for one shard become one entry of up to `MERGED_BYTES`. A larger block is an
entry of its own, because merging would copy and hash it again.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from polybus.kernel.blocks import BlockMerger, HeadroomBlock, prepend_head
from polybus.model.block import Block
from polybus.store.lmdb import log_entry, store_keys
from polybus.store.lmdb.log_entry import LogEntry, StagePart

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polybus.store.lmdb.environment import Transaction

MERGED_BYTES: Final = 1 << 20
SMALL_BYTES: Final = 64 << 10  # the re-blocker merges entries below this size
MERGED_MESSAGES: Final = 1 << 20  # keeps run tables small in relation to the block

# LMDB takes some ten microseconds for PIECE_BYTES, and as long for an empty item as for
# ITEM_BYTES.
PIECE_BYTES: Final = 64 << 10
ITEM_BYTES: Final = 1 << 10

_RUN = Struct("<qqq")

Target = tuple[int, int]  # topic and shard
Written = tuple[Target, int, int, bytes | memoryview]  # first offset, count, and the entry
Item = tuple[bytes, bytes | memoryview]


class EntryBuilder:
    """Builds one entry from blocks for the end of a shard."""

    __slots__ = ("blocks", "count", "first", "is_closed", "runs", "size")

    def __init__(self, first: int) -> None:
        self.first = first
        self.is_closed = False
        self.count = 0
        self.size = 0
        self.blocks: list[bytes | HeadroomBlock] = []
        self.runs: list[list[int]] = []

    def add(self, block: Block, first_id: int, timestamp_ns: int) -> bool:
        """Add a block. Returns False if it needs another entry; the first block always fits."""
        data, count = block
        size, total = self.size + len(data), self.count + count
        large = size > MERGED_BYTES or total > MERGED_MESSAGES
        # A large block stays alone: copying it into a merged one costs more than it saves.
        if self.blocks and (large or self.is_closed or len(data) >= SMALL_BYTES):
            return False
        self.is_closed = len(data) >= SMALL_BYTES
        self.blocks.append(data)
        self.size, self.count = size, total
        runs = self.runs
        # Consecutive ids of one time extend the last run.
        if runs and runs[-1][1] == timestamp_ns and runs[-1][0] + runs[-1][2] == first_id:
            runs[-1][2] += count
        else:
            runs.append([first_id, timestamp_ns, count])
        return True

    def encode(self, target: Target) -> bytes | memoryview:
        runs = b"".join([_RUN.pack(*run) for run in self.runs])
        entry = LogEntry(log_entry.BLOCK, *target, self.first, self.count, self.size, runs)
        first = self.blocks[0]
        if isinstance(first, HeadroomBlock) and len(self.blocks) == 1:
            whole = prepend_head(log_entry.encode_head(entry, len(first)), first)
            if whole is not None:  # None: the headroom is already in use
                return whole
        merged = BlockMerger(self.blocks)
        return merged.write(log_entry.encode_head(entry, merged.size_bytes))


class WriteBatch:
    """Changes of one transaction: keys to put and delete, and blocks to append."""

    def __init__(self) -> None:
        self.puts: dict[bytes, bytes | memoryview] = {}
        self.deletes: set[bytes] = set()
        self.size = 0  # bytes of blocks and records, which limit the memory of a batch
        self.written: list[Written] = []  # encoded entries
        self.ends: dict[Target, int] = {}  # new ends of shards that were appended to
        self.topics: set[int] = set()  # changed topics
        self.altered: set[int] = set()  # topics that were changed otherwise than by appends
        self.has_record_changes = False
        self.has_removals = False  # it adds removal keys
        self._tails: dict[Target, EntryBuilder] = {}
        self._full: list[tuple[Target, EntryBuilder]] = []

    def __bool__(self) -> bool:
        return bool(self.puts or self.deletes or self._tails or self._full)

    def changes_topic(self, topic: int) -> bool:
        """Return True if the batch changes a topic."""
        return topic in self.topics

    def alters_topic(self, topic: int) -> bool:
        """Return True if the batch changes a topic otherwise than by appends."""
        return topic in self.altered

    def changes_records(self) -> bool:
        return self.has_record_changes

    def put(self, key: bytes, value: bytes) -> None:
        if self.deletes:
            self.deletes.discard(key)
        self.puts[key] = value

    def delete(self, key: bytes) -> None:
        # The last change of a key wins: a put before this delete must not be written.
        self.puts.pop(key, None)
        self.deletes.add(key)

    def append(
        self, target: Target, offset: int, block: Block, first_id: int, time_ns: int
    ) -> None:
        """Append a block to a shard, with its first id and its time."""
        tail = self._tails.get(target)
        if tail is None or not tail.add(block, first_id, time_ns):
            if tail is not None:
                self._full.append((target, tail))
            tail = self._tails[target] = EntryBuilder(offset)
            tail.add(block, first_id, time_ns)
        self.size += len(block.data)

    def publish(
        self, target: Target, offset: int, parts: list[StagePart], run: tuple[int, int]
    ) -> None:
        """Append an extent to a shard: the blocks that the stages of the parts hold for it."""
        # The extent comes after the blocks, so their entry is complete.
        if target in self._tails:
            self._full.append((target, self._tails.pop(target)))
        count = sum(part.count for part in parts)
        charged = sum(part.charged for part in parts)
        runs = _RUN.pack(*run, count)
        entry = LogEntry(log_entry.EXTENT, *target, offset, count, charged, runs, tuple(parts))
        self.put(store_keys.log(*target, offset), log_entry.encode(entry))

    def encode_blocks(self) -> None:
        """Merge blocks to entries. This is the expensive part and must run outside of all locks."""
        for target, tail in (*self._full, *self._tails.items()):
            value = self.puts[store_keys.log(*target, tail.first)] = tail.encode(target)
            self.written.append((target, tail.first, tail.count, value))
        self._full, self._tails = [], {}

    def small_bytes(self) -> dict[Target, int]:
        """Return per shard the bytes of entries that the re-blocker may merge."""
        found: dict[Target, int] = {}
        for target, tail in (*self._full, *self._tails.items()):
            if tail.size < SMALL_BYTES:
                found[target] = found.get(target, 0) + tail.size
        return found

    def write(self, transaction: Transaction) -> None:
        for key in self.deletes:
            transaction.delete(key)
        with transaction.cursor() as cursor:
            # In key order, LMDB fills pages one after the other and splits fewer of them.
            for piece in _pieces(sorted(self.puts.items())):
                cursor.putmulti(piece)


def _pieces(items: list[Item]) -> Iterator[list[Item]]:
    """Split items into pieces of about `PIECE_BYTES`."""
    piece: list[Item] = []
    size = 0
    for item in items:
        size += ITEM_BYTES + len(item[1])
        piece.append(item)
        if size >= PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece
