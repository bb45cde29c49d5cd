"""Subscriptions and broadcasts of GSB on a bus in memory, and the call log."""

from __future__ import annotations

import json

import pytest

from polybus.bus.policy import Policy
from polybus.bus.rule_table import PlacedRule
from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.limits import GsbLimits
from polybus.model.access_rule import Rule
from polybus.model.identity import Identity
from polybus.model.limits import KIB, Limits
from polybus.model.topic import ALL
from tests.rig import freud_client, rqueue_client
from tests.rig.gsb_memory_peer import MemoryPeer
from tests.rig.memory_bus import MemoryBus

ALICE = Identity(1, groups=frozenset())


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(Limits(outbox_high_water_bytes=2 * KIB), durable=True)


def codes(peer: MemoryPeer) -> list[int]:
    """Return the codes of the replies to broadcasts."""
    return [
        packet.broadcast_reply.code
        for packet in peer.packets()
        if packet.WhichOneof("kind") == "broadcast_reply"
    ]


@pytest.mark.parametrize("is_unix", [False, True])
def test_broadcast_reaches_every_subscriber_including_the_sender(bus, is_unix):
    sender, other = MemoryPeer(bus, identity=ALICE), MemoryPeer(bus, is_unix=is_unix)
    assert [sender.subscribe("news"), other.subscribe("news"), other.subscribe("news")] == [0, 0, 0]
    sender.broadcast("news", b"hi", caller="forged")
    message = other.next("broadcast_request")
    assert (message.topic, message.data, message.caller) == ("news", b"hi", "local:1")
    assert sorted(sender.kinds()) == ["broadcast_reply", "broadcast_request"]
    assert other.kinds() == []


def test_broadcast_without_subscribers_succeeds(bus):
    peer = MemoryPeer(bus)
    peer.broadcast("unknown")
    assert codes(peer) == [0]


@pytest.mark.parametrize("topic", ["", "a,b", "a*", "_probe", "x" * 256, "a\nb"])
def test_invalid_topic_name_is_refused(bus, topic):
    peer = MemoryPeer(bus)
    assert peer.subscribe(topic) == 400
    peer.broadcast(topic)
    assert codes(peer) == [400]


def test_unsubscribe_ends_the_subscription(bus):
    peer = MemoryPeer(bus)
    peer.subscribe("news")
    peer.send(unsubscribe_request=pb.UnsubscribeRequest(topic="news"))
    assert peer.next("unsubscribe_reply").code == 0
    peer.send(unsubscribe_request=pb.UnsubscribeRequest(topic="news"))
    assert peer.next("unsubscribe_reply").code == 404
    MemoryPeer(bus).broadcast("news")
    assert peer.kinds() == []


def test_rules_of_topics_apply():
    bus = MemoryBus(policy=Policy())
    rules = [Rule.parse("deny user:1 produce,subscribe news")]
    bus.broker.policy.replace([PlacedRule(rule, "config", rule.who.number) for rule in rules])
    peer = MemoryPeer(bus, identity=ALICE)
    assert peer.subscribe("news") == 403
    peer.broadcast("news")
    assert codes(peer) == [403]


def test_subscriptions_per_connection_are_limited():
    bus = MemoryBus(Limits(max_subscriptions_per_connection=1))
    peer = MemoryPeer(bus)
    assert [peer.subscribe("a"), peer.subscribe("b")] == [0, 403]
    assert bus.stats("refused", "max_subscriptions_per_connection") == 1


@pytest.mark.needs(dialect="rqueue")
def test_rqueue_and_gsb_receive_each_others_messages(bus):
    peer, queue = MemoryPeer(bus), bus.connect()
    peer.subscribe("news")
    queue.deliver(rqueue_client.subscribe(b"news"))
    queue.deliver(rqueue_client.publish(b"news", b"from rqueue"))
    message = peer.next("broadcast_request")
    assert (message.topic, message.data, message.caller) == ("news", b"from rqueue", "")
    peer.broadcast("news", b"from gsb")
    assert b"from gsb" in bytes(queue.taken)
    assert peer.next("broadcast_request").caller == "local:anonymous"
    assert peer.next("broadcast_reply").code == 0
    queue.deliver(rqueue_client.publish(b"news", b"again"))
    assert peer.next("broadcast_request").caller == ""


