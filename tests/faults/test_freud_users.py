"""Freud with several users: owners of topics and subscriptions, rules, and quotas.

Every test here needs root, because only root can change its uid.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polybus.server.admin_client import ask
from polybus.testing.bus_process import BusProcess
from tests.faults.freud_live import Speaker, begin, connect, serving
from tests.rig.freud_client import (
    DOESNT_EXIST,
    FOR_EVER,
    NO,
    NOTHING_HAPPENED,
    NOTICE,
    OK,
    SERVER_ERROR,
    Client,
    count,
    create,
    delete,
    get,
    get_record,
    list_topics,
    names,
    number,
    produce,
    subscribe,
    unsubscribe,
)
from tests.rig.observer import count as counter
from tests.rig.observer import log_lines, until
from tests.rig.second_user import User

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can change its uid")

ALICE, BOB, CAROL = 4242, 4343, 4444
CONFIG = f"""
acl = [
    "deny user:{BOB} produce shut.*",
    "deny user:{BOB} subscribe shut.*",
    "deny user:{BOB} create shut.*",
    "allow user:{BOB} delete common.*",
]
[quotas]
quota_topics = 3
quota_subscriptions = 2
quota_bytes = 1000
quota_connections = 4
[quotas.users.{CAROL}]
quota_topics = 5
quota_subscriptions = 4
quota_bytes = 3000
quota_connections = 6
[quotas.users.0]
quota_topics = 1000
quota_subscriptions = 1000
"""


@pytest.fixture(scope="module")
def bus() -> Iterator[BusProcess]:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        Path(file.name).write_text(CONFIG)
        with serving("--config", file.name) as running:
            yield running


@pytest.fixture(scope="module")
def users() -> Iterator[dict[int, User]]:
    with User(ALICE) as alice, User(BOB) as bob, User(CAROL) as carol:
        yield {ALICE: alice, BOB: bob, CAROL: carol}


@pytest.fixture
def client(bus: BusProcess) -> Iterator[Client]:
    """A connection of root."""
    with connect(bus) as made:
        yield made


class Guests:
    """Connections of other users, closed after the test."""

    def __init__(self, bus: BusProcess, users: dict[int, User]) -> None:
        self.bus = bus
        self.users = users
        self.made: list[Speaker] = []

    def speaker(self, uid: int) -> Speaker:
        self.made.append(Speaker(self.users[uid], self.bus))
        return self.made[-1]


@pytest.fixture
def guests(bus: BusProcess, users: dict[int, User]) -> Iterator[Guests]:
    before = held(bus)
    made = Guests(bus, users)
    yield made
    for speaker in made.made:
        speaker.link.close()
    until(lambda: held(bus) == before, "they are gone")


def held(bus: BusProcess) -> int:
    return counter(bus, "connections", "open")


def said(bus: BusProcess, **fields: object) -> dict[str, Any]:
    """Wait for the log line with these fields."""
    until(lambda: log_lines(bus, **fields), f"the log says {fields}")
    return log_lines(bus, **fields)[0]


# --- whose a subscription is -------------------------------------------------


def test_subscriber_id_of_another_user_does_not_exist(
    bus: BusProcess, client: Client, guests: Guests
):
    alice, bob = guests.speaker(ALICE), guests.speaker(BOB)
    assert alice.ask(create(b"ids")).code == OK
    key = alice.subscribe(b"ids")
    assert bob.ask(produce(b"ids", b"for alice")).code == OK
    for stranger in (bob.ask, client.ask):  # root is a user like any other here
        for request in (get(key), get(key, 30), get_record(key, FOR_EVER), unsubscribe(key)):
            assert stranger(request) == (DOESNT_EXIST, b"")
    assert guests.speaker(ALICE).ask(get(key)) == (OK, b"for alice")  # from any connection
    assert guests.speaker(ALICE).ask(unsubscribe(key)) == (OK, b"")
    assert alice.ask(delete(b"ids")).code == OK


def test_produce_of_another_user_ends_a_waiting_get(
    bus: BusProcess, client: Client, guests: Guests
):
    bob = guests.speaker(BOB)
    client.ask(create(b"waits"))
    key = client.subscribe(b"waits")
    begin(client, get(key, FOR_EVER))
    assert number(bob.ask(produce(b"waits", b"from bob"))) == 0
    assert client.answers(1) == [(OK, b"from bob")]
    client.ask(unsubscribe(key))
    assert client.ask(delete(b"waits")).code == OK


# --- whose a topic is --------------------------------------------------------


def test_only_the_creator_may_delete_a_topic(bus: BusProcess, client: Client, guests: Guests):
    alice, bob = guests.speaker(ALICE), guests.speaker(BOB)
    assert alice.ask(create(b"hers")).code == OK
    refused = counter(bus, "refused", "delete_denied")
    assert bob.ask(delete(b"hers")) == (NO, b"")
    assert client.ask(delete(b"hers")) == (NO, b"")
    assert counter(bus, "refused", "delete_denied") == refused + 2
    line = said(bus, event="refused", user=f"uid:{BOB}", reason="delete_denied")
    assert (line["topic"], line["dialect"]) == ("hers", "freud")
    assert alice.ask(delete(b"hers")) == (OK, b"")


def test_recreated_topic_belongs_to_its_new_creator(guests: Guests):
    alice, bob = guests.speaker(ALICE), guests.speaker(BOB)
    alice.ask(create(b"again"))
    key = alice.subscribe(b"again")
    alice.ask(delete(b"again"))
    assert bob.ask(delete(b"again")) == (
        NOTHING_HAPPENED,
        b"",
    )  # marked already: no rule is checked
    assert bob.ask(create(b"again")) == (OK, b"")
    assert alice.ask(delete(b"again")) == (NO, b"")
    listing = ("acl", "ls", "again", "--admin", str(guests.bus.admin_path))
    listed = [guests.users[uid].polybus(*listing).code for uid in (ALICE, BOB)]
    assert listed == [4, 0]  # its rules are his business, too
    assert bob.ask(delete(b"again")) == (OK, b"")
    assert alice.ask(get(key)) == (OK, NOTICE + b"again")


def test_rule_may_allow_another_user_to_delete(guests: Guests):
    alice, bob = guests.speaker(ALICE), guests.speaker(BOB)
    alice.ask(create(b"common.x"))
    assert bob.ask(delete(b"common.x")) == (OK, b"")


# --- the order of checks -----------------------------------------------------


def test_existence_is_checked_before_policy_and_policy_before_quota(
    bus: BusProcess, client: Client, guests: Guests
):
    bob = guests.speaker(BOB)
    for request in (subscribe(b"shut.x"), produce(b"shut.x", b"x"), count(b"shut.x")):
        assert bob.ask(request) == (DOESNT_EXIST, b"")
    assert bob.ask(create(b"shut.x")) == (NO, b"")
    client.ask(create(b"shut.x"))
    assert bob.ask(create(b"shut.x")) == (NOTHING_HAPPENED, b"")
    assert bob.ask(delete(b"shut.x")) == (NO, b"")
    assert bob.ask(subscribe(b"shut.x")) == (NO, b"")
    assert bob.ask(produce(b"shut.x", b"x")) == (NO, b"")  # also without a subscriber
    for name in (b"own.1", b"own.2", b"own.3"):
        assert bob.ask(create(name)).code == OK
    assert bob.ask(create(b"shut.y")) == (NO, b"")  # though his quota is used up
    for name in (b"own.1", b"own.2", b"own.3"):
        assert bob.ask(delete(name)).code == OK
    assert client.ask(delete(b"shut.x")).code == OK


def test_list_has_only_topics_that_the_caller_may_use(
    bus: BusProcess, client: Client, guests: Guests
):
    alice, bob = guests.speaker(ALICE), guests.speaker(BOB)
    client.send(create(b"shut.seen"), create(b"open.seen"))
    client.answers(2)
    seen = {b"shut.seen", b"open.seen"}
    assert seen & set(names(alice.ask(list_topics()))) == seen
    assert seen & set(names(bob.ask(list_topics()))) == {b"open.seen"}
    assert bob.ask(count(b"shut.seen")) == (NO, b"")
    assert bob.ask(count(b"open.seen")).code == OK
    client.send(delete(b"shut.seen"), delete(b"open.seen"))
    assert [one.code for one in client.answers(2)] == [OK, OK]


def test_changed_rules_apply_at_once(bus: BusProcess, client: Client, guests: Guests):
    alice = guests.speaker(ALICE)
    client.ask(create(b"rules"))
    key = alice.subscribe(b"rules")
    rule = f"deny user:{ALICE} subscribe rules"
    ask(bus.admin_path, "acl_add", rule=rule)
    assert alice.ask(subscribe(b"rules")) == (NO, b"")
    assert alice.ask(get(key, FOR_EVER)) == (DOESNT_EXIST, b"")
    ask(bus.admin_path, "acl_rm", rule=rule)
    assert alice.ask(unsubscribe(alice.subscribe(b"rules"))).code == OK
    assert client.ask(delete(b"rules")).code == OK


# --- quotas ------------------------------------------------------------------


@pytest.mark.parametrize(("uid", "limit"), [(ALICE, 3), (CAROL, 5)])
def test_topics_are_charged_to_their_creator_and_released(
    bus: BusProcess, guests: Guests, uid: int, limit: int
):
    one, bob = guests.speaker(uid), guests.speaker(BOB)
    topics = [b"topic.%d.%d" % (uid, at) for at in range(limit)]
    assert [one.ask(create(name)).code for name in topics] == [OK] * limit
    refused = counter(bus, "refused", "quota_topics")
    assert one.ask(create(b"one more")) == (SERVER_ERROR, b"quota_topics")
    assert counter(bus, "refused", "quota_topics") == refused + 1
    line = said(bus, event="quota reached", quota="quota_topics", user=f"uid:{uid}")
    assert (line["used"], line["limit"]) == (limit, limit)
    assert one.ask(create(topics[0])) == (NOTHING_HAPPENED, b"")
    assert bob.ask(create(b"his own")).code == OK  # others are not touched
    # A marked one counts until it has gone.
    key = one.subscribe(topics[0])
    assert one.ask(delete(topics[0])).code == OK
    assert one.ask(create(b"one more")) == (SERVER_ERROR, b"quota_topics")
    assert one.ask(get(key)).code == OK
    assert one.ask(create(b"one more")).code == OK
    for name in (b"one more", *topics[1:]):
        assert one.ask(delete(name)).code == OK
    assert bob.ask(delete(b"his own")).code == OK


@pytest.mark.parametrize(("uid", "limit"), [(ALICE, 2), (CAROL, 4)])
def test_subscriptions_are_charged_and_released(
    bus: BusProcess, client: Client, guests: Guests, uid: int, limit: int
):
    one = guests.speaker(uid)
    client.send(create(b"subscribed"), create(b"deleted"))
    client.answers(2)
    keys = [one.subscribe(b"subscribed") for _ in range(limit - 1)]
    keys.append(one.subscribe(b"deleted"))
    assert one.ask(subscribe(b"subscribed")) == (SERVER_ERROR, b"quota_subscriptions")
    one.ask(unsubscribe(keys[0]))
    keys[0] = one.subscribe(b"subscribed")
    assert one.ask(subscribe(b"subscribed")) == (SERVER_ERROR, b"quota_subscriptions")
    client.ask(delete(b"deleted"))
    assert one.ask(subscribe(b"subscribed")) == (SERVER_ERROR, b"quota_subscriptions")
    assert one.ask(get(keys[-1])) == (OK, NOTICE + b"deleted")
    keys[-1] = one.subscribe(b"subscribed")
    for key in keys:
        assert one.ask(unsubscribe(key)).code == OK
    assert client.ask(delete(b"subscribed")).code == OK


@pytest.mark.parametrize(("uid", "limit"), [(ALICE, 1000), (CAROL, 3000)])
def test_unread_bytes_are_charged_to_the_subscriber(
    bus: BusProcess, client: Client, guests: Guests, uid: int, limit: int
):
    one, bob = guests.speaker(uid), guests.speaker(BOB)
    client.ask(create(b"bytes"))
    first, second = one.subscribe(b"bytes"), one.subscribe(b"bytes")
    half = limit // 2
    assert bob.ask(produce(b"bytes", bytes(half))).code == OK  # twice over: two subscriptions
    assert bob.ask(produce(b"bytes", b"x")) == (SERVER_ERROR, b"quota_bytes")
    said(bus, event="quota reached", quota="quota_bytes", user=f"uid:{uid}")
    assert not log_lines(bus, event="quota reached", user=f"uid:{BOB}", quota="quota_bytes")
    assert one.ask(get(first)).code == OK
    assert bob.ask(produce(b"bytes", bytes(half // 2))).code == OK
    assert bob.ask(produce(b"bytes", b"x")) == (SERVER_ERROR, b"quota_bytes")
    assert one.ask(unsubscribe(second)).code == OK
    assert bob.ask(produce(b"bytes", bytes(limit - half // 2))).code == OK
    assert bob.ask(produce(b"bytes", b"x")) == (SERVER_ERROR, b"quota_bytes")
    assert one.ask(unsubscribe(first)).code == OK
    assert bob.ask(produce(b"bytes", bytes(2 * limit))) == (NOTHING_HAPPENED, b"")
    assert client.ask(delete(b"bytes")).code == OK


def test_recreation_buffer_is_charged_to_the_creator(
    bus: BusProcess, client: Client, guests: Guests
):
    alice = guests.speaker(ALICE)
    alice.ask(create(b"buffer"))
    key = alice.subscribe(b"buffer")
    alice.ask(delete(b"buffer"))
    alice.ask(create(b"buffer"))
    assert client.ask(produce(b"buffer", bytes(1000))).code == OK
    assert client.ask(produce(b"buffer", b"x")) == (SERVER_ERROR, b"quota_bytes")
    assert alice.ask(get(key)).code == OK
    assert client.ask(produce(b"buffer", b"x")) == (SERVER_ERROR, b"quota_bytes")
    reader = client.subscribe(b"buffer")  # root's quota is larger: it takes over all of it
    assert client.ask(get(reader)) == (OK, bytes(1000))
    assert client.ask(produce(b"buffer", bytes(1000))).code == OK
    client.ask(unsubscribe(reader))
    assert alice.ask(delete(b"buffer")).code == OK


@pytest.mark.parametrize(("uid", "limit"), [(ALICE, 4), (CAROL, 6)])
def test_connection_over_quota_is_closed_at_once(
    bus: BusProcess, users: dict[int, User], uid: int, limit: int
):
    before = held(bus)
    speakers = [Speaker(users[uid], bus) for _ in range(limit)]
    assert [one.ask(list_topics()).code for one in speakers] == [OK] * limit
    refused = counter(bus, "refused", "quota_connections")
    with pytest.raises((EOFError, RuntimeError)):
        Speaker(users[uid], bus).answer()
    assert counter(bus, "refused", "quota_connections") == refused + 1
    said(bus, event="quota reached", quota="quota_connections", user=f"uid:{uid}")
    other = Speaker(users[BOB], bus)  # others are not touched
    assert other.ask(list_topics()).code == OK
    other.link.close()
    speakers.pop().link.close()
    until(lambda: held(bus) == before + limit - 1, "its place is free")
    speakers.append(Speaker(users[uid], bus))
    assert speakers[-1].ask(list_topics()).code == OK
    for one in speakers:
        one.link.close()
    until(lambda: held(bus) == before, "all are gone")
