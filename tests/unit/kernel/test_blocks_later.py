"""Checksums that are compared while messages are gathered: damaged blocks are detected."""

from __future__ import annotations

from struct import pack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.errors import Damaged
from polybus.kernel.block_gather import BadPiece
from polybus.kernel.block_gather import gather as kernel_gather
from polybus.kernel.blocks import Layout, concat, cut, split
from polybus.model.block import Block, BlockSlice, gather, open_layout
from polybus.testing.conformance.sample_blocks import block, messages

EVERYTHING: dict[str, Any] = {"max_rows": 1 << 20, "max_bytes": 1 << 30}
BODIES = st.lists(st.binary(max_size=200), min_size=1, max_size=30)


def piece(data: bytes, at: int, start: int, end: int, *, later: bool) -> BlockSlice:
    layout = open_layout(data, later=later)
    runs = pack("<qqq", at + 1, 5, layout.count)
    return BlockSlice(layout, runs, at, 0, start, end)


@given(st.lists(BODIES, min_size=1, max_size=4), st.data())
def test_deferred_check_gathers_the_same_rows(
    groups: list[list[bytes]], data: st.DataObject
) -> None:
    pieces: dict[bool, list[BlockSlice]] = {False: [], True: []}
    at = 0
    for bodies in groups:
        made = block(*bodies)
        start = data.draw(st.integers(0, made.count))
        end = data.draw(st.integers(start, made.count))
        for later, listed in pieces.items():
            listed.append(piece(bytes(made.data), at, start, end, later=later))
        at += made.count
    wanted, found = (gather(pieces[later], **EVERYTHING) for later in (False, True))
    assert found == wanted


@given(st.integers(0, 2000), st.integers(0, 64), st.integers(0, 64), st.data())
def test_every_flipped_bit_is_detected(
    size: int, before: int, behind: int, data: st.DataObject
) -> None:
    """Wherever the copied part begins and ends, beside stripes of the checksum."""
    made = block(
        bytes(before), bytes(range(256)) * (size // 256) + bytes(size % 256), bytes(behind)
    )
    bit = data.draw(st.integers(16 * 8, len(made.data) * 8 - 1))
    flipped = bytearray(made.data)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Damaged):
        gather([piece(bytes(flipped), 0, 1, 2, later=True)], **EVERYTHING)
    whole = gather([piece(bytes(made.data), 0, 1, 2, later=True)], **EVERYTHING)
    assert whole.count == 1


@pytest.mark.parametrize("before", [0, 1, 31, 32, 33])
def test_body_of_every_size_is_copied_while_the_checksum_is_compared(before: int) -> None:
    """The copied part begins and ends within, at and beside stripes of the checksum."""
    for size in range(140):
        body = bytes((size + place) % 255 + 1 for place in range(size))
        made = block(bytes(before), body, b"behind")
        (found,) = messages(gather([piece(bytes(made.data), 0, 1, 2, later=True)], **EVERYTHING))
        assert found.body == body


def test_one_damaged_block_among_intact_ones_is_detected() -> None:
    good = block(b"x" * 300)
    bad = bytearray(good.data)
    bad[-20] ^= 1
    pieces = [piece(bytes(data), at, 0, 1, later=True) for at, data in enumerate((good.data, bad))]
    with pytest.raises(BadPiece, match="checksum"):
        kernel_gather(pieces, 0, 1 << 60, 100, 1 << 20)


def test_block_in_several_runs_gathers_the_same_rows() -> None:
    made = block(*[b"%d" % number * 40 for number in range(6)])
    runs = b"".join(pack("<qqq", first, 5, 1) for first in (1, 3, 5, 7, 9, 11))
    other = block(*[b"o%d" % number for number in range(6)])
    others = b"".join(pack("<qqq", first, 5, 1) for first in (2, 4, 6, 8, 10, 12))

    def both(*, later: bool) -> list[BlockSlice]:
        one, two = (open_layout(each.data, later=later) for each in (made, other))
        return [BlockSlice(one, runs, 0, 0, 0, 6), BlockSlice(two, others, 0, 1, 0, 6)]

    assert gather(both(later=True), **EVERYTHING) == gather(both(later=False), **EVERYTHING)


def test_unchecked_layout_rejects_every_other_use() -> None:
    data = block(b"x").data
    for use in (
        lambda layout: concat([layout]),
        lambda layout: cut(layout, 0, 1),
        lambda layout: split(layout, 2, 0),
    ):
        with pytest.raises(ValueError, match="checksum"):
            use(Layout(data, later=True))
    assert Block.open(data).count == 1