@pytest.mark.needs(dialect="freud")
def test_freud_reads_broadcasts(bus):
    peer, reader = MemoryPeer(bus), bus.connect_freud()
    reader.deliver(freud_client.create(b"news") + freud_client.subscribe(b"news"))
    subscriber = bytes(reader.taken[-16:])
    peer.broadcast("news", b"from gsb")
    reader.deliver(freud_client.get(subscriber, 0))
    assert bytes(reader.taken).endswith(b"from gsb")


def test_full_subscriber_loses_broadcasts_and_blocks_no_producer(bus):
    slow, quick, sender = MemoryPeer(bus), MemoryPeer(bus), MemoryPeer(bus)
    slow.subscribe("news")
    quick.subscribe("news")
    slow.pipe.appetite = 0
    body = b"x" * (256 * KIB)
    for _ in range(8):
        sender.broadcast("news", body)
    assert codes(sender) == [0] * 8
    assert len(quick.packets()) == 8
    slow.pipe.eat()
    assert len(slow.packets()) == 4  # including the one that exceeded the mark
    assert bus.stats("dropped", "subscriber_full") == 4


@pytest.mark.needs(dialect="rqueue")
def test_full_rqueue_reader_halts_its_producers(bus):
    peer, queue = MemoryPeer(bus), bus.connect(appetite=0)
    queue.deliver(rqueue_client.subscribe(b"news"))
    for _ in range(4):
        peer.broadcast("news", b"x" * KIB)
    assert not peer.is_read
    queue.eat()
    bus.turn()
    assert peer.is_read
    assert codes(peer) == [0] * 4


# --- durable topics


def test_durable_broadcast_is_answered_and_delivered_after_its_commit(bus):
    bus.make("log")
    peer, other = MemoryPeer(bus), MemoryPeer(bus)
    other.subscribe("log")
    peer.broadcast("log", b"kept")
    peer.send(register_request=pb.RegisterRequest(service_id="greeter"))
    assert peer.kinds() == []  # replies keep the order of their requests
    assert other.kinds() == []
    bus.settle()
    assert peer.kinds() == ["broadcast_reply", "register_reply"]
    assert other.next("broadcast_request").data == b"kept"


def received(peer: MemoryPeer) -> list[tuple[bytes, str]]:
    """Return data and sender of the broadcasts that a peer has received."""
    messages = [packet.broadcast_request for packet in peer.packets()]
    return [(message.data, message.caller) for message in messages]


@pytest.mark.needs(dialect="rqueue")
def test_subscribers_of_a_durable_topic_receive_the_sender(bus):
    bus.make("log")
    alice, other, queue, reader = (
        MemoryPeer(bus, identity=ALICE),
        MemoryPeer(bus),
        bus.connect(),
        MemoryPeer(bus),
    )
    early = bus.connect()
    early.deliver(rqueue_client.subscribe(b"log"))
    reader.subscribe("log")
    alice.broadcast("log", b"1", caller="forged")
    alice.broadcast("log", b"2")
    queue.deliver(rqueue_client.publish(b"log", b"3"))
    other.broadcast("log", b"4")
    alice.broadcast("log", b"5")
    bus.settle()
    assert received(reader) == [
        (b"1", "local:1"),
        (b"2", "local:1"),
        (b"3", ""),
        (b"4", "local:anonymous"),
        (b"5", "local:1"),
    ]
    assert bytes(early.taken).count(b"log") == 5
    queue.deliver(rqueue_client.publish(b"log", b"6"))
    bus.settle()
    assert received(reader) == [(b"6", "")]
    assert len(bus.gsb.senders) == 0  # all subscribers have read the messages


def test_message_read_before_its_commit_is_processed_has_its_sender(bus):
    bus.make("log")
    alice, reader = MemoryPeer(bus, identity=ALICE), MemoryPeer(bus)
    reader.subscribe("log")
    held = []
    soon = bus.durable.publisher._soon
    bus.durable.publisher._soon = held.append
    alice.broadcast("log", b"1")
    bus.settle()
    assert received(reader) == []
    alice.broadcast("log", b"2")
    bus.settle()
    bus.durable.publisher._soon = soon
    held.pop(0)()
    bus.settle()
    assert received(reader) == [(b"1", "local:1")]  # does not wait for a later commit
    held.pop()()
    bus.settle()
    assert received(reader) == [(b"2", "local:1")]


