"""Acknowledged commits survive a lost answer and a killed server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from polybus.errors import ConnectionLost
from polybus.model.commit import Commit, CommitResult
from polybus.model.stamp import ProducerOptions, Stamp
from polybus.model.topic import ALL, Topic
from polybus.testing.conformance.sample_blocks import messages
from tests.spikes.jetstream.engine import JetStreamSpike
from tests.spikes.jetstream.relay import Relay
from tests.spikes.jetstream.rig import append, assert_dense, bodies, put, until
from tests.spikes.jetstream.server import NatsServer

ANSWER_TIMEOUT_S = 1.5
ROUNDS = 3
COMMITS_BEFORE_KILL = 15


@pytest.fixture
def relay(server: NatsServer) -> Iterator[Relay]:
    lossy = Relay(server.port)
    yield lossy
    lossy.close()


@pytest.fixture
def cut(relay: Relay) -> Iterator[JetStreamSpike]:
    """A bus behind the relay."""
    with JetStreamSpike(relay.url, timeout_s=ANSWER_TIMEOUT_S) as engine:
        yield engine


def test_after_a_lost_answer_the_same_stamp_gets_the_first_result(relay, cut, other):
    topic = cut.create("t", 1, {})
    cut.open_producer("p", ProducerOptions())  # so it knows the heads, and a commit is one batch
    wanted = Commit((append(topic, 0, b"once"),), stamp=Stamp("p", 1, 1), note=b"n")
    relay.lose_answers()
    with pytest.raises(ConnectionLost):
        cut.commit(wanted).result()
    until(lambda: other.bounds(topic.number).next_id == 2)
    again = other.commit(wanted).result()
    assert (again.duplicate, again.note, again.spans) == (True, b"n", ((topic.number, 0, 0, 1, 1),))
    assert bodies(other.read(topic.number, 0, 0)) == [b"once"]


def test_the_diary_replaces_a_lost_answer(relay, cut, other):
    topic = cut.create("t", 1, {})
    put(cut, append(topic, 0, b"before"))
    relay.lose_answers()
    done = cut.commit(Commit((append(topic, 0, b"once"),)))  # no stamp
    until(lambda: other.bounds(topic.number).next_id == 3)
    relay.heal()
    assert done.result().spans == ((topic.number, 0, 1, 2, 1),)
    assert bodies(other.read(topic.number, ALL, 0)) == [b"before", b"once"]


@pytest.mark.soak
def test_a_killed_server_keeps_all_that_it_acknowledged(server):
    with JetStreamSpike(server.url) as first:
        topic = first.create("t", 2, {})
    acknowledged: dict[bytes, CommitResult] = {}
    for turn in range(ROUNDS):
        with JetStreamSpike(server.url) as engine:
            _kill_while_producing(server, engine, topic, turn, acknowledged)
        server.start()
    with JetStreamSpike(server.url) as last:
        _check(last, topic, acknowledged)


def _kill_while_producing(server, engine, topic, turn, acknowledged) -> None:
    goal = len(acknowledged) + COMMITS_BEFORE_KILL
    with ThreadPoolExecutor(1) as threads:
        under_way = threads.submit(_produce, engine, topic, turn, acknowledged)
        until(lambda: len(acknowledged) >= goal)
        server.kill()
        assert isinstance(under_way.exception(), ConnectionLost)


def _produce(engine, topic: Topic, turn: int, acknowledged: dict[bytes, CommitResult]) -> None:
    for number in range(1_000_000):
        name = b"%d-%d" % (turn, number)
        acknowledged[name] = put(engine, append(topic, 0, name), append(topic, 1, name))


def _check(engine, topic: Topic, acknowledged: dict[bytes, CommitResult]) -> None:
    assert_dense(engine, topic)
    found = {message.body: message for message in messages(engine.read(topic.number, 0, 0))}
    names = bodies(engine.read(topic.number, 0, 0))
    assert names == bodies(engine.read(topic.number, 1, 0))  # a commit is whole, or absent
    assert len(found) == len(names)
    assert set(acknowledged) <= set(names)
    assert len(names) - len(acknowledged) <= ROUNDS  # one a round may be done and not answered
    for name, done in acknowledged.items():
        assert (done.spans[0].first_offset, done.spans[0].first_id) == (
            found[name].offset,
            found[name].id,
        )
