"""Batches cut over shards by their keys, compared with plain Python and PyPI's xxhash."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from polybus.model.block import Block
from polybus.testing.conformance.sample_blocks import block

Row = tuple[bytes, str | None, list[tuple[str, bytes]] | None]
KEYS = st.none() | st.text(max_size=4)
HEADERS = st.none() | st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=3)), max_size=2)
ROWS = st.lists(st.tuples(st.binary(max_size=6), KEYS, HEADERS), min_size=1, max_size=40)


def made(rows: Sequence[Row]) -> Block:
    bodies, keys, headers = zip(*rows, strict=True)
    return block(*bodies, keys=keys, headers=headers, insertion_ms=5)


def expected(rows: Sequence[Row], shards: int, keyless: int) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in rows:
        key = row[1]
        shard = keyless if key is None else xxhash.xxh64_intdigest(key.encode()) % shards
        found.setdefault(shard, []).append(row)
    return dict(sorted(found.items()))


@given(ROWS, st.integers(1, 9), st.data())
def test_split_routes_by_key_and_keeps_order(rows, shards, data):
    keyless = data.draw(st.integers(0, shards - 1))
    parts = made(rows).split(shards, keyless)
    wanted = expected(rows, shards, keyless)
    # One set of messages has one form, so the bytes say it all, checksum included.
    assert parts == [(shard, made(those)) for shard, those in wanted.items()]


def test_block_for_one_shard_is_not_copied():
    whole = block(b"a", b"b")
    ((shard, part),) = whole.split(7, 3)
    assert shard == 3
    assert part is whole


@pytest.mark.parametrize(("shards", "keyless"), [(0, 0), (2, 2), (2, -1), (-1, -1)])
def test_invalid_shard_is_rejected(shards, keyless):
    with pytest.raises(IndexError):
        block(b"a").split(shards, keyless)
