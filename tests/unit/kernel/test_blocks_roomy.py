"""Large blocks have headroom: a head can be written there once, without a copy."""

from __future__ import annotations

import pytest

from polybus.kernel.blocks import (
    BlockMerger,
    HeadroomBlock,
    Layout,
    concat,
    prepend_head,
    read_message_count,
)
from polybus.model.block import Block
from polybus.model.commit import Append, Commit
from polybus.store.contract import Store
from polybus.store.engine_registry import open_store

HEAD = bytes(range(88))
LARGE = 64 * 1024


def block(size: int, fill: bytes = b"x") -> Block:
    offsets = (0).to_bytes(4, "little") + size.to_bytes(4, "little")
    return Block.from_columns(fill * size, offsets, insertion_ms=1)


def test_only_large_ones_have_it():
    assert isinstance(block(10).data, bytes)
    made = block(LARGE)
    assert isinstance(made.data, HeadroomBlock)
    assert made.count == read_message_count(made.data) == 1
    assert len(made.data) == made.size_bytes == len(bytes(made.data))


def test_a_head_stands_before_it_and_once():
    made = block(LARGE).data
    assert isinstance(made, HeadroomBlock)
    plain = bytes(made)
    assert bytes(prepend_head(HEAD, made) or b"") == HEAD + plain
    assert prepend_head(b"another", made) is None
    assert bytes(made) == plain
    assert BlockMerger([made]).write(b"another") == b"another" + plain


@pytest.mark.parametrize(("size", "fits"), [(0, True), (128, True), (129, False)])
def test_a_head_that_does_not_fit_goes_elsewhere(size, fits):
    made = block(LARGE).data
    assert isinstance(made, HeadroomBlock)
    found = prepend_head(bytes(size), made)
    assert (found is not None) == fits
    assert found is None or bytes(found) == bytes(size) + bytes(made)


def test_it_can_be_read_merged_and_cut_like_any():
    one, two = block(LARGE), block(LARGE, b"y")
    both = concat([Layout(one.data), Layout(two.data)])
    assert BlockMerger([one.data, two.data]).write(b"") == both
    assert bytes(Block.open(both).slice(1, 2).data) == bytes(two.data)


def test_nobody_can_write_to_it():
    with pytest.raises(TypeError):
        memoryview(block(LARGE).data)[0] = 1


@pytest.fixture
def store(tmp_path):
    with open_store(f"lmdb:{tmp_path}") as opened:
        yield opened


def test_the_same_block_in_two_places_of_one_commit(store: Store):
    """The second entry must not be written over the first's head."""
    topic = store.create("orders", 2, {})
    made = block(LARGE)
    appends = tuple(Append(topic.number, shard, made) for shard in (0, 1, 1))
    store.commit(Commit(appends=appends)).result()
    for shard, count in ((0, 1), (1, 2)):
        rows = store.read(topic.number, shard, 0, max_rows=10, max_bytes=1 << 20)
        assert rows.count == count
        assert bytes(rows.bodies) == b"x" * LARGE * count
