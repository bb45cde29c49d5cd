"""Checks of reads: any range of a shard or of a topic, within limits."""

from __future__ import annotations

from polybus.errors import DoesNotExist, Trimmed, UsageError
from polybus.model.topic import ALL, All, Topic
from polybus.store.contract import ShardRange, Store
from polybus.testing.conformance.kit import Engine, all_messages, append, put, refused
from polybus.testing.conformance.sample_blocks import messages

COUNT = 12  # messages in `_filled`: "0" … "11" over two shards, in blocks of three


def _filled(store: Store) -> Topic:
    """Put ids 1…12: shard 0 has 0 1 2, 6 7 8, shard 1 has 3 4 5, 9 10 11."""
    topic = store.create("t", 2, {})
    for first in range(0, COUNT, 3):
        names = [b"%d" % number for number in range(first, first + 3)]
        put(store, append(topic, first // 3 % 2, *names))
    return topic


def _read(
    store: Store, topic: Topic, shard: int | All, start: int, end: int | None = None
) -> list[int]:
    """Return all messages from `start` to `end`, in as many reads as it takes."""
    found = list[int]()
    while rows := messages(store.read(topic.number, shard, start, end)):
        found += [int(message.body) for message in rows]
        start = (rows[-1].id if shard == ALL else rows[-1].offset) + 1
    return found


def check_every_range_of_a_shard(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _filled(store)
        there = [3, 4, 5, 9, 10, 11]
        for start in range(8):
            assert _read(store, topic, 1, start) == there[start:]
            for end in range(9):
                assert _read(store, topic, 1, start, end) == there[start:end]


def check_ends(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _filled(store)
        put(store, append(topic, 1, b"12"))
        number = topic.number
        assert [store.end(number, shard) for shard in (0, 1, ALL)] == [6, 7, 14]
        store.trim(number, {0: 6})
        assert [store.end(number, shard) for shard in (0, 1, ALL)] == [6, 7, 14]
        assert store.end(store.create("empty", 1, {}).number, ALL) == 1
        with refused(UsageError, store):
            store.end(number, 2)
        store.drop("t")
        with refused(DoesNotExist, store):
            store.end(number, ALL)


def check_parts_of_several_shards(engine: Engine) -> None:
    """Return all messages of the parts, in order, in as many reads as it takes."""
    with engine.fresh() as store:
        topic = _filled(store)
        wanted = {1: (1, 5, 9), 0: (0, 4, 2)}
        found: dict[int, list[int]] = {0: [], 1: []}
        while True:
            parts = [
                ShardRange(shard, at[0] + len(found[shard]), *at[1:])
                for shard, at in wanted.items()
            ]
            rows = messages(store.read_parts(topic.number, parts))
            if not rows:
                break
            assert [one.shard for one in rows] == sorted((one.shard for one in rows), reverse=True)
            assert sum(one.shard == 0 for one in rows) <= 2
            for one in rows:
                found[one.shard].append(int(one.body))
        assert found == {0: [0, 1, 2, 6], 1: [4, 5, 9, 10]}


def check_limits_of_parts(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _filled(store)
        parts = [ShardRange(1, 0, 6, 6), ShardRange(0, 0, 6, 6)]
        assert 1 <= store.read_parts(topic.number, parts, max_rows=4).count <= 4
        assert store.read_parts(topic.number, parts, max_bytes=1).count == 1
        assert store.read_parts(topic.number, []).count == 0
        assert (
            store.read_parts(topic.number, [ShardRange(0, 4, 4, 1), ShardRange(1, 9, 99, 1)]).count
            == 0
        )
        for wrong in (
            ShardRange(2, 0, 1, 1),
            ShardRange(0, -1, 1, 1),
            ShardRange(0, 0, -1, 1),
            ShardRange(0, 0, 1, 0),
        ):
            with refused(UsageError, store):
                store.read_parts(topic.number, [wrong])
        with refused(DoesNotExist):
            store.read_parts(topic.number + 1, [ShardRange(0, 0, 1, 1)])
        store.trim(topic.number, {0: 2})
        with refused(Trimmed):
            store.read_parts(topic.number, [ShardRange(1, 0, 6, 6), ShardRange(0, 1, 6, 6)])


def check_every_range_of_a_topic(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _filled(store)
        for start in range(15):
            assert _read(store, topic, ALL, start) == list(range(max(start - 1, 0), COUNT))
            for end in range(16):
                ids = range(max(start, 1), min(end, COUNT + 1))
                assert _read(store, topic, ALL, start, end) == [one - 1 for one in ids]


def check_rows_have_their_positions(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _filled(store)
        found = [(one.id, one.shard, one.offset, one.body) for one in all_messages(store, topic)]
        offsets = [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]
        shards = [0, 0, 0, 1, 1, 1] * 2
        assert found == [(n + 1, shards[n], offsets[n], b"%d" % n) for n in range(COUNT)]


def check_rows_are_bounded(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _filled(store)
        places: list[tuple[int | All, int]] = [(0, 0), (0, 2), (1, 5), (ALL, 0), (ALL, 5)]
        for shard, start in places:
            whole = messages(store.read(topic.number, shard, start))
            for max_rows in range(1, 14):
                part = messages(store.read(topic.number, shard, start, max_rows=max_rows))
                assert 1 <= len(part) <= max_rows
                assert part == whole[: len(part)]


def check_bytes_are_bounded(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 2, {})
        for number in range(6):
            put(store, append(topic, number % 2, b"x" * 100, b"y" * 100))
        for shard in (0, ALL):
            for max_bytes in (1, 99, 100, 199, 200, 450, 5000):
                rows = store.read(topic.number, shard, 0, max_bytes=max_bytes)
                assert rows.count >= 1
                assert rows.count == 1 or rows.size_bytes <= max_bytes


def check_read_returns_at_least_one_row(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        put(store, append(topic, 0, b"small", b"x" * 100_000, b"small"))
        places: list[tuple[int | All, int]] = [(0, 1), (ALL, 2)]
        for shard, start in places:
            rows = store.read(topic.number, shard, start, max_bytes=10)
            assert [len(message.body) for message in messages(rows)] == [100_000]


def check_read_after_the_end_is_empty(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _filled(store)
        for shard in (0, ALL):
            for start, end in ((COUNT + 1, None), (10**15, None), (10**15, 10**16), (5, 5), (5, 2)):
                rows = store.read(topic.number, shard, start, end)
                assert (rows.count, messages(rows)) == (0, [])


def check_invalid_limits_of_a_read_are_refused(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _filled(store).number
        for shard in (0, ALL):
            for bad in (0, -1):
                with refused(UsageError):
                    store.read(topic, shard, 0, max_rows=bad)
                with refused(UsageError):
                    store.read(topic, shard, 0, max_bytes=bad)
            for start, end in ((-1, None), (1 << 63, None), (0, -1), (0, 1 << 63)):
                with refused(UsageError):
                    store.read(topic, shard, start, end)
            assert store.read(topic, shard, 1, max_rows=10**12, max_bytes=10**15).count >= 1
            assert store.read(topic, shard, 1, (1 << 63) - 1).count >= 1


def check_unknown_shards_and_topics_are_refused(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _filled(store).number
        for shard in (2, -1, 4096):
            with refused(UsageError):
                store.read(topic, shard, 0)
        for number in (topic + 1, 0, -1):
            with refused(DoesNotExist):
                store.read(number, 0, 0)
            with refused(DoesNotExist):
                store.bounds(number)


def check_bounds_follow_the_messages(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 2, {})
        put(store, append(topic, 1, b"x" * 1000, b"y" * 1000))
        first = store.bounds(topic.number)
        assert (first.first_id, first.next_id) == (1, 3)
        assert first.shards[0] == (0, 0, 0)
        assert first.shards[1][:2] == (0, 2)
        assert first.shards[1].size_bytes >= 2000
        put(store, append(topic, 0, b"z"))
        second = store.bounds(topic.number)
        assert (second.first_id, second.next_id) == (1, 4)
        assert second.shards[0].size_bytes >= 1
        assert second.shards[1] == first.shards[1]


def check_rows_do_not_change_after_the_read(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _filled(store)
        rows = store.read(topic.number, ALL, 1, max_rows=5)
        before = messages(rows)
        store.drop("t")
        other = store.create("other", 1, {})
        for _ in range(20):
            put(store, append(other, 0, b"z" * 4096))
        store.close()
        assert messages(rows) == before


def check_many_small_blocks_are_read(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 2, {})
        futures = [put(store, append(topic, number % 2, b"%d" % number)) for number in range(300)]
        assert len(futures) == 300
        assert _read(store, topic, ALL, 0) == list(range(300))
        assert _read(store, topic, 1, 17, 99) == list(range(35, 199, 2))
