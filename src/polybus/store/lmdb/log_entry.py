"""What stands in the log and among staged blocks: a head, its tables, maybe a block.

    head     magic, kind, topic, shard, first, count, charged bytes; sizes of what follows
    checksum XXH64 of head and tables; the block behind them has its own
    runs     (first id, timestamp, count) each, one a commit, joined where they go on
    parts    (stage, count, charged bytes) each
    block    of kinds BLOCK and STAGED

    BLOCK    messages of a shard from offset `first` on, in the block
    EXTENT   the same, but they stay where they were staged: all that each part's stage
             holds for this shard, in order
    STAGED   a block of a stage: `first` is the place of its first message in stage and
             shard, its one part names the stage; it has no runs

All that is needed to know what a block is stands beside it, so that salvage can put a
store together from the raw file. `charged` is what a shard's size was raised by, and
will be lowered by; it may differ a little from the block's length.
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
    count: int  # type: ignore[assignment]  # a tuple's method of this name is not missed
    charged: int


class LogEntry(NamedTuple):
    kind: int
    topic: int
    shard: int
    first: int
    count: int  # type: ignore[assignment]  # a tuple's method of this name is not missed
    charged: int
    runs: bytes = b""
    parts: tuple[StagePart, ...] = ()
    block_at: int = 0  # where in the value the block begins
    block_bytes: int = 0

    @property
    def end(self) -> int:
        return self.first + self.count

    def block(self, value: memoryview) -> memoryview:
        """The block in the value that this was decoded from."""
        return value[self.block_at : self.block_at + self.block_bytes]


def encode(entry: LogEntry, block: Buffer | HeadroomBlock = b"") -> bytes:
    return b"".join((encode_head(entry, len(block)), block))


def encode_head(entry: LogEntry, block_bytes: int) -> bytes:
    """All that stands before the block, of which the size will do."""
    tables = entry.runs + b"".join([_PART.pack(*part) for part in entry.parts])
    sizes = block_bytes, len(entry.runs) // _RUN_BYTES, len(entry.parts)
    head = _HEAD.pack(MAGIC, *entry[:6], *sizes)
    return b"".join((head, _CHECKSUM.pack(xxh64(head + tables)), tables))


def decode(value: Buffer) -> LogEntry:
    """What a value says of itself; `Damaged` if it is not what was written."""
    try:
        head = read_head(value, MAGIC, True)
    except BadEntry as error:
        raise Damaged(str(error)) from None
    if head[7]:
        parts = tuple([StagePart._make(part) for part in _PART.iter_unpack(head[7])])
        return LogEntry(*head[:7], parts, *head[8:])
    return LogEntry._make(head)
