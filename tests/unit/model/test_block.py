"""Blocks as values: build, open, slice, concat, and their errors."""

from __future__ import annotations

import struct

import pytest

from polybus.errors import Damaged, TooLarge, UsageError, WrongFormat
from polybus.kernel import blocks as kernel
from polybus.model import block as model
from polybus.model import run_table
from polybus.model.block import Block, BlockSlice, Headers, Keys, gather, open_layout
from polybus.testing.conformance.sample_blocks import block, contents, messages

MIXED = block(
    b"a",
    b"bcd",
    b"",
    keys=["k", None, "é"],
    headers=[None, [("h", b"v"), ("h", b"")], {}],
    insertion_ms=[1, -2, 3],
)


def offsets(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def test_block_returns_its_messages():
    assert contents(MIXED) == [
        (1, "k", b"a", None),
        (-2, None, b"bcd", (("h", b"v"), ("h", b""))),
        (3, "é", b"", ()),
    ]
    assert MIXED.count == 3
    assert MIXED.size_bytes == len(MIXED.data)


def test_a_block_is_its_bytes():
    assert Block.open(memoryview(MIXED.data)) == MIXED


@pytest.mark.parametrize("cut", range(1, MIXED.count))
def test_slices_put_together_are_the_whole(cut):
    assert Block.concat([MIXED.slice(0, cut), MIXED.slice(cut, MIXED.count)]) == MIXED


def test_a_slice_has_the_form_of_its_own_messages():
    assert MIXED.slice(1, 2) == block(
        b"bcd", headers=[[("h", b"v"), ("h", b"")]], insertion_ms=[-2]
    )
    assert MIXED.slice(0, 1) == block(b"a", keys=["k"], insertion_ms=1)


def test_absent_columns_take_no_bytes():
    plain = block(b"a", b"b")
    assert block(b"a", b"b", keys=[None, None], headers=[None, None]) == plain
    assert plain.size_bytes == kernel.HEADER_BYTES + 2 * 8 + 16 + 8


def test_offsets_may_begin_and_end_inside_the_data():
    made = Block.from_columns(
        b"..abc..",
        offsets(2, 3, 5),
        insertion_ms=0,
        keys=Keys(b"xkyz", offsets(1, 2, 3), b"\x0c", 2),
    )
    assert made == block(b"a", b"bc", keys=["k", "y"])


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"body_offsets": b""}, "body"),
        ({"body_offsets": offsets(0)}, "body"),
        ({"body_offsets": offsets(0, 3, 2)}, "body"),
        ({"body_offsets": offsets(0, 2, 4)}, "body"),
        ({"body_offsets": offsets(-1, 2, 3)}, "body"),
        ({"body_offsets": offsets(0, 1, 2) + b"x"}, "body"),
        ({"insertion_ms": bytes(15)}, "insertion_ms"),
        ({"keys": Keys(b"ab", offsets(0, 1))}, "shard_key"),
        ({"keys": Keys(b"ab", offsets(0, 1, 3))}, "shard_key"),
        ({"keys": Keys(b"a\xff", offsets(0, 1, 2))}, "shard_key"),
        ({"keys": Keys("é".encode(), offsets(0, 1, 2))}, "shard_key"),
        ({"keys": Keys(b"ab", offsets(0, 1, 2), b"\x01")}, "shard_key"),
        ({"keys": Keys(b"ab", offsets(0, 1, 2), b"")}, "shard_key"),
        ({"keys": Keys(b"ab", offsets(0, 1, 2), b"\xff", 7)}, "shard_key"),
        ({"keys": Keys(b"ab", offsets(0, 1, 2), b"\xff", -1)}, "shard_key"),
        ({"keys": Keys(b"", offsets(0, 0, 0), b"\xff", 7)}, "shard_key"),
        ({"keys": Keys(b"", offsets(0, 0, 0), b"")}, "shard_key"),
        ({"headers": Headers(offsets(0, 1, 2), b"", b"", b"", b"")}, "headers"),
        (
            {"headers": Headers(offsets(0, 1, 2), b"n", offsets(0, 1), b"", offsets(0, 0))},
            "headers",
        ),
        (
            {"headers": Headers(offsets(0, 1, 0), b"n", offsets(0, 1), b"", offsets(0, 0))},
            "headers",
        ),
        ({"headers": Headers(offsets(0, 1), b"n", offsets(0, 1), b"", offsets(0, 0))}, "headers"),
        (
            {"headers": Headers(offsets(0, 1, 1), b"\x80", offsets(0, 1), b"", offsets(0, 0))},
            "headers' names",
        ),
        (
            {"headers": Headers(offsets(0, 1, 1), b"n", offsets(0, 1), b"v", offsets(0, 2))},
            "headers' values",
        ),
        (
            {"headers": Headers(offsets(0, 1, 1), b"n", offsets(0, 1), b"", offsets(0, 0), b"\2")},
            "headers",
        ),
    ],
)
def test_a_wrong_column_is_named(columns, named):
    right = {"body_offsets": offsets(0, 1, 3), "insertion_ms": 0}
    with pytest.raises(UsageError, match=f"^{named}"):
        Block.from_columns(b"abc", **(right | columns))


