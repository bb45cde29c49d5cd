"""Blocks: batches of messages as the store keeps them; docs/spec/block.md has the format.

The kernel encodes and checks blocks; this module turns its errors into those of polybus,
with the column or the reason in the text. `Block` owns its bytes. `Layout` is a view of
foreign bytes, such as a mapped page of a database; `gather` copies the messages of a read
out of layouts, so that nothing refers to them afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from typing_extensions import Buffer

from polybus.errors import Damaged, PolybusError, TooLarge, UsageError, WrongFormat
from polybus.kernel import block_gather
from polybus.kernel import blocks as kernel
from polybus.kernel.blocks import HeadroomBlock
from polybus.kernel.blocks import Layout as Layout  # re-exported for the engines
from polybus.model.rows import Rows

MAX_BLOCK_BYTES = kernel.MAX_BYTES
KEYLESS_RUN = kernel.KEYLESS_RUN
MAX_ID = 2**63 - 1


class Keys(NamedTuple):
    """The keys of messages: UTF-8 data with int32 offsets. A null key has no bytes."""

    data: Buffer
    offsets: Buffer
    validity: Buffer | None = None  # Arrow's bitmap; None: every message has a key
    first_bit: int = 0  # index of the bit of message 0


class Headers(NamedTuple):
    """The headers of messages: offsets into entries, each a name (UTF-8) and a value."""

    offsets: Buffer
    names: Buffer
    name_offsets: Buffer
    values: Buffer
    value_offsets: Buffer
    validity: Buffer | None = None
    first_bit: int = 0


class BlockSlice(NamedTuple):
    """Messages `start` to `end` (exclusive) of a block whose message 0 has `first_offset`."""

    layout: Layout
    runs: Buffer  # run table of the whole block
    first_offset: int
    shard: int
    start: int
    end: int


class Block(NamedTuple):
    """A block of one message or more, made by `open`, `from_columns`, `concat` or `slice`."""

    data: bytes | HeadroomBlock
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    @classmethod
    def from_columns(
        cls,
        bodies: Buffer,
        body_offsets: Buffer,
        *,
        insertion_ms: int | Buffer,
        keys: Keys | None = None,
        headers: Headers | None = None,
    ) -> Block:
        """Copy columns in Arrow's layout into a block.

        Offsets are int32, one more than messages; the first need not be 0. `insertion_ms` is
        one time for all messages, or a column of int64. Raises UsageError with the name of
        the invalid column, TooLarge if the block exceeds `MAX_BLOCK_BYTES`.
        """
        try:
            data = kernel.build(insertion_ms, bodies, body_offsets, keys, headers)
        except _FAULTS as error:
            raise _translated(error) from None
        return _made(data)

    @classmethod
    def open(cls, data: Buffer) -> Block:
        """Return the block in these bytes. Raises Damaged if they are not an intact block."""
        owned = bytes(data)
        with open_layout(owned) as layout:
            return cls(owned, layout.count)

    @classmethod
    def concat(cls, blocks: Iterable[Block]) -> Block:
        """Return one block of all messages, in order. Raises TooLarge."""
        return concat_layouts(block.layout() for block in blocks)

    def slice(self, start: int, end: int) -> Block:
        """Return the block of messages `start` to `end` (exclusive), at least one."""
        return cut_layout(self.layout(), start, end)

    def split(self, shards: int, keyless: int) -> list[tuple[int, Block]]:
        """Split the messages by shard, in order. Returns pairs of shard and block.

        A key's shard is its XXH64 modulo `shards`. Messages without a key go round the shards
        from `keyless`, in runs of `KEYLESS_RUN`.
        """
        parts = kernel.split(self.layout(), shards, keyless)
        return [(shard, self if data is None else _made(data)) for shard, data in parts]

    def layout(self) -> Layout:
        """Return the layout of this block without verifying the checksum again."""
        return open_layout(self.data, checksum=False)


def open_layout(data: Buffer, *, checksum: bool = True, later: bool = False) -> Layout:
    """Return the layout of a block after checking structure and checksum.

    It holds the bytes until it is closed. With `later`, `gather` verifies the checksum,
    because it reads the bytes anyway. Raises Damaged if the bytes are not an intact block,
    WrongFormat if they are a block of another version.
    """
    try:
        return Layout(data, checksum=checksum, later=later)
    except kernel.UnknownVersion:
        raise WrongFormat("a block of another version of polybus") from None
    except kernel.BadBlock as error:
        raise Damaged(f"a block is damaged: {error}") from None


def concat_layouts(layouts: Iterable[Layout]) -> Block:
    try:
        return _made(kernel.concat(layouts))
    except _FAULTS as error:
        raise _translated(error) from None


def cut_layout(layout: Layout, start: int, end: int) -> Block:
    try:
        return _made(kernel.cut(layout, start, end))
    except _FAULTS as error:
        raise _translated(error) from None


def gather(
    pieces: Iterable[tuple[Layout, Buffer, int, int, int, int]],
    *,
    from_id: int = 0,
    below_id: int = MAX_ID,
    max_rows: int,
    max_bytes: int,
    by_piece: bool = False,
) -> Rows:
    """Copy the messages of pieces, with their positions, into new columns.

    Pieces of one shard must be in order; those of several shards are merged by id, or with
    `by_piece` kept in the given order. Returns at most `max_rows` messages with `max_bytes`
    of bodies, keys and headers, but at least one if there is any. Raises Damaged if a run
    table does not fit its block, or a checksum does not match.
    """
    try:
        return Rows(*block_gather.gather(pieces, from_id, below_id, max_rows, max_bytes, by_piece))
    except block_gather.BadPiece as error:
        raise Damaged(str(error)) from None


def _made(data: bytes | HeadroomBlock) -> Block:
    return Block(data, kernel.read_message_count(data))


# Callers use try/except: a context manager would cost more than a small block.
_FAULTS = (kernel.BadColumns, kernel.BadBlock, OverflowError, IndexError)


def _translated(error: Exception) -> PolybusError:
    if isinstance(error, OverflowError):
        return TooLarge(str(error))
    if isinstance(error, kernel.BadBlock):
        return Damaged(f"a block is damaged: {error}")
    return UsageError(str(error))
