"""Runs of queries: which run may publish as a producer, and which publish is a repeat."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from polybus.bus.shares import unshared_table
from polybus.durable.topic_registry import DurableTopics
from polybus.errors import Conflict, Denied, Fenced, MalformedRequest, StageGone, Stale, Unavailable
from polybus.model.commit import Commit, CommitResult
from polybus.model.identity import Identity
from polybus.model.stamp import ProducerOptions
from polybus.native.port import query_runs
from polybus.native.port.producer_registry import ProducerRegistry
from polybus.native.port.query_runs import CONTINUE, PREFIX, RunCommit, publish
from polybus.store.engine_registry import open_store
from polybus.testing.conformance import kit

ALICE, BOB = Identity(uid=4242), Identity(uid=4343)


class Sink:
    """One topic, and the bodies that runs publish into it."""

    def __init__(self, durable: DurableTopics) -> None:
        self.durable = durable
        self.owners = ProducerRegistry(
            durable.store, time.monotonic, time.time_ns, unshared_table("max_producers", 1000)
        )
        self.topic = durable.store.create("t", 1, {})
        durable.register(self.topic)

    def stage(self, body: bytes) -> str:
        return kit.stage(self.durable.store, kit.append(self.topic, 0, body))

    def publish(
        self,
        run: str,
        counter: int,
        body: bytes,
        *,
        on_new: str = query_runs.REFUSE,
        caller: Identity = ALICE,
    ) -> CommitResult:
        stages = (self.stage(body),)
        return publish(
            self.durable, self.owners, caller, RunCommit("p", counter, run, on_new, stages)
        )

    @property
    def bodies(self) -> list[bytes]:
        return kit.all_bodies(self.durable.store, self.topic)


@pytest.fixture
def sink() -> Iterator[Sink]:
    with open_store("memory:") as store:
        yield Sink(DurableTopics(store))


def test_replayed_epoch_publishes_nothing(sink):
    assert not sink.publish("q", 1, b"a").duplicate
    assert not sink.publish("q", 2, b"b").duplicate
    again = sink.publish("q", 2, b"b again")
    assert again.duplicate
    assert [span.count for span in again.spans] == [1]
    assert sink.publish("q", 1, b"a again").duplicate
    assert sink.bodies == [b"a", b"b"]


def test_counters_may_leave_gaps_and_need_not_begin_at_one(sink):
    for counter in (7, 8, 20):
        sink.publish("q", counter, b"%d" % counter)
    assert sink.bodies == [b"7", b"8", b"20"]


def test_epoch_beyond_kept_results_is_stale(sink):
    for counter in range(1, 20):
        sink.publish("q", counter, b"x")
    with pytest.raises(Stale):
        sink.publish("q", 1, b"y")
    assert sink.bodies == [b"x"] * 19


def test_new_query_is_refused_with_advice(sink):
    sink.publish("first", 1, b"a")
    for counter in (1, 2):  # the counter of a replay, and the next one
        with pytest.raises(Conflict, match="onNewCheckpoint=continue"):
            sink.publish("second", counter, b"b")
    sink.publish("first", 2, b"c")
    assert sink.bodies == [b"a", b"c"]


def test_new_query_may_continue_with_new_counters(sink):
    sink.publish("first", 5, b"a")
    assert not sink.publish("second", 1, b"b", on_new=CONTINUE).duplicate
    assert sink.publish("second", 1, b"b", on_new=CONTINUE).duplicate
    assert not sink.publish("second", 2, b"c").duplicate
    assert not sink.publish("third", 1, b"d", on_new=CONTINUE).duplicate
    assert sink.bodies == [b"a", b"b", b"c", b"d"]


def test_replaced_query_stays_fenced(sink):
    sink.publish("first", 1, b"a")
    sink.publish("second", 1, b"b", on_new=CONTINUE)
    for on_new in (query_runs.REFUSE, CONTINUE):
        with pytest.raises(Fenced, match="another producerId"):
            sink.publish("first", 2, b"c", on_new=on_new)
    sink.publish("third", 1, b"d", on_new=CONTINUE)
    with pytest.raises(Fenced):
        sink.publish("first", 2, b"c", on_new=CONTINUE)
    assert sink.bodies == [b"a", b"b", b"d"]


def test_failed_publish_uses_no_counter(sink):
    gone = sink.stage(b"x")
    sink.durable.store.discard(gone)
    asked = RunCommit("p", 1, "q", query_runs.REFUSE, (sink.stage(b"y"), gone))
    for _ in range(2):
        with pytest.raises(StageGone):
            publish(sink.durable, sink.owners, ALICE, asked)
    assert sink.bodies == []
    assert not sink.publish("q", 1, b"a").duplicate
    assert sink.bodies == [b"a"]


def test_new_run_that_fails_does_not_end_the_old_one(sink):
    sink.publish("first", 1, b"a")
    asked = RunCommit("p", 1, "second", CONTINUE, ("no stage",))
    with pytest.raises(StageGone):
        publish(sink.durable, sink.owners, ALICE, asked)
    assert sink.publish("first", 1, b"a").duplicate  # though the producer was opened meanwhile
    assert not sink.publish("first", 2, b"b").duplicate
    assert sink.bodies == [b"a", b"b"]


def test_run_survives_a_restart(sink):
    sink.publish("q", 1, b"a")
    again = Sink.__new__(Sink)
    again.durable, again.topic = DurableTopics(sink.durable.store), sink.topic
    again.owners = ProducerRegistry(
        sink.durable.store, time.monotonic, time.time_ns, unshared_table("max_producers", 1000)
    )
    assert again.publish("q", 1, b"b").duplicate
    with pytest.raises(Conflict):
        again.publish("other", 1, b"b")


def test_run_that_begins_during_a_publish_wins(sink):
    """Between the look at the record and the commit stands another run's whole beginning."""
    sink.publish("first", 1, b"a")
    commit, sink.durable.commit = sink.durable.commit, None

    def overtaken(one: Commit):
        sink.durable.commit = commit
        sink.publish("second", 1, b"b", on_new=CONTINUE)
        return commit(one)

    sink.durable.commit = overtaken
    with pytest.raises(Fenced):
        sink.publish("first", 2, b"c")
    assert sink.bodies == [b"a", b"b"]


