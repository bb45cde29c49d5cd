"""A connection with expensive requests rests between turns; its answers do not change."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polybus.dialects.freud.server.fair_scheduler import TURN_WEIGHT, FairScheduler
from polybus.dialects.freud.server.plain_session import MAX_UNSCANNED_BYTES
from polybus.model.identity import Identity
from tests.rig.freud_client import (
    DOESNT_EXIST,
    FOR_EVER,
    NOTHING_HAPPENED,
    OK,
    Answer,
    answers_in,
    count,
    create,
    get,
    list_topics,
    names,
    number,
    produce,
    subscribe,
)
from tests.rig.memory_bus import MemoryBus

ALICE = Identity(1, groups=frozenset())
TOPICS = 100
READERS = 50
LARGE = 60_000


class Speaker:
    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        self.pipe = bus.connect_freud(identity=ALICE)
        self._read = 0

    def answers(self) -> list[Answer]:
        """Return the answers since the last call."""
        found, size = answers_in(self.pipe.taken[self._read :])
        self._read += size
        return found

    def ask(self, *requests: bytes) -> list[Answer]:
        self.pipe.deliver(b"".join(requests))
        self.bus.turn()
        return self.answers()

    @property
    def told(self) -> dict[str, int | str]:
        """Return its row of `polybus connections`."""
        found = [one for one in self.bus.connections() if one["peer"] == self.pipe.peer]
        return found[0] if found else {}


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus()


@pytest.fixture
def owner(bus: MemoryBus) -> Speaker:
    """The creator of many topics; t and u have many subscriptions, the others none."""
    one = Speaker(bus)
    one.ask(create(b"t"), create(b"u"), create(b"begin"))
    one.ask(*(create(b"topic-%d" % at) for at in range(TOPICS)))
    one.ask(*[subscribe(b"t"), subscribe(b"u")] * READERS)
    return one


def lists(owner: Speaker) -> list[bytes]:
    return [list_topics()] * (2 * TURN_WEIGHT // TOPICS)


def fan_outs(owner: Speaker) -> list[bytes]:
    """Two topics in turn, so that they are not one group."""
    return [produce(b"t"), produce(b"u")] * (TURN_WEIGHT // READERS)


def small(owner: Speaker) -> list[bytes]:
    return [count(b"nothing")] * TURN_WEIGHT


def gets(owner: Speaker) -> list[bytes]:
    """One group of Gets, each of a message in its own chunk."""
    (answer,) = owner.ask(subscribe(b"begin"))
    for _ in range(TURN_WEIGHT // 10):
        owner.ask(produce(b"begin", bytes(LARGE)))
    return [get(answer.payload)] * (TURN_WEIGHT // 10)


WORK = pytest.mark.parametrize("work", [lists, fan_outs, small, gets])
Work = Callable[[Speaker], list[bytes]]


@WORK
def test_other_connections_are_served_between_turns(bus: MemoryBus, owner: Speaker, work: Work):
    """A connection woken by the first request is served before the last one is executed."""
    wanted = work(owner)
    other, hog = Speaker(bus), Speaker(bus)
    (subscribed,) = other.ask(subscribe(b"begin"))
    assert other.ask(get(subscribed.payload, FOR_EVER), count(b"end")) == []
    answers = hog.ask(produce(b"begin"), *wanted, create(b"end"))
    assert [one.code for one in other.answers()] == [OK, DOESNT_EXIST]
    assert len(answers) == len(wanted) + 2
    assert answers[-1] == Answer(OK)
    assert hog.told["state"] == "open"


def test_group_of_gets_is_executed_over_several_turns(bus: MemoryBus, owner: Speaker):
    wanted = gets(owner)
    hog = Speaker(bus)
    hog.pipe.deliver(b"".join(wanted))
    assert hog.told["state"] == "resting"
    first = hog.answers()
    assert 0 < len(first) < len(wanted)
    bus.turn()
    assert [one.code for one in first + hog.answers()] == [OK] * len(wanted)


def test_connection_joins_the_scheduler_once(
    bus: MemoryBus, owner: Speaker, monkeypatch: pytest.MonkeyPatch
):
    """Later input and a half close must not join it again, or it would get two turns."""
    joined: list[Callable[[], None]] = []
    monkeypatch.setattr(FairScheduler, "join", lambda line, go_on: joined.append(go_on))
    hog = Speaker(bus)
    hog.pipe.deliver(b"".join(lists(owner)))
    hog.pipe.deliver(list_topics())
    hog.pipe.shut_down()
    assert len(joined) == 1


def test_answers_keep_their_order(bus: MemoryBus, owner: Speaker):
    hog = Speaker(bus)
    fans = fan_outs(owner)
    answers = hog.ask(*fans)
    assert [number(one) for one in answers] == [at // 2 for at in range(len(fans))]


def test_request_received_while_resting_waits_for_its_turn(bus: MemoryBus, owner: Speaker):
    """Also a single request, which could take the fast path."""
    hog = Speaker(bus)
    (subscribed,) = hog.ask(subscribe(b"begin"))
    hog.pipe.deliver(b"".join(lists(owner)))
    assert hog.told["state"] == "resting"
    hog.pipe.deliver(produce(b"begin", b"x"))
    hog.pipe.deliver(get(subscribed.payload))
    bus.turn()
    assert hog.answers()[-2:] == [(OK, bytes(8)), (OK, b"x")]


def test_half_close_while_resting_answers_all_requests(bus: MemoryBus, owner: Speaker):
    hog = Speaker(bus)
    wanted = lists(owner)
    hog.pipe.deliver(b"".join(wanted))
    hog.pipe.shut_down()
    assert not hog.pipe.closed
    bus.turn()
    assert [one.code for one in hog.answers()] == [OK] * len(wanted)
    assert hog.pipe.closed


def test_hang_up_while_resting_ends_later_waiting_gets(bus: MemoryBus, owner: Speaker):
    hog = Speaker(bus)
    (subscribed,) = hog.ask(subscribe(b"begin"))
    behind = [count(b"nothing")] * (MAX_UNSCANNED_BYTES // 8)  # so much that it is not read from
    hog.pipe.deliver(b"".join([*lists(owner), *behind, get(subscribed.payload, FOR_EVER)]))
    assert not hog.pipe.reading
    hog.pipe.hung_up()
    bus.turn()
    assert hog.answers()[-1] == (NOTHING_HAPPENED, b"")


def test_stalled_connection_executes_nothing_while_resting(bus: MemoryBus, owner: Speaker):
    hog = Speaker(bus)
    hog.pipe.appetite = 0
    wanted = fan_outs(owner)
    hog.pipe.deliver(b"".join(wanted))
    assert hog.told["state"] == "stalled"
    bus.turn()
    assert len(hog.answers()) == 0
    hog.pipe.eat()
    bus.turn()
    assert len(hog.answers()) == len(wanted)


def keeps_place(one: Speaker) -> bool:
    return one.pipe.keeps_place


@WORK
def test_requests_of_a_disconnected_client_take_turns(bus: MemoryBus, owner: Speaker, work: Work):
    wanted = work(owner)
    hog = Speaker(bus)
    hog.pipe.deliver(b"".join([*fan_outs(owner), *wanted, create(b"end")]))
    hog.pipe.hang_up()
    assert keeps_place(hog)
    assert hog.told["state"] == "ending"
    bus.turn()
    assert not keeps_place(hog)
    assert hog.told == {}
    assert owner.ask(create(b"end")) == [(NOTHING_HAPPENED, b"")]


def test_list_of_a_disconnected_client_is_skipped(
    bus: MemoryBus, owner: Speaker, monkeypatch: pytest.MonkeyPatch
):
    hog = Speaker(bus)
    hog.pipe.deliver(b"".join([*fan_outs(owner), *lists(owner), create(b"end")]))
    monkeypatch.setattr(bus.topics, "names", lambda caller: pytest.fail("made a List"))
    hog.pipe.hang_up()
    bus.turn()
    assert owner.ask(create(b"end")) == [(NOTHING_HAPPENED, b"")]


def test_single_request_may_exceed_the_turn_weight(bus: MemoryBus, owner: Speaker):
    owner.ask(*(create(b"many-%d" % at) for at in range(TURN_WEIGHT)))
    (listed,) = Speaker(bus).ask(list_topics())
    assert len(names(listed)) > TURN_WEIGHT


def test_each_turn_serves_one_resting_connection():
    soon: list[Callable[[], None]] = []
    line = FairScheduler(soon.append)
    served: list[str] = []

    def rest_again() -> None:
        served.append("a")
        line.join(lambda: served.append("a again"))

    line.join(rest_again)
    line.join(lambda: served.append("b"))
    turns = []
    while soon:
        due, soon[:] = soon[:], []
        for one in due:
            one()
        turns.append(served[:])
    assert turns == [["a"], ["a", "b"], ["a", "b", "a again"]]
