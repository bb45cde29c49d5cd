"""Detached subscriptions in memory: their bounds, their end, and who may list them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from polybus.bus.admin_verb import AdminError
from polybus.bus.policy import Policy
from polybus.dialects.freud.limits import FreudLimits
from polybus.dialects.freud.server import subscription_admin
from polybus.dialects.freud.server.subscription_admin import SubscriptionAdmin
from polybus.model.identity import Identity
from polybus.model.limits import QuotaLimits
from tests.rig.freud_client import (
    DOESNT_EXIST,
    FOR_EVER,
    NOTHING_HAPPENED,
    OK,
    Answer,
    answers_in,
    create,
    delete,
    get,
    produce,
    subscribe,
)
from tests.rig.memory_bus import MemoryBus, RecordedLog
from tests.rig.memory_pipe import MemoryPipe

ALICE, BOB, ROOT = Identity(1), Identity(2), Identity(0)
LIMITS = FreudLimits(detached_subscription_s=100.0, max_detached_subscriptions=4)


def ask(bus: MemoryBus, pipe: MemoryPipe, *requests: bytes) -> list[Answer]:
    seen = len(pipe.taken)
    for request in requests:
        pipe.deliver(request)
        bus.turn()
    return answers_in(pipe.taken[seen:])[0]


def leave_subscriptions(bus: MemoryBus, identity: Identity, number: int = 1) -> list[bytes]:
    pipe = bus.connect_freud(identity=identity)
    answers = ask(bus, pipe, create(b"t"), *[subscribe(b"t")] * number)
    pipe.hang_up()
    bus.turn()
    return [answer.payload for answer in answers[1:]]


def codes(bus: MemoryBus, identity: Identity, keys: list[bytes]) -> list[int]:
    pipe = bus.connect_freud(identity=identity)
    found = [answer.code for answer in ask(bus, pipe, *map(get, keys))]
    pipe.hang_up()
    bus.turn()
    return found


def test_total_bound_costs_the_user_with_the_most_its_oldest():
    bus = MemoryBus(freud=LIMITS)
    many, one = leave_subscriptions(bus, ALICE, 3), leave_subscriptions(bus, BOB)
    more = leave_subscriptions(bus, BOB)
    assert bus.stats("freud", "detached") == 4
    assert codes(bus, ALICE, many) == [DOESNT_EXIST, NOTHING_HAPPENED, NOTHING_HAPPENED]
    assert codes(bus, BOB, one + more) == [NOTHING_HAPPENED] * 2
    assert bus.broker.quotas.used(1, "quota_subscriptions") == 2


def test_unused_subscription_expires_after_the_time_since_its_last_use():
    bus = MemoryBus(freud=LIMITS)
    first, second = leave_subscriptions(bus, ALICE, 2)
    bus.pass_time(60)
    assert codes(bus, ALICE, [second]) == [NOTHING_HAPPENED]
    bus.pass_time(60)
    assert bus.stats("freud") == {"subscriptions": 1, "detached": 1, "evicted": 0, "expired": 1}
    assert codes(bus, ALICE, [first, second]) == [DOESNT_EXIST, NOTHING_HAPPENED]
    bus.pass_time(101)
    assert bus.broker.quotas.accounts() == [
        {"account": 1, "quota": "quota_topics", "used": 1, "limit": QuotaLimits().quota_topics}
    ]


def test_get_that_waits_on_another_connection_keeps_a_subscription():
    bus = MemoryBus(freud=LIMITS, quotas=QuotaLimits(quota_subscriptions=1))
    owner, other = bus.connect_freud(identity=ALICE), bus.connect_freud(identity=ALICE)
    key = ask(bus, owner, create(b"t"), subscribe(b"t"))[1].payload
    ask(bus, other, get(key, FOR_EVER))
    owner.hang_up()
    bus.turn()
    bus.pass_time(250)
    third = bus.connect_freud(identity=ALICE)
    # It is in use, so it is neither expired nor evicted.
    assert ask(bus, third, subscribe(b"t"))[0].payload == b"quota_subscriptions"
    assert ask(bus, third, produce(b"t", b"x"))[0].code == OK
    assert answers_in(other.taken)[0] == [Answer(OK, b"x")]


# --- the admin verbs


class Admin:
    def __init__(self, bus: MemoryBus) -> None:
        context: Any = SimpleNamespace(broker=bus.broker, log=RecordedLog())
        self.verbs = SubscriptionAdmin(context).verbs()

    def ask(self, verb: str, caller: Identity, **keys: object) -> Any:
        assert self.verbs[verb].for_everyone
        assert keys.keys() <= self.verbs[verb].keys
        return self.verbs[verb].answer({"verb": verb, **keys}, caller)

    def ids(self, caller: Identity) -> set[str]:
        found: set[str] = set()
        skip: int | None = 0
        while skip is not None:
            page = self.ask("freud_subscriptions", caller, skip=skip)
            found |= {row["id"] for row in page["subscriptions"]}
            skip = page["next"]
        return found


def test_users_see_and_remove_their_own_and_admins_all(monkeypatch):
    monkeypatch.setattr(subscription_admin, "PAGE_ROWS", 2)
    bus = MemoryBus(freud=FreudLimits(), policy=Policy((0,)))
    admin = Admin(bus)
    alice = [key.hex() for key in leave_subscriptions(bus, ALICE, 3)]
    (bob,) = (key.hex() for key in leave_subscriptions(bus, BOB))
    assert admin.ids(ALICE) == set(alice)
    assert admin.ids(BOB) == {bob}
    assert admin.ids(ROOT) == {*alice, bob}
    with pytest.raises(AdminError, match="does not exist"):
        admin.ask("freud_subscription_rm", BOB, id=alice[0])
    producer = bus.connect_freud(identity=ALICE)
    ask(bus, producer, produce(b"t", b"four"))
    row = admin.ask("freud_subscription_rm", ROOT, id=alice[0])
    assert (row["topic"], row["state"], row["unread_messages"]) == ("t", "detached", 1)
    assert (row["unread_bytes"], row["detached_s"]) == (4, 0)
    assert admin.ids(ALICE) == set(alice[1:])
    assert bus.stats("dropped", "unsubscribed") == 1


@pytest.mark.parametrize(
    ("verb", "keys"),
    [
        ("freud_subscriptions", {"skip": -1}),
        ("freud_subscriptions", {"skip": "1"}),
        ("freud_subscription_rm", {}),
        ("freud_subscription_rm", {"id": "xyz"}),
        ("freud_subscription_rm", {"id": "00"}),
        ("freud_subscription_rm", {"id": 7}),
    ],
)
def test_bad_admin_requests_are_refused(verb, keys):
    with pytest.raises(AdminError, match=r"must be .*, got "):
        Admin(MemoryBus()).ask(verb, ALICE, **keys)


def test_expired_topic_may_evict_the_last_reader_of_another_that_expires_with_it():
    bus = MemoryBus(freud=LIMITS, quotas=QuotaLimits(quota_bytes=10))
    leaver, reader, owner = (bus.connect_freud(identity=who) for who in (ALICE, ALICE, BOB))
    ask(bus, owner, create(b"first"), subscribe(b"first"), delete(b"first"), create(b"first"))
    ask(bus, leaver, create(b"second"), subscribe(b"second"), produce(b"second", bytes(10)))
    ask(bus, leaver, delete(b"second"))
    leaver.hang_up()
    bus.turn()
    key = ask(bus, reader, subscribe(b"first"))[0].payload
    assert ask(bus, owner, produce(b"first", b"12345"))[0].code == OK  # into the buffer
    # Both deletions time out in one tick; the buffer of the first needs the room of the second.
    bus.pass_time(LIMITS.subscriber_timeout_s + 1)
    assert bus.stats("freud", "evicted") == 1
    assert ask(bus, reader, get(key)) == [Answer(OK, b"12345")]
    assert ask(bus, reader, create(b"second"))[0].code == OK
