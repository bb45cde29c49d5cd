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


def test_only_large_blocks_have_headroom():
    assert isinstance(block(10).data, bytes)
    made = block(LARGE)
    assert isinstance(made.data, HeadroomBlock)
    assert made.count == read_message_count(made.data) == 1
    assert len(made.data) == made.size_bytes == len(bytes(made.data))


def test_head_is_written_into_the_headroom_once():
    made = block(LARGE).data
    assert isinstance(made, HeadroomBlock)
    plain = bytes(made)
    assert bytes(prepend_head(HEAD, made) or b"") == HEAD + plain
    assert prepend_head(b"another", made) is None
    assert bytes(made) == plain
    assert BlockMerger([made]).write(b"another") == b"another" + plain


@pytest.mark.parametrize(("size", "fits"), [(0, True), (128, True), (129, False)])
def test_headroom_holds_a_head_of_up_to_128_bytes(size, fits):
    made = block(LARGE).data
    assert isinstance(made, HeadroomBlock)
    found = prepend_head(bytes(size), made)
    assert (found is not None) == fits
    assert found is None or bytes(found) == bytes(size) + bytes(made)


def test_block_with_headroom_reads_merges_and_cuts():
    one, two = block(LARGE), block(LARGE, b"y")
    both = concat([Layout(one.data), Layout(two.data)])
    assert BlockMerger([one.data, two.data]).write(b"") == both
    assert bytes(Block.open(both).slice(1, 2).data) == bytes(two.data)


def test_block_is_read_only():
    with pytest.raises(TypeError):
        memoryview(block(LARGE).data)[0] = 1


@pytest.fixture
def store(tmp_path):
    with open_store(f"lmdb:{tmp_path}") as opened:
        yield opened


def test_same_block_twice_in_one_commit(store: Store):
    """The second entry must not be written over the first's head."""
    topic = store.create("orders", 2, {})
    made = block(LARGE)
    appends = tuple(Append(topic.number, shard, made) for shard in (0, 1, 1))
    store.commit(Commit(appends=appends)).result()
    for shard, count in ((0, 1), (1, 2)):
        rows = store.read(topic.number, shard, 0, max_rows=10, max_bytes=1 << 20)
        assert rows.count == count
        assert bytes(rows.bodies) == b"x" * LARGE * count