def test_subscriber_behind_the_tail_receives_the_sender(bus):
    bus.make("log")
    alice, first = MemoryPeer(bus, identity=ALICE), MemoryPeer(bus)
    first.subscribe("log")
    alice.broadcast("log", b"1")
    bus.commit()
    bus.turn()
    second = MemoryPeer(bus)
    second.subscribe("log")
    alice.broadcast("log", b"2")
    bus.commit()  # visible before the read of the first is done
    bus.settle()
    assert received(first) == [(b"1", "local:1"), (b"2", "local:1")]
    assert received(second) == [(b"2", "local:1")]
    alice.broadcast("log", b"3")
    bus.settle()
    assert len(bus.gsb.senders) == 0


def test_known_senders_are_bounded(bus, monkeypatch):
    monkeypatch.setattr("polybus.dialects.gsb.server.sender_tracker.MAX_KNOWN", 2)
    bus.make("log")
    alice, reader = MemoryPeer(bus, identity=ALICE), MemoryPeer(bus)
    reader.subscribe("log")
    for body in (b"1", b"2", b"3"):
        alice.broadcast("log", body)
    bus.settle()
    assert received(reader) == [(b"1", ""), (b"2", "local:1"), (b"3", "local:1")]


def test_sender_of_a_message_without_readers_is_not_tracked(bus):
    bus.make("log")
    alice, reader = MemoryPeer(bus, identity=ALICE), MemoryPeer(bus)
    alice.broadcast("log", b"1")
    bus.settle()
    assert len(bus.gsb.senders) == 0
    reader.subscribe("log")
    alice.broadcast("log", b"2")
    reader.pipe.hang_up()
    bus.settle()
    assert len(bus.gsb.senders) == 0


def test_uncommitted_bytes_are_bounded():
    bus = MemoryBus(Limits(max_uncommitted_bytes=10 * KIB), durable=True)
    bus.make("log")
    peer = MemoryPeer(bus)
    for _ in range(4):
        peer.broadcast("log", b"x" * 4 * KIB)
    assert not peer.is_read
    bus.settle()
    assert codes(peer) == [0] * 4
    assert peer.is_read


@pytest.mark.parametrize("behind", ["broadcasts", "others"])
def test_replies_pending_for_a_commit_are_bounded(behind):
    bus = MemoryBus(Limits(max_uncommitted_bytes=10 * KIB), durable=True)
    bus.make("log")
    peer = MemoryPeer(bus)
    peer.broadcast("log", b"x")
    for _ in range(200):
        if behind == "broadcasts":
            peer.broadcast("log", b"")
        else:
            peer.send(register_request=pb.RegisterRequest(service_id="greeter"))
    assert not peer.is_read
    bus.settle()
    assert len(peer.packets()) == 201
    assert peer.is_read


def test_uncommitted_broadcasts_of_a_lost_connection_are_stored():
    bus = MemoryBus(Limits(max_uncommitted_bytes=10 * KIB), durable=True)
    bus.make("log")
    peer = MemoryPeer(bus)
    for _ in range(6):
        peer.broadcast("log", b"x" * 4 * KIB)
    assert not peer.is_read
    peer.pipe.hang_up()
    bus.settle()
    durable = bus.durable.topics
    assert durable is not None
    assert durable.store.bounds(durable.get("log").number).next_id == 7


def test_denied_durable_broadcast_is_refused(bus):
    bus.broker.policy.replace([PlacedRule(Rule.parse("deny everyone produce log"), "config", None)])
    bus.make("log")
    peer = MemoryPeer(bus)
    peer.broadcast("log")
    assert codes(peer) == [403]


# --- the call log


def rows(bus: MemoryBus) -> list[dict[str, object]]:
    bus.pass_time(1)
    bus.settle()
    durable = bus.durable.topics
    assert durable is not None
    topic = durable.get("gsb.calls")
    read = durable.store.read(topic.number, ALL, 1, None, max_rows=10_000, max_bytes=1 << 24)
    ends = memoryview(read.body_offsets).cast("B").cast("i")
    bodies = bytes(read.bodies)
    return [json.loads(bodies[ends[n] : ends[n + 1]]) for n in range(read.count)]


