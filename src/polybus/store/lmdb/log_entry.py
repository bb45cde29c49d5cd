"""Entries of the log and staged blocks: a head, its tables, and a block in most kinds.

    head     magic, kind, topic, shard, first, count, charged bytes; sizes of the rest
    checksum XXH64 of head and tables; the block has its own checksum
    runs     (first id, timestamp, count) each, one per commit, joined if consecutive
    parts    (stage, count, charged bytes) each
    block    of kinds BLOCK and STAGED

    BLOCK    messages of a shard from offset `first` on, in the block
    EXTENT   the same, but the messages stay in their stages: all that the stage of each
             part holds for this shard, in order
    STAGED   a block of a stage: `first` is the position of its first message among those
             of the stage and shard, its one part names the stage; it has no runs

An entry says everything about its block, so that salvage can rebuild a store from the raw
file. `charged` is the number of bytes by which the entry raised the size of the shard and
by which its removal lowers it; it may differ a little from the length of the block.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from polybus.errors import Damaged
from polybus.kernel.blocks import HeadroomBlock, xxh64
from polybus.store.lmdb.entry_head import BadEntry, read_head

MAGIC: Final = b"PBe1"
BLOCK: Final = 1
EXTENT: Final = 2
STAGED: Final = 3

Buffer = bytes | memoryview

_HEAD = Struct("<4sB3xIIqqqqII")
_CHECKSUM = Struct("<Q")
_PART = Struct("<Qqq")
_RUN_BYTES: Final = 24


class StagePart(NamedTuple):
    """All messages that a stage holds for one shard."""

    stage: int
    count: int  # type: ignore[assignment]  # hides the method of tuple, which is not used
    charged: int


class LogEntry(NamedTuple):
    kind: int
    topic: int
    shard: int
    first: int
    count: int  # type: ignore[assignment]  # hides the method of tuple, which is not used
    charged: int
    runs: bytes = b""
    parts: tuple[StagePart, ...] = ()
    block_at: int = 0  # position of the block in the value
    block_bytes: int = 0

    @property
    def end(self) -> int:
        return self.first + self.count

    def block(self, value: memoryview) -> memoryview:
        """Return the block within the value that this entry was decoded from."""
        return value[self.block_at : self.block_at + self.block_bytes]


def encode(entry: LogEntry, block: Buffer | HeadroomBlock = b"") -> bytes:
    return b"".join((encode_head(entry, len(block)), block))


def encode_head(entry: LogEntry, block_bytes: int) -> bytes:
    """Return the bytes before the block, of which only the size is needed."""
    # The checksum covers the sizes as well, so a damaged head cannot lead outside of the value.
    tables = entry.runs + b"".join([_PART.pack(*part) for part in entry.parts])
    sizes = block_bytes, len(entry.runs) // _RUN_BYTES, len(entry.parts)
    head = _HEAD.pack(MAGIC, *entry[:6], *sizes)
    return b"".join((head, _CHECKSUM.pack(xxh64(head + tables)), tables))


def decode(value: Buffer) -> LogEntry:
    """Decode a value. Raises `Damaged` if the checksum does not match."""
    try:
        head = read_head(value, MAGIC, True)
    except BadEntry as error:
        raise Damaged(str(error)) from None
    # Only extents and staged blocks have parts.
    if head[7]:
        parts = tuple([StagePart._make(part) for part in _PART.iter_unpack(head[7])])
        return LogEntry(*head[:7], parts, *head[8:])
    return LogEntry._make(head)
