"""Checks of stages: invisible until published, and published once."""

from __future__ import annotations

import math

from polybus.errors import Conflict, DoesNotExist, ShardSealed, StageGone, UsageError
from polybus.model.commit import MAX_APPENDS, Append, RecordChange
from polybus.model.shard_routes import split_block
from polybus.store.contract import Store
from polybus.testing.conformance.kit import (
    TIMEOUT_S,
    Clock,
    Engine,
    all_bodies,
    all_messages,
    append,
    bodies,
    contents,
    put,
    refused,
    stage,
)
from polybus.testing.conformance.sample_blocks import block


def check_staged_blocks_are_invisible(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        put(store, append(topic, 0, b"a"))
        before = contents(store)
        name = stage(store, append(topic, 0, b"b"))
        assert contents(store) == before
        put(store, append(topic, 0, b"c"))
        put(store, stages=[name])
        assert bodies(store, topic) == [b"a", b"c", b"b"]


def check_publishing_returns_spans_like_appending(engine: Engine) -> None:
    clock = Clock(500)
    with engine.open(clock) as store:
        topic, other = store.create("t", 2, {}), store.create("u", 1, {})
        name = stage(store, append(topic, 1, b"a", b"b"), append(other, 0, b"x"))
        clock.ns = 700
        done = put(store, stages=[name])
        assert done.spans == ((topic.number, 1, 0, 1, 2), (other.number, 0, 0, 1, 1))
        assert done.timestamp_ns == 700
        assert [one.timestamp_ns for one in all_messages(store, topic)] == [700, 700]


def check_a_shard_gets_appends_then_stages_in_order(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 2, {})
        first = stage(store, append(topic, 0, b"s1"), append(topic, 1, b"s1 of 1"))
        store.stage(first, [append(topic, 0, b"s1'")]).result(TIMEOUT_S)
        second = stage(store, append(topic, 0, b"s2"))
        done = put(store, append(topic, 0, b"a"), stages=[second, first])
        assert done.spans == ((topic.number, 0, 0, 1, 4), (topic.number, 1, 0, 5, 1))
        assert all_bodies(store, topic) == [b"a", b"s2", b"s1", b"s1'", b"s1 of 1"]


def check_published_stages_are_read_like_appends(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        name = stage(store, *(append(topic, 0, b"%d" % n, b"%d'" % n) for n in range(5)))
        put(store, append(topic, 0, b"a"))
        put(store, stages=[name])
        put(store, append(topic, 0, b"z"))
        found = [m.body for m in all_messages(store, topic)]
        assert found == [b"a", *(x for n in range(5) for x in (b"%d" % n, b"%d'" % n)), b"z"]
        store.trim(topic.number, {0: 6})
        assert all_bodies(store, topic) == found[6:]
        assert store.find(topic.number, 0, 0) == 6


def check_a_stage_is_published_once(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        name = stage(store, append(topic, 0, b"a"))
        with refused(UsageError, store):
            put(store, stages=[name, name])
        put(store, stages=[name])
        _is_gone(store, name, append(topic, 0, b"x"))
        assert bodies(store, topic) == [b"a"]


def check_topics_of_stages(engine: Engine) -> None:
    with engine.fresh() as store:
        first, second, third = (store.create(name, 2, {}) for name in ("t", "u", "v"))
        one = stage(store, append(first, 0, b"a"), append(first, 1, b"b"), append(second, 0, b"c"))
        other, empty = stage(store, append(third, 1, b"d")), store.open_stage()
        assert store.staged_topics([one, empty]) == {first.number, second.number}
        assert store.staged_topics([other, one]) == {first.number, second.number, third.number}
        store.discard(other)
        put(store, stages=[one])
        assert store.staged_topics([one, other, empty, "never there"]) == frozenset()
        assert store.staged_topics([]) == frozenset()


def check_a_discarded_stage_is_gone(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        name = stage(store, append(topic, 0, b"a"))
        store.discard(name)
        _is_gone(store, name, append(topic, 0, b"x"))
        store.discard(name)
        store.discard("never there")


def check_a_stage_without_lease_is_gone(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        _is_gone(store, store.open_stage(0), append(topic, 0, b"x"))
        name = stage(store, append(topic, 0, b"a"))
        store.renew(name)
        store.renew(name, 0)
        _is_gone(store, name, append(topic, 0, b"x"))


def _is_gone(store: Store, name: str, one: Append) -> None:
    with refused(StageGone, store):
        put(store, one, stages=[name])
    with refused(StageGone):
        store.stage(name, [one]).result(TIMEOUT_S)
    with refused(StageGone):
        store.renew(name)


def check_invalid_leases_are_refused(engine: Engine) -> None:
    with engine.fresh() as store:
        name = store.open_stage()
        for lease_s in (-1.0, math.nan, math.inf):
            with refused(UsageError):
                store.open_stage(lease_s)
            with refused(UsageError):
                store.renew(name, lease_s)
        put(store, stages=[name])


def check_empty_stage_is_published(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        empty, full = store.open_stage(), stage(store, append(topic, 0, b"a"))
        store.stage(empty, []).result(TIMEOUT_S)
        assert put(store, stages=[empty, full]).spans == ((topic.number, 0, 0, 1, 1),)
        with refused(StageGone):
            put(store, stages=[empty])


def check_stages_have_unique_names(engine: Engine) -> None:
    with engine.fresh() as store:
        assert len({store.open_stage() for _ in range(20)}) == 20


def check_blocks_are_staged_for_known_shards(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        topic = store.configure("t", {}, add_shards=1)
        name = store.open_stage()
        other = append(topic, 1, b"y")
        for error, bad in (
            (DoesNotExist, Append(topic.number + 1, 0, block(b"x"))),
            (UsageError, append(topic, 2, b"x")),
            (UsageError, append(topic, -1, b"x")),
        ):
            with refused(error):
                store.stage(name, [other, bad]).result(TIMEOUT_S)
        put(store, stages=[name])
        assert all_bodies(store, topic) == []


def check_stage_for_a_sealed_shard_is_rerouted(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        name = stage(store, append(topic, 0, b"a"))
        topic = store.configure("t", {}, add_shards=1)
        fresh = stage(store, append(topic, 1, b"b"))
        with refused(ShardSealed, store):
            put(store, append(topic, 1, b"c"), stages=[fresh, name])
        reroute(store, name)
        put(store, append(topic, 1, b"c"), stages=[fresh, name])
        assert bodies(store, topic, 1) == [b"c", b"b", b"a"]
        with refused(StageGone, store):
            store.reroute_stage(name)


def check_staged_messages_keep_their_order_per_key(engine: Engine) -> None:
    """Blocks are staged before and after each of two reshards, and rerouted in between."""
    with engine.fresh() as store:
        topic = store.create("t", 2, {})
        name = store.open_stage()
        wanted: dict[str, list[bytes]] = {}
        for turn in range(12):
            if turn in (4, 8):
                topic = store.configure("t", {}, add_shards=turn + 1)
            if turn == 6:
                store.reroute_stage(name)
            keys = [f"key-{number % 7}" for number in range(21)]
            texts = [b"%d-%d" % (turn, number) for number in range(21)]
            for key, text in zip(keys, texts, strict=True):
                wanted.setdefault(key, []).append(text)
            appends = split_block(topic.number, topic.open_shards, block(*texts, keys=keys), 0)
            store.stage(name, appends).result(TIMEOUT_S)
        reroute(store, name)
        put(store, stages=[name])
        for key, texts in wanted.items():
            ((index, _),) = block(b"x", keys=[key]).split(len(topic.open_shards), 0)
            found = bodies(store, topic, topic.open_shards[index])
            assert [text for text in found if text in texts] == texts


def reroute(store: Store, stage: str) -> None:
    while store.reroute_stage(stage):
        pass


def check_a_refused_commit_keeps_its_stages(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        name = stage(store, append(topic, 0, b"a"))
        with refused(Conflict, store):
            put(store, stages=[name], changes=[RecordChange(b"k", b"", 3)])
        store.renew(name)
        store.stage(name, [append(topic, 0, b"b")]).result(TIMEOUT_S)
        put(store, stages=[name])
        assert bodies(store, topic) == [b"a", b"b"]


def check_staging_has_limits(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        name, one = store.open_stage(), append(topic, 0, b"x")
        with refused(UsageError):
            store.stage(name, [one] * (MAX_APPENDS + 1)).result(TIMEOUT_S)
        store.stage(name, [one, one]).result(TIMEOUT_S)
        put(store, stages=[name])
        assert bodies(store, topic) == [b"x", b"x"]
