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
RUN = 256  # messages without a key, to one shard


def made(rows: Sequence[Row]) -> Block:
    bodies, keys, headers = zip(*rows, strict=True)
    return block(*bodies, keys=keys, headers=headers, insertion_ms=5)


def expected(rows: Sequence[Row], shards: int, keyless: int) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    seen = 0
    for row in rows:
        key = row[1]
        if key is None:
            shard = (keyless + seen // RUN) % shards
            seen += 1
        else:
            shard = xxhash.xxh64_intdigest(key.encode()) % shards
        found.setdefault(shard, []).append(row)
    return dict(sorted(found.items()))


@given(ROWS, st.integers(1, 9), st.data())
def test_split_routes_by_key_and_keeps_order(rows, shards, data):
    keyless = data.draw(st.integers(0, shards - 1))
    parts = made(rows).split(shards, keyless)
    wanted = expected(rows, shards, keyless)
    # One set of messages has one form, so the bytes say it all, checksum included.
    assert parts == [(shard, made(those)) for shard, those in wanted.items()]


@given(st.lists(KEYS, min_size=1, max_size=3), st.integers(1, 2000), st.integers(1, 9))
def test_messages_without_a_key_go_round_the_shards_in_runs(keys, count, shards):
    rows: list[Row] = [(b"%d" % number, keys[number % len(keys)], None) for number in range(count)]
    keyless = count % shards
    wanted = expected(rows, shards, keyless)
    assert made(rows).split(shards, keyless) == [(at, made(those)) for at, those in wanted.items()]


def test_block_without_keys_is_spread_evenly():
    parts = block(*[b"x"] * 20_000).split(16, 5)
    counts = [part.count for _, part in parts]
    assert [shard for shard, _ in parts] == list(range(16))
    assert max(counts) - min(counts) <= RUN


def test_block_for_one_shard_is_not_copied():
    whole = block(b"a", b"b")
    ((shard, part),) = whole.split(7, 3)
    assert shard == 3
    assert part is whole


@pytest.mark.parametrize(("shards", "keyless"), [(0, 0), (2, 2), (2, -1), (-1, -1)])
def test_invalid_shard_is_rejected(shards, keyless):
    with pytest.raises(IndexError):
        block(b"a").split(shards, keyless)
