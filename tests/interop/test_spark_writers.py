"""The writers of the sink with a running bus, called as Spark calls them, without Spark.

The steps of several processes run as a sequence here, so that any order that Spark may choose can
be tested.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pyarrow as pa
import pytest

from polybus.errors import Conflict, DoesNotExist, InvalidTopic, StageGone, TooLarge, UsageError
from polybus.native import Client
from polybus.spark.sink import sink_writers
from polybus.spark.sink.sink_writers import MAX_STAGES, BatchWriter, SinkOptions, StreamWriter
from polybus.spark.sink.task_stage import StagedRows, TaskStage
from tests.rig.native_bus import NativeBus
from tests.rig.observer import until

_numbers = count()


@pytest.fixture(scope="module")
def bus() -> Iterator[NativeBus]:
    with NativeBus() as bus:
        yield bus
        for client in sink_writers._clients.values():
            client.close()
        sink_writers._clients.clear()


@pytest.fixture
def client(bus: NativeBus) -> Iterator[Client]:
    with bus.client() as client:
        yield client


@pytest.fixture
def settings(bus: NativeBus) -> SinkOptions:
    return SinkOptions(bus.url, f"t{next(_numbers)}", None, None, "refuse")


def rows(*bodies: bytes, **more: list[object]) -> pa.RecordBatch:
    return pa.record_batch({"body": list(bodies), **more})


def published(client: Client, topic: str | None) -> list[bytes]:
    assert topic is not None
    try:
        return [b for batch in client.read(topic) for b in batch.column("body").to_pylist()]
    except DoesNotExist:
        return []


@pytest.fixture
def query() -> str:
    return f"q{next(_numbers)}"


def of_query(message: StagedRows, query: str) -> StagedRows:
    return replace(message, query=query)


# --- tasks


def test_rows_are_invisible_before_the_commit(client, settings):
    writer = BatchWriter(settings)
    messages = [writer.write(iter([rows(b"a"), rows(b"b")])), writer.write(iter([rows(b"c")]))]
    assert [message.rows for message in messages] == [2, 1]
    assert published(client, settings.topic) == []
    pickle.loads(pickle.dumps(writer)).commit(pickle.loads(pickle.dumps(messages)))
    assert sorted(published(client, settings.topic)) == [b"a", b"b", b"c"]


def test_aborted_rows_are_discarded(client, settings):
    writer = BatchWriter(settings)
    message = writer.write(iter([rows(b"a")]))
    writer.abort([message, None])
    with pytest.raises(StageGone, match="nothing was published"):
        writer.commit([message])
    assert published(client, settings.topic) == []


def test_abort_after_the_commit_has_no_effect(client, settings):
    writer = BatchWriter(settings)
    message = writer.write(iter([rows(b"a")]))
    writer.commit([message])
    writer.abort([message])
    assert published(client, settings.topic) == [b"a"]


def test_retried_task_has_a_new_stage(client, settings):
    writer = BatchWriter(settings)
    first, second = (writer.write(iter([rows(b"a")])) for _ in range(2))
    assert first.stage != second.stage
    writer.commit([second])
    assert published(client, settings.topic) == [b"a"]


def test_failed_task_discards_its_stage(client, settings, monkeypatch):
    opened = []
    real = Client.stage

    def note(self: Client, lease_s: float = 600.0):
        stage = real(self, lease_s)
        opened.append(stage.name)
        return stage

    monkeypatch.setattr(Client, "stage", note)

    def broken() -> Iterator[pa.RecordBatch]:
        yield rows(b"a")
        raise RuntimeError("the query has failed")

    with pytest.raises(RuntimeError):
        BatchWriter(settings).write(broken())
    (stage,) = opened
    with pytest.raises(StageGone):
        client.act("stage.renew", stage=stage)


def test_incomplete_rows_are_never_published(client, settings, query):
    """Another task fails: Spark gets both messages, or one, and aborts."""
    writer = StreamWriter(settings)
    early = of_query(writer.write(iter([rows(b"a")])), query)  # b"b" never arrives
    writer.abort([early, None], 3)
    whole = of_query(writer.write(iter([rows(b"a"), rows(b"b")])), query)
    writer.commit([whole], 3)
    assert sorted(published(client, settings.topic)) == [b"a", b"b"]


def test_task_without_rows_opens_no_stage(client, settings, query):
    writer = StreamWriter(settings)
    message = writer.write(iter([rows(b"a")[:0]]))
    assert message.stage is None
    writer.commit([message], 0)
    writer.commit([], 1)
    assert published(client, settings.topic) == []


# --- errors


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (pa.record_batch({"body": [b"a", None]}), UsageError),
        (rows(b"a", topic=["_mine"]), InvalidTopic),
        (rows(b"a", topic=["x" * 300]), InvalidTopic),
    ],
)
def test_permanent_error_is_raised_by_the_driver(client, settings, given, error):
    writer = BatchWriter(settings)
    good = writer.write(iter([rows(b"good")]))
    bad = writer.write(iter([rows(b"before"), given]))
    assert bad.stage is None
    with pytest.raises(error):
        writer.commit([good, bad])
    writer.abort([good, bad])
    assert published(client, settings.topic) == []


def test_too_many_tasks_for_one_publish(settings):
    many = [StagedRows(f"{n:016x}", None) for n in range(MAX_STAGES + 1)]
    with pytest.raises(TooLarge, match=r"coalesce\(890\)"):
        BatchWriter(settings).commit(many)


def test_most_tasks_of_one_publish(client, settings, query):
    full = BatchWriter(settings).write(iter([rows(b"a")])).stage
    empty = [client.act("stage.new")["stage"] for _ in range(MAX_STAGES - 1)]
    messages = [StagedRows(stage, query) for stage in (full, *empty)]
    StreamWriter(settings).commit(messages, 0)
    assert published(client, settings.topic) == [b"a"]


# --- epochs


def test_replayed_epoch_with_other_partitions_is_published_once(client, settings, query):
    writer = StreamWriter(settings)
    for parts in ([[b"a", b"b"]], [[b"a"], [b"b"]], [[b"b"], [], [b"a"]]):
        messages = [
            of_query(writer.write(iter([rows(*bodies)]) if bodies else iter(())), query)
            for bodies in parts
        ]
        writer.commit(messages, 0)
    assert sorted(published(client, settings.topic)) == [b"a", b"b"]


def test_stages_of_a_replayed_epoch_are_discarded(client, settings, query):
    writer = StreamWriter(settings)
    writer.commit([of_query(writer.write(iter([rows(b"a")])), query)], 0)
    again = of_query(writer.write(iter([rows(b"a")])), query)
    writer.commit([again], 0)
    with pytest.raises(StageGone):
        client.act("stage.renew", stage=again.stage)


def test_epoch_over_several_topics_is_atomic(client, settings, query):
    other = f"{settings.topic}.other"
    writer = StreamWriter(settings)
    mixed = rows(b"a", b"b", topic=[other, settings.topic])
    message = of_query(writer.write(iter([mixed])), query)
    assert published(client, other) == published(client, settings.topic) == []
    writer.commit([message], 0)
    assert (published(client, other), published(client, settings.topic)) == ([b"a"], [b"b"])


def test_lost_stage_fails_the_epoch_without_effect(client, settings, query):
    writer = StreamWriter(settings)
    kept, lost = (of_query(writer.write(iter([rows(b"a")])), query) for _ in range(2))
    client.act("stage.discard", stage=lost.stage)
    with pytest.raises(StageGone, match="write it again"):
        writer.commit([kept, lost], 0)
    assert published(client, settings.topic) == []
    writer.commit([of_query(writer.write(iter([rows(b"a")])), query)], 0)
    assert published(client, settings.topic) == [b"a"]


def test_other_query_with_the_same_producer_is_refused(client, settings):
    named = replace(settings, producer=settings.topic)
    writer = StreamWriter(named)
    writer.commit([of_query(writer.write(iter([rows(b"a")])), "first")], 0)
    for epoch in (0, 1):
        with pytest.raises(Conflict, match="set onNewCheckpoint=continue"):
            writer.commit([of_query(writer.write(iter([rows(b"b")])), "second")], epoch)
    writer = StreamWriter(replace(named, on_new="continue"))
    writer.commit([of_query(writer.write(iter([rows(b"b")])), "second")], 0)
    assert published(client, settings.topic) == [b"a", b"b"]


def test_epoch_without_a_query_is_refused(settings, query):
    writer = StreamWriter(settings)
    with pytest.raises(UsageError, match="queries"):
        writer.commit([writer.write(iter([rows(b"a")]))], 0)


def test_transactions_of_different_producers_are_independent(client, settings):
    for producer in (None, "p", "p", "q"):
        one = replace(settings, transaction=f"{settings.topic}.tx", producer=producer)
        writer = BatchWriter(one)
        writer.commit([writer.write(iter([rows(b"a")]))])
    assert published(client, settings.topic) == [b"a"] * 3


# --- long tasks


class staging_of:  # noqa: N801  # reads as a phrase
    def __init__(self, client: Client, lease_s: float = 600.0) -> None:
        self.staging = TaskStage(client, lease_s=lease_s)

    def __enter__(self) -> TaskStage:
        return self.staging

    def __exit__(self, *_: object) -> None:
        self.staging.discard()


def _port_rows(*bodies: bytes) -> pa.RecordBatch:
    return pa.record_batch(
        {"shard_key": pa.nulls(len(bodies), pa.utf8()), "body": pa.array(bodies, pa.binary())}
    )


def test_lease_is_renewed_until_the_task_ends(client, settings, monkeypatch):
    renewals = count()
    real = Client.act

    def fail_to_renew(self: Client, action: str, **fields: object):
        """Count renewals and let each fail: the next one must be tried."""
        if action != "stage.renew":
            return real(self, action, **fields)
        next(renewals)
        raise StageGone("gone")

    monkeypatch.setattr(Client, "act", fail_to_renew)
    with staging_of(client, lease_s=0.03) as staging:
        staging.put(str(settings.topic), _port_rows(b"a"))
        until(lambda: next(renewals) > 10, "renewals")
    assert staging._renewer is not None
    assert not staging._renewer.is_alive()


def test_task_outlives_its_first_lease(client, settings):
    """The stage must outlive its lease by renewal; another one without renewal expires."""
    lease_s = 2.0  # a renewal may be late by most of it on a loaded machine
    abandoned = client.stage(lease_s)
    with staging_of(client, lease_s) as staging:
        staging.put(str(settings.topic), _port_rows(b"a"))
        until(lambda: _is_gone(client, abandoned.name), "the end of a lease")
        staging.put(str(settings.topic), _port_rows(b"b"))
        assert staging._stage is not None
        # the rest of the test may take a while
        client.act("stage.renew", stage=staging._stage.name)
        client.publish([str(staging.finish())])
    assert sorted(published(client, settings.topic)) == [b"a", b"b"]


def _is_gone(client: Client, stage: str) -> bool:
    """Return whether the stage has expired, by a publish that fails. A renewal would keep it."""
    try:
        client.publish([stage, "0" * 16])
    except StageGone as error:
        return stage in str(error)
    raise AssertionError("a stage that never was has been published")


def test_stage_with_many_batches_and_topics(client, settings):
    names = [f"{settings.topic}.{n}" for n in range(40)]
    with staging_of(client) as staging:
        for turn in range(3):
            for name in names:
                staging.put(name, _port_rows(b"%d" % turn))
        stage = staging.finish()
        assert stage is not None
        client.publish([stage])
    for name in names:
        assert sorted(published(client, name)) == [b"0", b"1", b"2"]