def test_too_large_is_said_before_anything_is_copied():
    half = model.MAX_BLOCK_BYTES // 2
    with pytest.raises(TooLarge):
        Block.from_columns(bytes(2 * half), offsets(0, half, 2 * half), insertion_ms=0)


@pytest.mark.parametrize(("start", "end"), [(0, 0), (2, 1), (-1, 2), (0, 4), (3, 3)])
def test_a_slice_lies_in_its_block_and_is_not_empty(start, end):
    with pytest.raises(UsageError):
        MIXED.slice(start, end)


def test_no_blocks_are_no_block():
    with pytest.raises(UsageError):
        Block.concat([])


def test_every_flipped_bit_is_damage():
    for bit in range(MIXED.size_bytes * 8):
        broken = bytearray(MIXED.data)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged):
            Block.open(broken)


@pytest.mark.parametrize("size", range(MIXED.size_bytes))
def test_every_shorter_piece_is_damage(size):
    with pytest.raises(Damaged):
        Block.open(bytes(MIXED.data)[:size])


def test_a_longer_one_is_damage():
    with pytest.raises(Damaged):
        Block.open(bytes(MIXED.data) + bytes(8))


def test_a_whole_block_of_another_version_is_another_format():
    other = bytearray(MIXED.data)
    other[16] = 2
    other[8:16] = kernel.xxh64(other[16:]).to_bytes(8, "little")
    with pytest.raises(WrongFormat):
        Block.open(other)


def test_a_closed_layout_is_not_read():
    layout = open_layout(MIXED.data)
    layout.close()
    layout.close()
    with pytest.raises(ValueError, match="closed"):
        kernel.cut(layout, 0, 1)


def test_a_closed_layout_lets_go_of_its_bytes():
    data = bytearray(MIXED.data)
    with open_layout(data) as layout:
        assert layout.count == 3
        with pytest.raises(BufferError):
            data.append(0)
    data.append(0)


def test_a_read_merges_shards_by_id():
    one, other = block(b"a", b"b", b"c"), block(b"x", b"y")
    pieces = [
        BlockSlice(
            one.layout(),
            run_table.join_tables(run_table.make_table(1, 10, 1), run_table.make_table(4, 20, 2)),
            7,
            0,
            0,
            3,
        ),
        BlockSlice(other.layout(), run_table.make_table(2, 10, 2), 5, 1, 0, 2),
    ]
    rows = gather(pieces, max_rows=10, max_bytes=100)
    read = [(m.id, m.shard, m.offset, m.timestamp_ns, m.body) for m in messages(rows)]
    assert read == [
        (1, 0, 7, 10, b"a"),
        (2, 1, 5, 10, b"x"),
        (3, 1, 6, 10, b"y"),
        (4, 0, 8, 20, b"b"),
        (5, 0, 9, 20, b"c"),
    ]


@pytest.mark.parametrize(
    "table",
    [
        b"",
        run_table.make_table(1, 0, 2),
        run_table.make_table(1, 0, 4),
        run_table.make_table(1, 0, 3)[:-1],
        bytes(24),
    ],
)
def test_a_run_table_that_does_not_fit_is_damage(table):
    with pytest.raises(Damaged):
        gather([BlockSlice(MIXED.layout(), table, 0, 0, 0, 3)], max_rows=1, max_bytes=1)
