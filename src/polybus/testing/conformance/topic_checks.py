"""Checks of topics: create, configure, list, drop and create again."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

from polybus.errors import (
    AlreadyExists,
    DoesNotExist,
    InvalidTopic,
    LimitReached,
    Trimmed,
    UsageError,
)
from polybus.model.commit import Commit
from polybus.model.shard_routes import split_block
from polybus.model.topic import ALL, MAX_SHARDS, MAX_TOTAL_SHARDS, ShardBounds, Topic
from polybus.store.contract import Store
from polybus.testing.conformance.kit import (
    TIMEOUT_S,
    Engine,
    all_bodies,
    append,
    bodies,
    put,
    refused,
    stage,
)
from polybus.testing.conformance.sample_blocks import block


def check_topics_are_listed_by_name(engine: Engine) -> None:
    with engine.fresh() as store:
        assert store.topics() == []
        made = [store.create(name, 2, {"of": name}) for name in ("b", "ä", "a")]
        assert store.topics() == sorted(made, key=lambda topic: topic.name)
        assert [topic.name for topic in made] == ["b", "ä", "a"]
        assert all(topic.generations == (2,) for topic in made)
        assert made[0].settings == {"of": "b"}


def check_a_new_topic_is_empty(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 2, {})
        assert store.bounds(topic.number) == (1, 1, 0, (ShardBounds(0, 0, 0),) * 2)
        assert all_bodies(store, topic) == []


def check_a_topic_is_created_once(engine: Engine) -> None:
    with engine.fresh() as store:
        store.create("t", 1, {"first": True})
        with refused(AlreadyExists, store):
            store.create("t", 2, {})


def check_bad_names_are_refused(engine: Engine) -> None:
    with engine.fresh() as store:
        for name in ("", "_own", "a,b", "a*", "a\n", "x" * 256, "ä" * 128, "\udc80"):
            with refused(InvalidTopic, store):
                store.create(name, 1, {})
        assert store.create("ä" * 127 + "x", 1, {}).name == "ä" * 127 + "x"


def check_numbers_of_shards_have_limits(engine: Engine) -> None:
    with engine.fresh() as store:
        for shards in (0, -1, MAX_SHARDS + 1):
            with refused(UsageError, store):
                store.create("t", shards, {})
        topic = store.create("t", MAX_SHARDS, {})
        put(store, append(topic, MAX_SHARDS - 1, b"last"))
        for more in (-1, MAX_SHARDS + 1):
            with refused(UsageError):
                store.configure("t", {}, add_shards=more)
        assert store.topics() == [topic]


def check_settings_are_copied(engine: Engine) -> None:
    with engine.fresh() as store:
        inner: list[object] = [1, None, "x", 1.5, True, {"deep": []}]
        given = {"list": inner}
        store.create("t", 1, given)
        inner.append("later")
        assert store.topics()[0].settings == {"list": [1, None, "x", 1.5, True, {"deep": []}]}


def check_settings_must_be_json(engine: Engine) -> None:
    with engine.fresh() as store:
        store.create("there", 1, {})
        for bad in ({"x": b"bytes"}, {"x": math.nan}, {1: "number"}, {"x": {1, 2}}):
            with refused(UsageError, store):
                store.create("t", 1, bad)  # type: ignore[arg-type]
            with refused(UsageError, store):
                store.configure("there", bad)  # type: ignore[arg-type]


def check_configure_replaces_settings(engine: Engine) -> None:
    with engine.fresh() as store:
        before = store.create("t", 3, {"a": 1, "b": 2})
        after = store.configure("t", {"b": 3})
        assert after == Topic("t", before.number, (3,), {"b": 3})
        assert store.topics() == [after]


def check_configure_needs_an_existing_topic(engine: Engine) -> None:
    with engine.fresh() as store:
        with refused(DoesNotExist, store):
            store.configure("t", {})
        with refused(DoesNotExist, store):
            store.drop("t")


def check_added_shards_seal_the_others(engine: Engine) -> None:
    with engine.fresh() as store:
        old = store.create("t", 2, {})
        put(store, append(old, 0, b"a"), append(old, 1, b"b"))
        new = store.configure("t", {}, add_shards=3)
        assert (new.number, new.generations) == (old.number, (2, 3))
        done = put(store, append(new, 4, b"c"))
        assert done.spans == ((new.number, 4, 0, 3, 1),)
        assert all_bodies(store, new) == [b"a", b"b", b"c"]


def check_appends_to_sealed_shards_go_to_the_open_ones(engine: Engine) -> None:
    """Commits that were built before a reshard and are executed after it keep their order."""
    with engine.fresh() as store:
        old = store.create("t", 2, {})
        keys = [f"key-{number}" for number in range(8)]
        futures, resharded = [], old
        for turn in range(12):
            if turn == 5:
                resharded = store.configure("t", {}, add_shards=3)
            texts = [b"%d" % turn] * len(keys)
            # Every second commit is still built for the shards that are sealed.
            shards = old.open_shards if turn % 2 else resharded.open_shards
            appends = split_block(old.number, shards, block(*texts, keys=keys), turn)
            futures.append(store.commit(Commit(tuple(appends))))
        for future in futures:
            assert sum(span.count for span in future.result(TIMEOUT_S).spans) == len(keys)
        sealed = [bounds.end for bounds in store.bounds(old.number).shards[:2]]
        assert sum(sealed) == 5 * len(keys)
        for shard in resharded.open_shards:
            turns = [int(body) for body in bodies(store, resharded, shard)]
            assert turns == sorted(turns)


def check_a_reshard_takes_effect_between_two_commits(engine: Engine) -> None:
    """Commits that are submitted while another thread reshards are before it or after it."""
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        pending = [store.commit(Commit((append(topic, 0, b"%d" % n),))) for n in range(200)]
        with ThreadPoolExecutor(1) as pool:
            resharding = pool.submit(store.configure, "t", {}, add_shards=1)
            late = (append(topic, 0, b"%d" % n) for n in range(200, 600))
            pending += [store.commit(Commit((each,))) for each in late]
            topic = resharding.result(TIMEOUT_S)
        for future in pending:
            future.result(TIMEOUT_S)
        found = [int(body) for body in all_bodies(store, topic)]
        assert found == list(range(600))
        assert bodies(store, topic, 0) + bodies(store, topic, 1) == all_bodies(store, topic)


def check_shards_of_all_generations_are_limited(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", MAX_SHARDS, {})
        for _ in range(MAX_TOTAL_SHARDS // MAX_SHARDS - 1):
            topic = store.configure("t", {}, add_shards=MAX_SHARDS)
        assert len(topic.shards) == MAX_TOTAL_SHARDS
        with refused(LimitReached):
            store.configure("t", {}, add_shards=1)


def check_sealed_shards_are_kept_until_trimmed(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        put(store, append(topic, 0, b"a", b"b"))
        topic = store.configure("t", {}, add_shards=1)
        assert bodies(store, topic, 0) == [b"a", b"b"]
        assert store.find(topic.number, 0, 0) == 0
        store.trim(topic.number, {0: 1})
        assert bodies(store, topic, 0) == [b"b"]


def check_a_dropped_topic_is_gone(engine: Engine) -> None:
    with engine.fresh() as store:
        other, topic = store.create("other", 1, {}), store.create("t", 1, {})
        put(store, append(topic, 0, b"x"), append(other, 0, b"y"))
        store.drop("t")
        assert store.topics() == [other]
        _is_gone(store, topic)
        assert bodies(store, other) == [b"y"]


def _is_gone(store: Store, topic: Topic) -> None:
    for shard in (0, ALL):
        with refused(DoesNotExist):
            store.read(topic.number, shard, 1)
        with refused(DoesNotExist):
            store.find(topic.number, shard, 0)
    with refused(DoesNotExist):
        store.bounds(topic.number)
    with refused(DoesNotExist):
        store.trim(topic.number, {0: 1})
    with refused(DoesNotExist, store):
        put(store, append(topic, 0, b"x"))
    with refused(DoesNotExist):
        store.stage(store.open_stage(), [append(topic, 0, b"x")]).result(TIMEOUT_S)


def check_recreated_topic_has_another_number(engine: Engine) -> None:
    with engine.fresh() as store:
        topics = [_made_and_dropped(store, "t") for _ in range(3)]
        topics.append(store.create("t", 1, {}))
        assert len({topic.number for topic in topics}) == 4
        for old in topics[:3]:
            with refused(DoesNotExist, store):
                put(store, append(old, 0, b"x"))
        put(store, append(topics[3], 0, b"x"))


def _made_and_dropped(store: Store, name: str) -> Topic:
    topic = store.create(name, 1, {})
    store.drop(name)
    return topic


def check_recreated_topic_continues_ids_and_offsets(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 2, {})
        put(store, append(topic, 0, b"a", b"b"), append(topic, 1, b"c"))
        store.trim(topic.number, {0: 1})
        store.drop("t")
        topic = store.create("t", 2, {})
        assert store.bounds(topic.number) == (4, 4, 0, (ShardBounds(2, 2, 0), ShardBounds(1, 1, 0)))
        done = put(store, append(topic, 0, b"d"), append(topic, 1, b"e"))
        assert done.spans == ((topic.number, 0, 2, 4, 1), (topic.number, 1, 1, 5, 1))
        assert all_bodies(store, topic) == [b"d", b"e"]


def check_dropped_messages_count_as_trimmed(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        put(store, append(topic, 0, b"a", b"b"))
        store.drop("t")
        topic = store.create("t", 1, {})
        with refused(Trimmed):
            store.read(topic.number, 0, 0)
        assert store.read(topic.number, 0, 2).count == 0
        assert store.find(topic.number, 0, 0) == 2
        assert store.find(topic.number, ALL, 0) == 3


def check_offsets_outlive_an_incarnation_with_fewer_shards(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 3, {})
        put(store, append(topic, 2, b"a", b"b"), append(topic, 0, b"c"))
        store.drop("t")
        narrow = store.create("t", 1, {})
        put(store, append(narrow, 0, b"d"))
        store.drop("t")
        wide = store.create("t", 2, {})
        wide = store.configure("t", {}, add_shards=2)
        ends = [shard.end for shard in store.bounds(wide.number).shards]
        assert ends == [2, 0, 2, 0]
        assert put(store, append(wide, 2, b"e")).spans == ((wide.number, 2, 2, 5, 1),)


def check_dropping_keeps_stages_of_other_topics(engine: Engine) -> None:
    with engine.fresh() as store:
        topic, other = store.create("t", 1, {}), store.create("other", 1, {})
        both = stage(store, append(other, 0, b"a"), append(topic, 0, b"b"))
        one = stage(store, append(other, 0, b"c"))
        store.drop("t")
        store.create("t", 1, {})
        with refused(DoesNotExist, store):
            put(store, append(other, 0, b"d"), stages=[one, both])
        put(store, stages=[one])
        assert bodies(store, other) == [b"c"]
        store.discard(both)
