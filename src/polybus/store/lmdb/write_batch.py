"""A write batch: the changes of one transaction, collected first and written in few calls.

The batch is written in the order of the keys, in pieces, which bounds the length of one call
into LMDB.

Small blocks for one shard become one entry of up to `MERGED_BYTES`. A larger block is an
entry of its own, because merging would copy and hash it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import Struct
from typing import Final

from polybus.kernel.blocks import BlockMerger, HeadroomBlock, prepend_head
from polybus.model.block import Block
from polybus.store.lmdb import log_entry, store_keys
from polybus.store.lmdb.environment import Transaction
from polybus.store.lmdb.log_entry import LogEntry, StagePart

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


@dataclass(slots=True)
class PendingEntry:
    """Blocks for the end of a shard that become one entry of the log."""

    first: int  # offset
    count: int = 0
    size: int = 0
    blocks: list[bytes | HeadroomBlock] = field(default_factory=list)
    runs: list[list[int]] = field(default_factory=list)  # first id, time and count


class WriteBatch:
    """Changes of one transaction: keys to put and delete, and blocks to append."""

    def __init__(self) -> None:
        self.puts: dict[bytes, bytes | memoryview] = {}
        self.deletes: set[bytes] = set()
        self.size = 0  # bytes of blocks and records, which limit the memory of a batch
        self.entries: list[tuple[Target, PendingEntry]] = []  # not yet encoded
        self.written: list[Written] = []  # encoded entries
        self.ends: dict[Target, int] = {}  # new ends of shards that were appended to
        self.topics: set[int] = set()  # changed topics
        self.altered: set[int] = set()  # topics that were changed otherwise than by appends
        self.ended_leases: dict[int, float] = {}  # by stage; restored if the batch fails
        self.has_record_changes = False
        self.has_removals = False  # it adds removal keys
        self._tails: dict[Target, PendingEntry] = {}  # entries that take further blocks

    def __bool__(self) -> bool:
        return bool(self.puts or self.deletes or self.entries)

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
        data, count = block
        size = len(data)
        tail = self._tails.get(target)
        if (
            tail is None
            # A large block stays alone: copying it into a merged one costs more than it saves.
            or size >= SMALL_BYTES
            or tail.size + size > MERGED_BYTES
            or tail.count + count > MERGED_MESSAGES
        ):
            tail = PendingEntry(offset)
            self.entries.append((target, tail))
            if size < SMALL_BYTES:
                self._tails[target] = tail
            else:
                self._tails.pop(target, None)
        tail.blocks.append(data)
        tail.size += size
        tail.count += count
        runs = tail.runs
        # Consecutive ids of one time extend the last run.
        if runs and runs[-1][1] == time_ns and runs[-1][0] + runs[-1][2] == first_id:
            runs[-1][2] += count
        else:
            runs.append([first_id, time_ns, count])
        self.size += size

    def publish(
        self, target: Target, offset: int, parts: list[StagePart], run: tuple[int, int]
    ) -> None:
        """Append an extent to a shard: the blocks that the stages of the parts hold for it."""
        # Blocks that are appended later have offsets after the extent, so they need a new entry.
        self._tails.pop(target, None)
        count = sum(part.count for part in parts)
        charged = sum(part.charged for part in parts)
        runs = _RUN.pack(*run, count)
        entry = LogEntry(log_entry.EXTENT, *target, offset, count, charged, runs, tuple(parts))
        self.put(store_keys.log(*target, offset), log_entry.encode(entry))

    def encode_blocks(self) -> None:
        """Merge blocks to entries. This is the expensive part and must run outside of all locks."""
        for target, tail in self.entries:
            runs = b"".join([_RUN.pack(*run) for run in tail.runs])
            entry = LogEntry(log_entry.BLOCK, *target, tail.first, tail.count, tail.size, runs)
            first = tail.blocks[0]
            value: bytes | memoryview | None = None
            if isinstance(first, HeadroomBlock) and len(tail.blocks) == 1:
                # The head is written in front of the block, which saves a copy. None if another
                # entry uses the headroom already.
                value = prepend_head(log_entry.encode_head(entry, len(first)), first)
            if value is None:
                merged = BlockMerger(tail.blocks)
                value = merged.write(log_entry.encode_head(entry, merged.size_bytes))
            self.puts[store_keys.log(*target, tail.first)] = value
            self.written.append((target, tail.first, tail.count, value))
        self.entries, self._tails = [], {}

    def write(self, transaction: Transaction) -> None:
        for key in self.deletes:
            transaction.delete(key)
        with transaction.cursor() as cursor:
            piece: list[tuple[bytes, bytes | memoryview]] = []
            size = 0
            # In key order, LMDB fills pages one after the other and splits fewer of them.
            for item in sorted(self.puts.items()):
                piece.append(item)
                size += ITEM_BYTES + len(item[1])
                if size >= PIECE_BYTES:
                    cursor.putmulti(piece)
                    piece, size = [], 0
            if piece:
                cursor.putmulti(piece)