def test_every_call_is_logged():
    bus = MemoryBus(gsb=GsbLimits(audit=True), durable=True)
    bus.settle()
    service, caller = MemoryPeer(bus), MemoryPeer(bus, identity=ALICE)
    service.register("greeter")
    caller.call("/local/greeter/many", "1", b"four")
    call_id = service.called().request_id
    bus.pass_time(0.5)
    service.reply(call_id, b"123", partial=True)
    service.reply(call_id, b"45")
    caller.call("unknown", "2", b"x")
    caller.call("greeter", "3")
    service.reply(service.called().request_id, b"", code=500)
    caller.call("greeter", "4")
    caller.cancel("4")
    caller.call("sys/ping", "5", b"abc")
    logged = rows(bus)
    assert [(row["address"], row["service"], row["code"]) for row in logged] == [
        ("greeter/many", "greeter", 0),
        ("unknown", "", 404),
        ("greeter", "greeter", 500),
        ("greeter", "greeter", 499),
        ("sys/ping", "sys/ping", 0),
    ]
    first = logged[0]
    assert first["caller"] == "local:1"
    assert (first["request_bytes"], first["reply_bytes"], first["replies"]) == (4, 5, 2)
    assert first["duration_ms"] == pytest.approx(500, abs=1)


def test_logged_calls_are_committed_in_batches_and_in_order(monkeypatch):
    monkeypatch.setattr("polybus.dialects.gsb.server.call_log.BATCH", 10)  # more than a tick brings
    bus = MemoryBus(gsb=GsbLimits(audit=True), durable=True)
    bus.settle()
    service, caller = MemoryPeer(bus), MemoryPeer(bus)
    service.register("greeter")
    for n in range(200):
        if n % 7:
            caller.call("greeter", str(n), b"x" * (n % 7))
            service.reply(service.called().request_id)
        else:
            caller.call("unknown", str(n), b"x" * (n % 7))
    logged = rows(bus)
    assert [row["request_bytes"] for row in logged] == [n % 7 for n in range(200)]
    assert bus.stats("dropped") == {}


def test_logged_calls_over_the_limit_are_dropped_and_counted(monkeypatch):
    monkeypatch.setattr("polybus.dialects.gsb.server.call_log.MAX_PENDING", 10)
    bus = MemoryBus(gsb=GsbLimits(audit=True), durable=True)
    bus.settle()
    caller = MemoryPeer(bus)
    for n in range(25):
        caller.call("sys/ping", str(n))
        bus.pass_time(0.25)  # nothing is committed
    assert len(rows(bus)) == 10
    assert bus.stats("dropped", "audit_overflow") == 15


def test_logged_address_is_escaped():
    bus = MemoryBus(gsb=GsbLimits(audit=True), durable=True)
    bus.settle()
    MemoryPeer(bus).call('"quoted\\\n', "1")
    assert rows(bus)[0]["address"] == '"quoted\\\n'


def test_oversized_call_is_logged():
    bus = MemoryBus(gsb=GsbLimits(audit=True, max_packet_bytes=KIB), durable=True)
    bus.settle()
    caller = MemoryPeer(bus, identity=ALICE)
    caller.call("greeter/many", "1", b"x" * (5 * KIB))
    row = rows(bus)[0]
    assert (row["address"], row["request_bytes"], row["code"]) == (
        "greeter/many",
        5 * KIB,
        413,
    )


@pytest.mark.parametrize("size", [KIB, 3 * KIB])
def test_long_address_is_truncated_in_the_log(size):
    bus = MemoryBus(gsb=GsbLimits(audit=True, max_packet_bytes=2 * KIB), durable=True)
    bus.settle()
    MemoryPeer(bus).call("a" * size, "1")
    assert rows(bus)[0]["address"] == "a" * 512


def test_calls_are_not_logged_by_default():
    bus = MemoryBus(durable=True)
    caller = MemoryPeer(bus)
    caller.call("sys/ping")
    bus.pass_time(1)
    assert bus.durable.topics.find("gsb.calls") is None