def test_only_one_of_two_concurrent_runs_begins(sink):
    commit = sink.durable.commit

    def overtaken(one: Commit):
        sink.durable.commit = commit
        sink.publish("first", 1, b"a")
        return commit(one)

    sink.durable.commit = overtaken
    with pytest.raises(Conflict, match="onNewCheckpoint"):
        sink.publish("second", 1, b"b")
    assert sink.bodies == [b"a"]


def test_publish_fails_after_max_tries(sink):
    sink.publish("q", 1, b"a")
    real = sink.durable.commit

    def fenced(one: Commit):
        sink.durable.store.open_producer(PREFIX + "p", ProducerOptions())
        return real(one)

    sink.durable.commit = fenced
    with pytest.raises(Unavailable):
        sink.publish("q", 2, b"b")


def test_producer_of_a_run_belongs_to_its_first_user(sink):
    sink.publish("q", 1, b"a")
    with pytest.raises(Denied):
        sink.publish("q", 2, b"b", caller=BOB)


def test_list_of_ended_runs_is_bounded(sink, monkeypatch):
    monkeypatch.setattr(query_runs, "MAX_ENDED_RUNS", 2)
    for name in ("a", "b", "c", "d"):
        sink.publish(name, 1, name.encode(), on_new=CONTINUE)
    with pytest.raises(Fenced):
        sink.publish("b", 1, b"x", on_new=CONTINUE)
    sink.publish("a", 1, b"x", on_new=CONTINUE)  # forgotten


GOOD_STAMP, GOOD_RUN = {"producer": "p", "counter": 1}, {"id": "q"}


@pytest.mark.parametrize(
    ("stamp", "run"),
    [
        (None, GOOD_RUN),
        ({}, GOOD_RUN),
        (GOOD_STAMP | {"epoch": 1}, GOOD_RUN),
        (GOOD_STAMP | {"counter": 0}, GOOD_RUN),
        (GOOD_STAMP | {"counter": True}, GOOD_RUN),
        (GOOD_STAMP | {"producer": ""}, GOOD_RUN),
        (GOOD_STAMP | {"producer": 7}, GOOD_RUN),
        (GOOD_STAMP | {"producer": "p" * 252}, GOOD_RUN),
        (GOOD_STAMP | {"producer": "\ud800"}, GOOD_RUN),
        (GOOD_STAMP, {"on_new": "refuse"}),
        (GOOD_STAMP, {"id": ""}),
        (GOOD_STAMP, {"id": 7}),
        (GOOD_STAMP, {"id": "ä" * 128}),
        (GOOD_STAMP, GOOD_RUN | {"on_new": "never"}),
        (GOOD_STAMP, GOOD_RUN | {"more": 1}),
    ],
)
def test_malformed_run_is_refused(stamp, run):
    with pytest.raises(MalformedRequest):
        RunCommit.parse([], stamp, run)


def test_valid_run_is_parsed():
    asked = RunCommit.parse(["s"], GOOD_STAMP, GOOD_RUN)
    assert asked == RunCommit("p", 1, "q", query_runs.REFUSE, ("s",))
    assert RunCommit.parse([], GOOD_STAMP, GOOD_RUN | {"on_new": CONTINUE}).on_new == CONTINUE
