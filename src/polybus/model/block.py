"""Blocks: batches of messages as the store keeps them; the bytes are docs/spec/block.md's.

The kernel makes and reads them; here its faults become the errors of polybus, with
the column or the reason in their text. `Block` owns its bytes. `Layout` is a look
into bytes of somebody else, such as a database's mapped page; `gather` copies what
a read wants out of layouts, so that nothing refers to them afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from typing_extensions import Buffer

from polybus.errors import Damaged, PolybusError, TooLarge, UsageError, WrongFormat
from polybus.kernel import block_gather
from polybus.kernel import blocks as kernel
from polybus.kernel.blocks import HeadroomBlock
from polybus.kernel.blocks import Layout as Layout  # the engines know it by this face
from polybus.model.rows import Rows

MAX_BLOCK_BYTES = kernel.MAX_BYTES
MAX_ID = 2**63 - 1


class Keys(NamedTuple):
    """The messages' keys, UTF-8: int32 offsets into data. A null key has no bytes."""

    data: Buffer
    offsets: Buffer
    validity: Buffer | None = None  # Arrow's bitmap; None: every message has a key
    first_bit: int = 0  # the bitmap's bit of message 0


class Headers(NamedTuple):
    """The messages' headers: offsets into entries, each a name (UTF-8) and a value."""

    offsets: Buffer
    names: Buffer
    name_offsets: Buffer
    values: Buffer
    value_offsets: Buffer
    validity: Buffer | None = None
    first_bit: int = 0


class BlockSlice(NamedTuple):
    """Messages `start` to `end` of a block whose message 0 stands at `first_offset`."""

    layout: Layout
    runs: Buffer  # polybus.model.run_table: of the whole block
    first_offset: int
    shard: int
    start: int
    end: int


class Block(NamedTuple):
    """One message or more. Made by `open`, `from_columns`, `concat` or `slice` alone."""

    data: bytes | HeadroomBlock
    count: int  # type: ignore[assignment]  # a tuple's method of this name is not missed

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
        """A block of columns in Arrow's layout, which are copied.

        Offsets are int32, one more than there are messages, and begin anywhere in the
        data. `insertion_ms` is one time for all, or a column of int64. `UsageError` names
        the column that is wrong; `TooLarge` if it all is over `MAX_BLOCK_BYTES`.
        """
        try:
            data = kernel.build(insertion_ms, bodies, body_offsets, keys, headers)
        except _FAULTS as error:
            raise _translated(error) from None
        return _made(data)

    @classmethod
    def open(cls, data: Buffer) -> Block:
        """The block in these bytes. `Damaged` if they are none, or changed since."""
        owned = bytes(data)
        with open_layout(owned) as layout:
            return cls(owned, layout.count)

    @classmethod
    def concat(cls, blocks: Iterable[Block]) -> Block:
        """One block of all messages, in order. `TooLarge` if it would be too large."""
        return concat_layouts(block.layout() for block in blocks)

    def slice(self, start: int, end: int) -> Block:
        """The block of messages `start` to `end` (exclusive): at least one."""
        return cut_layout(self.layout(), start, end)

    def split(self, shards: int, keyless: int) -> list[tuple[int, Block]]:
        """The messages by shard, in their order within each: pairs of a shard and its block.

        A key's shard is its XXH64 modulo `shards`; messages without a key go to `keyless`.
        """
        parts = kernel.split(self.layout(), shards, keyless)
        return [(shard, self if data is None else _made(data)) for shard, data in parts]

    def layout(self) -> Layout:
        """A look into this block, whose checksum was verified or made here already."""
        return open_layout(self.data, checksum=False)


def open_layout(data: Buffer, *, checksum: bool = True, later: bool = False) -> Layout:
    """A look into bytes that are held until it is closed, their structure and checksum verified.

    `Damaged` if they are no block; `WrongFormat` if they are one of another version. With
    `later` the checksum is compared by `gather`, which reads the bytes anyway.
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
    """The messages of some pieces, with their positions, as columns of their own.

    Pieces of one shard come in its order; those of several are merged by id, or with
    `by_piece` come as they are given. At most
    `max_rows`, with `max_bytes` of bodies, keys and headers, but at least one if there is
    any. `Damaged` if a run table does not fit its block, or a checksum that was left for
    later is another.
    """
    try:
        return Rows(*block_gather.gather(pieces, from_id, below_id, max_rows, max_bytes, by_piece))
    except block_gather.BadPiece as error:
        raise Damaged(str(error)) from None


def _made(data: bytes | HeadroomBlock) -> Block:
    return Block(data, kernel.read_message_count(data))


# By try and except where they are raised: a context manager would take longer than a block.
_FAULTS = (kernel.BadColumns, kernel.BadBlock, OverflowError, IndexError)


def _translated(error: Exception) -> PolybusError:
    if isinstance(error, OverflowError):
        return TooLarge(str(error))
    if isinstance(error, kernel.BadBlock):
        return Damaged(f"a block is damaged: {error}")
    return UsageError(str(error))
