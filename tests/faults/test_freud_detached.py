"""Freud's subscriptions without a connection, bodies of any content, frames without an end.

A one-shot client subscribes, exits, and comes back with its id. Its subscription must get every
message, belong to its user alone, and never take room from those that are connected.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from polybus.server.admin_client import ask
from polybus.testing.bus_process import BusProcess
from tests.faults.freud_live import Speaker, connect, serving, started
from tests.rig.freud_client import (
    DOESNT_EXIST,
    NOTHING_HAPPENED,
    NOTICE,
    OK,
    SERVER_ERROR,
    count,
    create,
    delete,
    frame,
    get,
    get_record,
    number,
    produce,
    record,
    subscribe,
    unsubscribe,
)
from tests.rig.observer import count as counter
from tests.rig.observer import log_lines, until
from tests.rig.second_user import User

QUOTA_BYTES, QUOTA_SUBSCRIPTIONS = 1000, 4
UNFINISHED_S = 1.0
CONFIG = f"""
[quotas]
quota_bytes = {QUOTA_BYTES}
quota_subscriptions = {QUOTA_SUBSCRIPTIONS}
[limits]
unfinished_frame_s = {UNFINISHED_S}
"""
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can change its uid")


@pytest.fixture
def bus() -> Iterator[BusProcess]:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        Path(file.name).write_text(CONFIG)
        with serving("--config", file.name) as running:
            yield running


def subscribe_and_leave(bus: BusProcess, topic: bytes) -> bytes:
    """Subscribe on a connection that ends; returns once the subscription is detached."""
    before = counter(bus, "freud", "detached")
    with connect(bus) as one_shot:
        one_shot.ask(create(topic))
        key = one_shot.subscribe(topic)
    until(lambda: counter(bus, "freud", "detached") == before + 1, "it is detached")
    return key


@pytest.mark.sabotage("detached-dropped", expects="subscription was lost with its connection")
def test_one_shot_client_gets_every_message_of_its_subscription():
    bodies = [b"%d" % number for number in range(20)]
    with serving() as bus:
        with connect(bus) as one_shot:
            one_shot.ask(create(b"t"))
            key = one_shot.subscribe(b"t")
        with connect(bus) as producer:
            for body in bodies[:10]:
                producer.ask(produce(b"t", body))
            received = []
            for _ in range(5):  # a connection for each two messages
                with connect(bus) as again:
                    received += [again.ask(get(key)).payload for _ in range(2)]
                    producer.ask(produce(b"t", bodies[len(received) // 2 + 9]))
            with connect(bus) as again:
                answers = [again.ask(get(key)) for _ in range(6)]
                received += [answer.payload for answer in answers[:5]]
            assert received == bodies[:15], "the subscription was lost with its connection"
            assert answers[5].code == NOTHING_HAPPENED
            assert producer.ask(unsubscribe(key)).code == OK


@pytest.mark.sabotage(
    "detached-never-evicted", expects="refused because of a detached subscription"
)
def test_produce_is_never_refused_because_of_a_detached_subscription(bus: BusProcess):
    old, new = subscribe_and_leave(bus, b"old"), subscribe_and_leave(bus, b"new")
    with connect(bus) as client:
        client.ask(create(b"live"))
        key = client.subscribe(b"live")
        for topic in (b"old", b"new", b"live"):
            assert client.ask(produce(topic, bytes(300))).code == OK
        answer = client.ask(produce(b"live", bytes(200)))
        assert answer.code == OK, "a Produce was refused because of a detached subscription"
        assert client.ask(get(old)).code == DOESNT_EXIST
        # With what is attached alone it does not fit: refused, and none is evicted for it.
        assert client.ask(produce(b"live", bytes(501))) == (SERVER_ERROR, b"quota_bytes")
        assert counter(bus, "freud", "evicted") == 1
        assert counter(bus, "dropped", "evicted") == 1
        (line,) = log_lines(bus, event="subscription evicted")
        assert (line["topic"], line["messages_lost"]) == ("old", 1)
        # The last subscriber goes, and no message is kept for it.
        assert client.ask(produce(b"new", bytes(600))) == (NOTHING_HAPPENED, b"")
        assert client.ask(get(new)).code == DOESNT_EXIST
        assert [len(client.ask(get(key)).payload) for _ in range(2)] == [300, 200]
        assert number(client.ask(count(b"live"))) == 1


@pytest.mark.sabotage("newest-evicted-first", expects="not the oldest")
def test_oldest_detached_subscription_makes_room_for_a_new_one(bus: BusProcess):
    keys = [subscribe_and_leave(bus, b"t") for _ in range(QUOTA_SUBSCRIPTIONS)]
    with connect(bus) as client:
        assert client.ask(get(keys[0])).code == NOTHING_HAPPENED
    until(lambda: counter(bus, "freud", "detached") == QUOTA_SUBSCRIPTIONS, "it is detached again")
    with connect(bus) as client:
        client.subscribe(b"t")
        client.subscribe(b"t")
        codes = [client.ask(get(key)).code for key in keys]
        # The first one was used last.
        evicted = [code == DOESNT_EXIST for code in codes]
        assert evicted == [False, True, True, False], "the evicted ones are not the oldest"
        # Those two are attached now, so there is no room to make.
        assert client.ask(subscribe(b"t")) == (SERVER_ERROR, b"quota_subscriptions")
        assert counter(bus, "freud", "evicted") == 2


@needs_root
@pytest.mark.sabotage("ids-work-for-all", expects="another user continued with the subscription")
def test_detached_subscription_belongs_to_its_user(bus: BusProcess):
    with User(4242) as alice, User(4343) as bob:
        first = Speaker(alice, bus)
        first.ask(create(b"t"))
        key = first.subscribe(b"t")
        first.link.close()
        until(lambda: counter(bus, "freud", "detached") == 1, "it is detached")
        thief, owner = Speaker(bob, bus), Speaker(alice, bus)
        assert thief.ask(produce(b"t", b"for alice")).code == OK
        for request in (get(key), get_record(key), unsubscribe(key)):
            stolen = thief.ask(request)
            assert stolen.code == DOESNT_EXIST, "another user continued with the subscription"
        assert owner.ask(get(key)) == (OK, b"for alice")
        thief.link.close()
        owner.link.close()


@needs_root
@pytest.mark.sabotage("detached-outlive-rights", expects="outlived the right to it")
def test_revoked_right_ends_a_detached_subscription(bus: BusProcess):
    with User(4242) as alice:
        first = Speaker(alice, bus)
        first.ask(create(b"t"))
        key = first.subscribe(b"t")
        first.link.close()
        until(lambda: counter(bus, "freud", "detached") == 1, "it is detached")
        ask(bus.admin_path, "acl_add", rule="deny user:4242 subscribe t")
        assert counter(bus, "freud", "subscriptions") == 0, "it outlived the right to it"
        ask(bus.admin_path, "acl_rm", rule="deny user:4242 subscribe t")
        again = Speaker(alice, bus)
        assert again.ask(get(key)).code == DOESNT_EXIST
        again.link.close()


def test_deleted_topic_gives_its_notice_to_a_client_that_comes_back(bus: BusProcess):
    key = subscribe_and_leave(bus, b"t")
    with connect(bus) as client:
        client.ask(produce(b"t", b"last"))
        assert client.ask(delete(b"t")).code == OK
        assert client.ask(get(key)) == (OK, b"last")
        assert client.ask(get(key)) == (OK, NOTICE + b"t")
        assert client.ask(get(key)).code == DOESNT_EXIST


def test_restart_ends_detached_subscriptions():
    with started() as bus:
        key = subscribe_and_leave(bus, b"t")
        bus.stop()
    with serving() as bus, connect(bus) as client:
        assert client.ask(get(key)).code == DOESNT_EXIST


@pytest.mark.sabotage("bodies-unescaped", expects="was taken for a deletion notice")
def test_every_body_arrives_and_none_is_taken_for_a_notice(bus: BusProcess):
    bodies = [NOTICE, NOTICE + b"t", b"\0FREUD\0", b"\0FREUD\0BODY\0", b"\0FREUD\0BODY\0x", b"\0"]
    with connect(bus) as client:
        client.ask(create(b"t"))
        one, two = client.subscribe(b"t"), client.subscribe(b"t")
        for body in bodies:
            assert client.ask(produce(b"t", body)).code == OK
        for body in bodies:
            payload = client.ask(get(one)).payload
            assert not payload.startswith(NOTICE), f"{body!r} was taken for a deletion notice"
            assert payload == (b"\0FREUD\0BODY\0" + body if body[:7] == b"\0FREUD\0" else body)
            assert (record(client.ask(get_record(two))).body, payload[-1:]) == (body, body[-1:])
        # Pipelined, in both forms and between others.
        client.send(*(produce(b"t", body) for body in [b"a", *bodies, b"b"]))
        client.answers(len(bodies) + 2)
        client.send(*[get(one)] * 8)
        together = [answer.payload for answer in client.answers(8)]
        assert [payload.removeprefix(b"\0FREUD\0BODY\0") for payload in together] == [
            b"a",
            *bodies,
            b"b",
        ]
        client.ask(delete(b"t"))
        assert client.ask(get(one)) == (OK, NOTICE + b"t")


@pytest.mark.sabotage("unfinished-unreported", expects="the log has no line")
def test_unfinished_frame_is_logged_once_with_the_missing_bytes_and_the_cause(bus: BusProcess):
    key = bytes(16)
    # As freudctl writes it: 24 for the 20 bytes of a Get Message.
    original = frame(5, key + bytes(4))[:4] + (24).to_bytes(4, "little") + key + bytes(4)
    with connect(bus) as freudctl, connect(bus) as stopped, connect(bus) as whole:
        freudctl.send(original)
        stopped.send(frame(4, bytes(100))[:50])
        whole.send(get(key))
        assert whole.answers(1)[0].code == DOESNT_EXIST

        def lines() -> list[dict[str, object]]:
            return log_lines(bus, event="unfinished frame", dialect="freud")

        until(lambda: len(lines()) == 2, "the log has no line for each unfinished frame")
        assert counter(bus, "connections", "unfinished_frames", "freud") == 2
        causes = {line["missing_bytes"]: line for line in lines()}
        assert "length=with-header" in str(causes[4]["likely_cause"])
        assert causes[4]["received_bytes"] == 28
        assert "stopped" in str(causes[58]["likely_cause"])
        # The connection lives: the rest may still come.
        stopped.send(frame(4, bytes(100))[50:])
        assert len(stopped.answers(1)) == 1
        stopped.send(frame(4, bytes(100))[:9])
        until(lambda: len(lines()) == 3, "the log has no line for the next unfinished frame")
        assert counter(bus, "connections", "unfinished_frames", "freud") == 3
