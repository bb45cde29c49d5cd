"""BlockMerger returns the same bytes as concat of checked layouts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.kernel.blocks import BadBlock, BadColumns, BlockMerger, Layout, concat
from polybus.model.block import Block, Headers, Keys


def offsets(parts: list[bytes]) -> bytes:
    found, at = [0], 0
    for part in parts:
        at += len(part)
        found.append(at)
    return b"".join(one.to_bytes(4, "little") for one in found)


def block(bodies: list[bytes], keyed: bool, headed: bool) -> bytes:
    keys = Keys(b"".join(b"k" for _ in bodies), offsets([b"k"] * len(bodies))) if keyed else None
    headers = None
    if headed:
        count = len(bodies)
        each = offsets([b"n"] * count)
        headers = Headers(each, b"n" * count, each, b"v" * count, each)
    made = Block.from_columns(
        b"".join(bodies), offsets(bodies), insertion_ms=7, keys=keys, headers=headers
    )
    return bytes(made.data)


BLOCKS = st.builds(
    block, st.lists(st.binary(max_size=40), min_size=1, max_size=5), st.booleans(), st.booleans()
)


@given(st.lists(BLOCKS, min_size=1, max_size=6), st.binary(max_size=80))
def test_merge_equals_concat(blocks: list[bytes], before: bytes) -> None:
    merged = BlockMerger(blocks)
    wanted = concat(map(Layout, blocks))
    assert merged.size_bytes == len(wanted)
    assert merged.write(before) == before + wanted
    assert merged.write(b"") == wanted  # a second write gives the same bytes


def test_merge_of_large_blocks_equals_concat() -> None:
    """Written without the interpreter's lock."""
    blocks = [block([bytes([at]) * 30_000], False, False) for at in range(9)]
    assert BlockMerger(blocks).write(b"head") == b"head" + concat(map(Layout, blocks))
    assert BlockMerger(blocks[:1]).write(b"head") == b"head" + blocks[0]


def test_invalid_merges_are_rejected() -> None:
    good = block([b"x"], False, False)
    with pytest.raises(BadColumns):
        BlockMerger([])
    for bad in (b"", good[:47], good[:-8], good + bytes(8)):
        with pytest.raises(BadBlock):
            BlockMerger([good, bad])
    for wrong in ([good, None], [None], [bytearray(good)], [good, memoryview(good)]):
        with pytest.raises(TypeError):
            BlockMerger(wrong)  # type: ignore[arg-type]


def test_offsets_outside_the_data_are_detected() -> None:
    good = block([b"abc"], False, False)
    at = good.index((3).to_bytes(4, "little"), 48 + 8)
    bad = good[:at] + (1 << 20).to_bytes(4, "little") + good[at + 4 :]
    with pytest.raises(BadBlock, match="offsets"):
        BlockMerger([good, bad])
