"""A key's shard is its XXH64 modulo the number of shards: the vectors of the spec."""

from __future__ import annotations

import pytest

from polybus import fdq
from polybus.native.inprocess import open_bus

VECTORS = {
    "": 0xEF46DB3751D8E999,
    "a": 0xD24EC4F1A98C6E5B,
    "abc": 0x44BC2CF5AD770999,
    "customer-7": 0xAF814F0F339EDEFF,
    "é": 0x17D757DFB8B46F78,
}


@pytest.mark.parametrize("shards", [1, 2, 3, 16, 17, 512])
def test_shards_of_the_keys_in_the_specification(shards: int) -> None:
    with open_bus("memory:routing") as bus, fdq.Producer("memory:routing") as producer:
        bus.act("topic.create", topic="t", shards=shards)
        producer.produce_batch("t", [(key, b"by batch") for key in VECTORS])
        for key in VECTORS:
            producer.produce_nowait("t", key, b"alone")
        producer.flush()
        found = {(one.shard_key, one.shard_index) for one in fdq.replay("memory:routing", "t")}
        assert found == {(key, hashed % shards) for key, hashed in VECTORS.items()}


def test_messages_without_a_key_rotate_by_batch() -> None:
    with open_bus("memory:routing") as bus, fdq.Producer("memory:routing") as producer:
        bus.act("topic.create", topic="t", shards=4)
        for _ in range(8):
            producer.produce_batch("t", [(None, b"x")] * 3)
        by_batch: dict[int, set[int]] = {}
        for one in fdq.replay("memory:routing", "t"):
            by_batch.setdefault((one.id - 1) // 3, set()).add(one.shard)
        assert all(len(shards) == 1 for shards in by_batch.values())
        turns = [shards.pop() for _, shards in sorted(by_batch.items())]
        assert sorted(turns[:4]) == sorted(turns[4:]) == [0, 1, 2, 3]
