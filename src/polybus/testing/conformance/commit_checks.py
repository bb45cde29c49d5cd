"""Checks of commits: atomic, in order, from any thread."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from polybus.errors import Conflict, DoesNotExist, StageGone, TooLarge, UnknownProducer, UsageError
from polybus.model.block import Block
from polybus.model.commit import (
    MAX_APPENDS,
    MAX_COMMIT_KEYS,
    MAX_NOTE_BYTES,
    Append,
    Commit,
    CommitResult,
    RecordChange,
)
from polybus.model.stamp import Stamp
from polybus.model.topic import MAX_SHARDS, Topic
from polybus.store.contract import Store
from polybus.testing.conformance.kit import (
    TIMEOUT_S,
    Clock,
    Engine,
    all_bodies,
    all_messages,
    append,
    bodies,
    producer,
    put,
    refused,
    shard_messages,
    stage,
)
from polybus.testing.conformance.sample_blocks import block

THREADS = 8
COMMITS_OF_A_THREAD = 25


def check_ids_start_at_1_and_offsets_at_0(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        assert put(store, append(topic, 0, b"a", b"b")).spans == ((topic.number, 0, 0, 1, 2),)
        assert put(store, append(topic, 0, b"c")).spans == ((topic.number, 0, 2, 3, 1),)
        found = shard_messages(store, topic, 0)
        assert [(one.id, one.offset, one.body) for one in found] == [
            (1, 0, b"a"),
            (2, 1, b"b"),
            (3, 2, b"c"),
        ]


def check_messages_are_read_as_written(engine: Engine) -> None:
    pairs = (("a", b"1"), ("a", b""), ("", b"\xff"))
    sent: list[_Content] = [
        (-5, None, b"", None),
        (7, "kä", b"\0\xff", None),
        (0, "", b"x", ()),
        (1 << 60, None, b"y", pairs),
    ]
    with engine.fresh() as store:
        topic = store.create("t", 2, {})
        for each in sent:
            put(store, Append(topic.number, 0, _block([each])))
        put(store, Append(topic.number, 1, _block(sent)))
        for shard in (0, 1):
            assert [one[4:] for one in shard_messages(store, topic, shard)] == sent
        assert [one[4:] for one in all_messages(store, topic)] == sent + sent


_Content = tuple[int, str | None, bytes, tuple[tuple[str, bytes], ...] | None]


def _block(sent: list[_Content]) -> Block:
    times, keys, bodies, headers = zip(*sent, strict=True)
    without = set(keys) == {None}, set(headers) == {None}
    return block(
        *bodies,
        insertion_ms=times,
        keys=None if without[0] else keys,
        headers=None if without[1] else headers,
    )


def check_a_commit_over_topics_and_shards(engine: Engine) -> None:
    with engine.fresh() as store:
        first, second = store.create("t", 3, {}), store.create("u", 1, {})
        done = put(
            store,
            append(second, 0, b"u1"),
            append(first, 2, b"t2"),
            append(first, 0, b"t0", b"t0'"),
            append(second, 0, b"u2"),
            append(first, 2, b"t2'"),
        )
        assert done.spans == (
            (first.number, 0, 0, 1, 2),
            (first.number, 2, 0, 3, 2),
            (second.number, 0, 0, 1, 2),
        )
        assert all_bodies(store, first) == [b"t0", b"t0'", b"t2", b"t2'"]
        assert all_bodies(store, second) == [b"u1", b"u2"]


def check_empty_commit_succeeds(engine: Engine) -> None:
    clock = Clock(77)
    with engine.open(clock) as store:
        assert put(store, note=b"n") == CommitResult((), 77, (), b"n")


def check_failed_commit_changes_nothing(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 2, {})
        gone = topic.number + 1
        kept = stage(store, append(topic, 0, b"staged"))
        good = [append(topic, 0, b"a"), append(topic, 1, b"b")]
        change = RecordChange(b"k", b"v")
        with refused(DoesNotExist, store):
            put(store, *good, Append(gone, 0, block(b"x")), stages=[kept], changes=[change])
        for shard in (2, -1):
            with refused(UsageError, store):
                put(store, *good, append(topic, shard, b"x"), stages=[kept], changes=[change])
        with refused(StageGone, store):
            put(store, *good, stages=[kept, "none"], changes=[change])
        with refused(Conflict, store):
            put(store, *good, stages=[kept], changes=[change, RecordChange(b"l", b"", 5)])
        with refused(UnknownProducer, store):
            put(store, *good, stages=[kept], changes=[change], stamp=Stamp("unknown", 1, 1))
        assert put(store, *good, stages=[kept], changes=[change]).spans[0].first_id == 1
        assert bodies(store, topic, 0) == [b"a", b"staged"]


def check_errors_come_by_the_future(engine: Engine) -> None:
    with engine.fresh() as store:
        for commit in (Commit(note=b"x" * (MAX_NOTE_BYTES + 1)), Commit(stages=("none",))):
            future = store.commit(commit)
            assert future.exception(TIMEOUT_S) is not None
        assert isinstance(store.stage("none", []).exception(TIMEOUT_S), StageGone)


def check_commits_have_limits(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        one = append(topic, 0, b"x")
        assert put(store, note=b"n" * MAX_NOTE_BYTES).note == b"n" * MAX_NOTE_BYTES
        with refused(UsageError, store):
            put(store, note=b"n" * (MAX_NOTE_BYTES + 1))
        with refused(UsageError, store):
            put(store, *[one] * (MAX_APPENDS + 1))
        assert put(store, *[one] * MAX_APPENDS).spans == ((topic.number, 0, 0, 1, MAX_APPENDS),)
        assert len(bodies(store, topic)) == MAX_APPENDS


def check_commit_changes_a_bounded_number_of_keys(engine: Engine) -> None:
    """The limit counts shards, their topics, records and stages; every engine must reach it."""
    with engine.fresh() as store:
        topics = [store.create(name, MAX_SHARDS, {}) for name in ("a", "b")]
        wide = [append(topics[0], shard, b"x") for shard in range(MAX_SHARDS)]
        rest = MAX_COMMIT_KEYS - MAX_SHARDS - 1
        changes = [RecordChange(b"%d" % n, b"") for n in range(rest)]
        with refused(TooLarge, store):
            put(store, *wide, append(topics[1], 0, b"y"), changes=changes)
        assert len(put(store, *wide, changes=changes).spans) == MAX_SHARDS
        stage = store.open_stage()
        with refused(TooLarge):
            wider = wide + [append(topics[1], shard, b"x") for shard in range(MAX_SHARDS)]
            store.stage(stage, wider).result(TIMEOUT_S)


def check_time_never_decreases_within_a_topic(engine: Engine) -> None:
    clock = Clock(500)
    with engine.open(clock) as store:
        one, other = store.create("t", 2, {}), store.create("u", 1, {})
        assert put(store, append(one, 0, b"a")).timestamp_ns == 500
        clock.ns = 100
        assert put(store, append(other, 0, b"x")).timestamp_ns == 100
        assert put(store, append(one, 1, b"b")).timestamp_ns == 500
        assert put(store, append(other, 0, b"y"), append(one, 0, b"c")).timestamp_ns == 500
        clock.ns = 900
        assert put(store, append(one, 0, b"d")).timestamp_ns == 900
        times = [message.timestamp_ns for message in all_messages(store, one)]
        assert times == [500, 500, 500, 900]
        assert [one.timestamp_ns for one in all_messages(store, other)] == [100, 500]
        assert store.bounds(one.number).timestamp_ns == 900


def check_commits_of_one_thread_keep_their_order(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        names = [b"%d" % number for number in range(100)]
        futures = [store.commit(Commit((append(topic, 0, name),))) for name in names]
        spans = [future.result(TIMEOUT_S).spans[0] for future in futures]
        assert [span.first_offset for span in spans] == list(range(100))
        assert [span.first_id for span in spans] == list(range(1, 101))
        assert bodies(store, topic) == names


def check_requests_take_effect_in_order_of_submission(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        futures = [store.commit(Commit((append(topic, 0, b"x"),))) for _ in range(20)]
        store.drop("t")
        assert [future.result(TIMEOUT_S).spans[0].first_id for future in futures][-1] == 20
        assert store.bounds(store.create("t", 1, {}).number).next_id == 21


def check_many_threads_commit_at_once(engine: Engine) -> None:
    with engine.fresh() as store, ThreadPoolExecutor(THREADS) as pool:
        topic = store.create("t", 3, {})
        list(pool.map(lambda number: _produce(store, topic, number), range(THREADS)))
        found = all_messages(store, topic)
        assert [message.id for message in found] == list(range(1, len(found) + 1))
        for number in range(THREADS):
            mine = [one.body for one in found if one.body.startswith(b"%d:" % number)]
            wanted = [b"%d:%03d" % (number, counter) for counter in range(COMMITS_OF_A_THREAD)]
            assert sorted(mine) == wanted
            of_shard = [one.body for one in found if one.shard == 0 and one.body in mine]
            assert of_shard == sorted(of_shard)


def _produce(store: Store, topic: Topic, number: int) -> None:
    futures: list[Future[CommitResult]] = []
    for counter in range(COMMITS_OF_A_THREAD):
        body = b"%d:%03d" % (number, counter)
        futures.append(store.commit(Commit((append(topic, counter % 3, body),))))
    for future in futures:
        assert future.result(TIMEOUT_S).spans[0].count == 1


def check_cancelled_commit_is_not_executed(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        names = [b"%d" % number for number in range(200)]
        futures = [store.commit(Commit((append(topic, 0, name),))) for name in names]
        cancelled = [future.cancel() for future in reversed(futures)][::-1]
        put(store, append(topic, 0, b"end"))
        done = [name for name, gone in zip(names, cancelled, strict=True) if not gone]
        assert bodies(store, topic) == [*done, b"end"]


def check_refused_commit_does_not_affect_others(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        bad, good = Commit((append(topic, 9, b"x"),)), Commit((append(topic, 0, b"y"),))
        stale = Commit((append(topic, 0, b"x"),), changes=(RecordChange(b"k", b"", 9),))
        futures = [store.commit(each) for _ in range(20) for each in (good, bad, stale)]
        errors = [type(future.exception(TIMEOUT_S)) for future in futures]
        assert errors == [type(None), UsageError, Conflict] * 20
        assert [future.result().spans[0].first_id for future in futures[::3]] == list(range(1, 21))
        assert bodies(store, topic) == [b"y"] * 20


def check_many_commits_are_submitted_at_once(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        stamp = producer(store)
        good = [Commit((append(topic, 0, b"%d" % n),), stamp=stamp(n)) for n in (1, 2, 2, 3)]
        done = [one.result(TIMEOUT_S) for one in store.commit_all(good)]
        assert [one.spans[0].first_id for one in done] == [1, 2, 2, 3]
        assert [one.duplicate for one in done] == [False, False, True, False]
        assert store.commit_all([]) == []


def check_one_of_many_commits_may_fail_alone(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        bad = Commit((append(topic, 7, b"x"),))
        long = Commit(note=bytes(MAX_NOTE_BYTES + 1))
        good = Commit((append(topic, 0, b"a"),))
        told = [one.exception(TIMEOUT_S) for one in store.commit_all([good, bad, long, good])]
        assert [type(one) for one in (told[0], told[3])] == [type(None), type(None)]
        assert isinstance(told[1], UsageError)
        assert isinstance(told[2], UsageError)
        assert bodies(store, topic, 0) == [b"a", b"a"]
