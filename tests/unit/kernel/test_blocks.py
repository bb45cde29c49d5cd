"""Golden blocks, layouts that hold a caller's buffer, and blocks at the end of a page."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import xxhash

from polybus.errors import Damaged, WrongFormat
from polybus.kernel import block_gather
from polybus.kernel import blocks as kernel
from polybus.model import run_table
from polybus.model.block import Block, open_layout
from polybus.testing.conformance.sample_blocks import block, contents
from tests.rig.oracle import blocks as oracle
from tests.vectors.block import Vector, vectors

GOOD = [one for one in vectors() if one.bad is None]
BAD = [one for one in vectors() if one.bad is not None]


@pytest.mark.parametrize("vector", GOOD, ids=str)
def test_golden_block_is_encoded_and_opened(vector: Vector):
    messages = vector.messages or []
    made = block(
        *(one["body"] for one in messages),
        keys=[one["key"] for one in messages],
        headers=[one["headers"] for one in messages],
        insertion_ms=[one["insertion_ms"] for one in messages],
    )
    assert made.data == vector.data
    assert contents(Block.open(vector.data)) == [
        (one["insertion_ms"], one["key"], one["body"], one["headers"]) for one in messages
    ]


@pytest.mark.parametrize("vector", GOOD, ids=str)
def test_every_flipped_bit_of_a_golden_block_is_detected(vector: Vector):
    for bit in range(len(vector.data) * 8):
        broken = bytearray(vector.data)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged):
            open_layout(broken)


@pytest.mark.parametrize("vector", BAD, ids=str)
def test_invalid_vector_is_rejected_with_its_reason(vector: Vector):
    with pytest.raises(kernel.BadBlock, match=f"^{vector.bad}$"):
        kernel.Layout(vector.data)
    with pytest.raises(WrongFormat if vector.bad == "version" else Damaged):
        Block.open(vector.data)


def test_vectors_cover_every_reason():
    reasons = {"size", "magic", "checksum", "version", "flags", "sizes"}
    reasons |= {"padding", "offsets", "validity", "utf8"}
    assert {one.bad for one in BAD} == reasons


def test_open_without_checksum_checks_the_structure_only():
    made = block(b"body")
    data = bytes(made.data)
    body = data.index(b"body")
    changed = data[:body] + b"B" + data[body + 1 :]
    with pytest.raises(Damaged):
        open_layout(changed)
    with open_layout(changed, checksum=False) as layout:
        assert layout.count == 1
    with pytest.raises(Damaged):
        open_layout(changed[:-8], checksum=False)


@pytest.mark.parametrize("size", [*range(70), 1000, 4096, 100_003])
def test_checksum_is_xxh64_at_every_length_and_alignment(size):
    data = bytes(number * 37 & 0xFF for number in range(size + 8))
    for skipped in range(8):
        view = memoryview(data)[skipped : skipped + size]
        assert kernel.xxh64(view) == xxhash.xxh64_intdigest(view)


def test_layout_reads_the_same_at_any_alignment():
    made = block(b"a", b"bc", keys=["k", None], headers=[None, {"n": b"v"}])
    for skipped in range(8):
        view = memoryview(bytes(skipped) + made.data)[skipped:]
        with open_layout(view) as layout:
            assert kernel.cut(layout, 0, 2) == made.data


def test_layout_in_use_cannot_be_closed():
    """The second piece, when it is looked at, closes the layout of the first."""
    layout, other = block(b"a").layout(), block(b"b").layout()

    class Closing:
        def __iter__(self) -> Iterator[object]:
            layout.close()
            return iter((other, run_table.make_table(2, 0, 1), 1, 0, 0, 1))

    pieces: list[Any] = [(layout, run_table.make_table(1, 0, 1), 0, 0, 0, 1), Closing()]
    with pytest.raises(BufferError):
        block_gather.gather(pieces, 0, 9, 9, 9)
    layout.close()


def test_layout_can_be_closed_after_a_read():
    layout = block(b"a").layout()
    block_gather.gather([(layout, run_table.make_table(1, 0, 1), 0, 0, 0, 1)], 0, 9, 9, 9)
    kernel.concat([layout, layout])
    kernel.cut(layout, 0, 1)
    layout.close()


@pytest.mark.parametrize(
    "piece",
    [
        (0, 0, 0, 2),
        (0, 0, -1, 1),
        (0, 0, 1, 0),
    ],
)
def test_piece_outside_its_block_is_rejected_and_not_held(piece):
    layout = block(b"a").layout()
    table = bytearray(run_table.make_table(1, 0, 1))
    with pytest.raises(IndexError):
        block_gather.gather([(layout, table, *piece)], 0, 9, 9, 9)
    layout.close()
    table.append(0)  # a held buffer could not grow


def test_empty_or_outside_cut_is_rejected():
    with block(b"a", b"b").layout() as layout:
        for start, end in ((0, 0), (1, 1), (2, 1), (-1, 1), (0, 3)):
            with pytest.raises(IndexError):
                kernel.cut(layout, start, end)


@pytest.mark.parametrize(
    ("max_bytes", "expected"), [(1, 1), (4, 1), (7, 1), (8, 2), (11, 2), (12, 3)]
)
def test_max_bytes_bounds_all_runs_and_blocks_together(max_bytes, expected):
    """The messages weigh four bytes each: a body; a body and a key; a body and a header."""
    one = block(b"aaaa", b"bb", keys=[None, "kk"]).layout()
    table = run_table.join_tables(run_table.make_table(1, 0, 1), run_table.make_table(2, 5, 1))
    other = block(b"", headers=[[("n", b"vvv")]]).layout()
    pieces = [(one, table, 0, 0, 0, 2), (other, run_table.make_table(3, 5, 1), 2, 0, 0, 1)]
    assert block_gather.gather(pieces, 0, 9, 9, max_bytes)[0] == expected


@pytest.mark.parametrize("max_rows", range(1, 5))
def test_max_rows_bounds_all_runs_and_blocks_together(max_rows):
    one, other = block(b"a", b"b", b"c").layout(), block(b"d").layout()
    table = run_table.join_tables(run_table.make_table(1, 0, 1), run_table.make_table(2, 5, 2))
    pieces = [(one, table, 0, 0, 0, 3), (other, run_table.make_table(4, 5, 1), 3, 0, 0, 1)]
    count, _, _, _, _, _, _, bodies, *_ = block_gather.gather(pieces, 0, 9, max_rows, 9)
    assert (count, bodies) == (max_rows, b"abcd"[:max_rows])


def test_pieces_of_different_blocks_are_not_joined():
    one, other = block(b"a", b"b").layout(), block(b"x", b"y").layout()
    pieces = [
        (one, run_table.make_table(1, 0, 2), 0, 0, 0, 1),
        (other, run_table.make_table(2, 0, 2), 0, 1, 1, 2),
    ]
    assert block_gather.gather(pieces, 0, 9, 9, 9)[7] == b"ay"


def test_pieces_with_a_gap_are_not_joined():
    layout, table = block(b"a", b"b", b"c").layout(), run_table.make_table(1, 0, 3)
    pieces = [(layout, table, 0, 0, 0, 1), (layout, table, 0, 0, 2, 3)]
    assert block_gather.gather(pieces, 0, 9, 9, 9)[7] == b"ac"


def test_counts_that_overflow_are_rejected():
    table = run_table.make_table(0, 0, 2**62) * 4 + run_table.make_table(1, 0, 1)
    with pytest.raises(block_gather.BadPiece):
        block_gather.gather([(block(b"a").layout(), table, 0, 0, 0, 1)], 0, 9, 9, 9)


def test_table_with_trailing_bytes_is_rejected():
    table = run_table.make_table(1, 0, 1) + b"x"
    with pytest.raises(block_gather.BadPiece):
        block_gather.gather([(block(b"a").layout(), table, 0, 0, 0, 1)], 0, 9, 9, 9)


def test_rejected_read_holds_no_reference():
    good, bad = block(b"a").layout(), block(b"b").layout()
    table, torn = bytearray(run_table.make_table(1, 0, 1)), bytearray(run_table.make_table(2, 0, 2))
    pieces = [(good, table, 0, 0, 0, 1), (bad, torn, 1, 0, 0, 1)]
    with pytest.raises(block_gather.BadPiece):
        block_gather.gather(pieces, 0, 9, 9, 9)
    good.close()
    bad.close()
    table.append(0)
    torn.append(0)


def test_closed_layout_is_rejected():
    open_one, closed = block(b"a").layout(), block(b"b").layout()
    closed.close()
    table = bytearray(run_table.make_table(1, 0, 1))
    pieces = [(one, table, 0, 0, 0, 1) for one in (open_one, closed)]
    with pytest.raises(ValueError, match="closed"):
        block_gather.gather(pieces, 0, 9, 9, 9)
    open_one.close()
    table.append(0)


@pytest.mark.parametrize(
    "run", [(-1, 0, 1), (1, 0, 0), (1, 0, -1), (2**63 - 1, 0, 1), (1, 0, 2**63 - 1)]
)
def test_invalid_runs_are_rejected(run):
    piece = (block(b"a").layout(), run_table.make_table(*run), 0, 0, 0, 1)
    with pytest.raises(block_gather.BadPiece):
        block_gather.gather([piece], 0, 2**63 - 1, 9, 9)


def test_largest_ids_and_offsets_are_read():
    piece = (block(b"a", b"b").layout(), run_table.make_table(2**63 - 3, 0, 2), 2**63 - 3, 0, 0, 2)
    count, ids, _, offsets, *_ = block_gather.gather([piece], 0, 2**63 - 1, 9, 9)
    largest = (2**63 - 3).to_bytes(8, "little") + (2**63 - 2).to_bytes(8, "little")
    assert (count, bytes(ids), bytes(offsets)) == (2, largest, largest)


def test_no_byte_outside_the_block_is_read():
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernel.block_forbidden_pages"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("looked at ")


def test_block_size_limit_is_exact():
    room = kernel.MAX_BYTES - kernel.HEADER_BYTES - 16
    body = bytes(room + 1)
    offsets = (0).to_bytes(4, "little") + room.to_bytes(4, "little")
    largest = kernel.build(0, body, offsets)
    assert len(largest) == kernel.MAX_BYTES
    with pytest.raises(OverflowError):
        kernel.build(0, body, offsets[:4] + (room + 1).to_bytes(4, "little"))
    del body
    with kernel.Layout(largest) as layout, pytest.raises(OverflowError):
        kernel.concat([layout, layout])


def test_valid_block_over_the_limit_is_not_opened():
    size = kernel.MAX_BYTES + 8
    body = size - kernel.HEADER_BYTES - 16
    data = bytearray(size)
    data[:48] = oracle.HEADER.pack(oracle.MAGIC, 0, 1, 0, 1, size, body, 0, 0, 0, 0)
    data[60:64] = body.to_bytes(4, "little")
    with pytest.raises(kernel.BadBlock, match=r"^size$"):
        kernel.Layout(data, checksum=False)


def test_oracle_and_kernel_have_the_same_limits():
    assert (oracle.MAX_BYTES, oracle.MAGIC) == (kernel.MAX_BYTES, kernel.MAGIC)
    assert oracle.HEADER.size == kernel.HEADER_BYTES
