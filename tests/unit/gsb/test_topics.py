"""GSB's subscribers and broadcasts on the bus's topics, and the log of calls."""

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
from tests.rig.gsb_memory_peer import Far
from tests.rig.memory_bus import MemoryBus

ALICE = Identity(1, groups=frozenset())


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(Limits(outbox_high_water_bytes=2 * KIB), durable=True)


def codes(far: Far) -> list[int]:
    """Of the replies to broadcasts."""
    return [
        packet.broadcast_reply.code
        for packet in far.packets()
        if packet.WhichOneof("kind") == "broadcast_reply"
    ]


@pytest.mark.parametrize("is_unix", [False, True])
def test_a_broadcast_reaches_every_subscriber_the_sender_included(bus, is_unix):
    sender, other = Far(bus, identity=ALICE), Far(bus, is_unix=is_unix)
    assert [sender.subscribe("news"), other.subscribe("news"), other.subscribe("news")] == [0, 0, 0]
    sender.broadcast("news", b"hi", caller="somebody else")
    heard = other.next("broadcast_request")
    assert (heard.topic, heard.data, heard.caller) == ("news", b"hi", "local:1")
    assert sorted(sender.kinds()) == ["broadcast_reply", "broadcast_request"]
    assert other.kinds() == []


def test_a_broadcast_that_nobody_hears_is_done(bus):
    far = Far(bus)
    far.broadcast("nobody")
    assert codes(far) == [0]


@pytest.mark.parametrize("topic", ["", "a,b", "a*", "_probe", "x" * 256, "a\nb"])
def test_names_that_no_topic_has(bus, topic):
    far = Far(bus)
    assert far.subscribe(topic) == 400
    far.broadcast(topic)
    assert codes(far) == [400]


def test_unsubscribing(bus):
    far = Far(bus)
    far.subscribe("news")
    far.send(unsubscribe_request=pb.UnsubscribeRequest(topic="news"))
    assert far.next("unsubscribe_reply").code == 0
    far.send(unsubscribe_request=pb.UnsubscribeRequest(topic="news"))
    assert far.next("unsubscribe_reply").code == 404
    Far(bus).broadcast("news")
    assert far.kinds() == []


def test_rules_of_topics_hold():
    bus = MemoryBus(policy=Policy())
    rules = [Rule.parse("deny user:1 produce,subscribe news")]
    bus.broker.policy.replace([PlacedRule(rule, "config", rule.who.number) for rule in rules])
    far = Far(bus, identity=ALICE)
    assert far.subscribe("news") == 403
    far.broadcast("news")
    assert codes(far) == [403]


def test_limits_of_subscriptions_are_named():
    bus = MemoryBus(Limits(max_subscriptions_per_connection=1))
    far = Far(bus)
    assert [far.subscribe("a"), far.subscribe("b")] == [0, 403]
    assert bus.stats("refused", "max_subscriptions_per_connection") == 1


def test_rqueue_and_gsb_hear_each_other(bus):
    far, queue = Far(bus), bus.connect()
    far.subscribe("news")
    queue.deliver(rqueue_client.subscribe(b"news"))
    queue.deliver(rqueue_client.publish(b"news", b"from rqueue"))
    heard = far.next("broadcast_request")
    assert (heard.topic, heard.data, heard.caller) == ("news", b"from rqueue", "")
    far.broadcast("news", b"from gsb")
    assert b"from gsb" in bytes(queue.taken)
    assert far.next("broadcast_request").caller == "local:anonymous"
    assert far.next("broadcast_reply").code == 0
    queue.deliver(rqueue_client.publish(b"news", b"again"))
    assert far.next("broadcast_request").caller == ""


def test_freud_reads_broadcasts(bus):
    far, reader = Far(bus), bus.connect_freud()
    reader.deliver(freud_client.create(b"news") + freud_client.subscribe(b"news"))
    subscriber = bytes(reader.taken[-16:])
    far.broadcast("news", b"from gsb")
    reader.deliver(freud_client.get(subscriber, 0))
    assert bytes(reader.taken).endswith(b"from gsb")


def test_a_full_subscriber_loses_broadcasts_and_holds_up_nobody(bus):
    slow, quick, sender = Far(bus), Far(bus), Far(bus)
    slow.subscribe("news")
    quick.subscribe("news")
    slow.pipe.appetite = 0
    body = b"x" * (256 * KIB)
    for _ in range(8):
        sender.broadcast("news", body)
    assert codes(sender) == [0] * 8
    assert len(quick.packets()) == 8
    slow.pipe.eat()
    assert len(slow.packets()) == 4  # with the one that went over the mark
    assert bus.stats("dropped", "subscriber_full") == 4


def test_a_full_reader_of_rqueue_makes_its_writers_wait(bus):
    far, queue = Far(bus), bus.connect(appetite=0)
    queue.deliver(rqueue_client.subscribe(b"news"))
    for _ in range(4):
        far.broadcast("news", b"x" * KIB)
    assert not far.is_read
    queue.eat()
    bus.turn()
    assert far.is_read
    assert codes(far) == [0] * 4


# --- durable topics


def test_a_durable_broadcast_is_answered_and_heard_when_it_is_on_disk(bus):
    bus.make("log")
    far, other = Far(bus), Far(bus)
    other.subscribe("log")
    far.broadcast("log", b"kept")
    far.send(register_request=pb.RegisterRequest(service_id="greeter"))
    assert far.kinds() == []  # replies keep the order of their requests
    assert other.kinds() == []
    bus.settle()
    assert far.kinds() == ["broadcast_reply", "register_reply"]
    assert other.next("broadcast_request").data == b"kept"


def heard(far: Far) -> list[tuple[bytes, str]]:
    """What was broadcast to it, and by whom."""
    found = [packet.broadcast_request for packet in far.packets()]
    return [(one.data, one.caller) for one in found]


def test_subscribers_of_a_durable_topic_are_told_who_sent_it(bus):
    bus.make("log")
    alice, other, queue, reader = Far(bus, identity=ALICE), Far(bus), bus.connect(), Far(bus)
    early = bus.connect()
    early.deliver(rqueue_client.subscribe(b"log"))
    reader.subscribe("log")
    alice.broadcast("log", b"1", caller="somebody else")
    alice.broadcast("log", b"2")
    queue.deliver(rqueue_client.publish(b"log", b"3"))
    other.broadcast("log", b"4")
    alice.broadcast("log", b"5")
    bus.settle()
    assert heard(reader) == [
        (b"1", "local:1"),
        (b"2", "local:1"),
        (b"3", ""),
        (b"4", "local:anonymous"),
        (b"5", "local:1"),
    ]
    assert bytes(early.taken).count(b"log") == 5
    queue.deliver(rqueue_client.publish(b"log", b"6"))
    bus.settle()
    assert heard(reader) == [(b"6", "")]
    assert len(bus.gsb.senders) == 0  # nothing is remembered that all have heard


def test_who_sent_it_is_known_though_it_was_read_before_its_commit_was_heard_of(bus):
    bus.make("log")
    alice, reader = Far(bus, identity=ALICE), Far(bus)
    reader.subscribe("log")
    kept = []
    soon = bus.durable.publisher._soon
    bus.durable.publisher._soon = kept.append
    alice.broadcast("log", b"1")
    bus.settle()
    assert heard(reader) == []
    alice.broadcast("log", b"2")
    bus.settle()
    bus.durable.publisher._soon = soon
    kept.pop(0)()
    bus.settle()
    assert heard(reader) == [(b"1", "local:1")]  # it waits for no later one
    kept.pop()()
    bus.settle()
    assert heard(reader) == [(b"2", "local:1")]


def test_who_joins_behind_the_tail_is_told_too(bus):
    bus.make("log")
    alice, first = Far(bus, identity=ALICE), Far(bus)
    first.subscribe("log")
    alice.broadcast("log", b"1")
    bus.commit()
    bus.turn()
    second = Far(bus)
    second.subscribe("log")
    alice.broadcast("log", b"2")
    bus.commit()  # visible before the read of the first is done
    bus.settle()
    assert heard(first) == [(b"1", "local:1"), (b"2", "local:1")]
    assert heard(second) == [(b"2", "local:1")]
    alice.broadcast("log", b"3")
    bus.settle()
    assert len(bus.gsb.senders) == 0


def test_what_is_remembered_is_bounded(bus, monkeypatch):
    monkeypatch.setattr("polybus.dialects.gsb.server.sender_tracker.MAX_KNOWN", 2)
    bus.make("log")
    alice, reader = Far(bus, identity=ALICE), Far(bus)
    reader.subscribe("log")
    for body in (b"1", b"2", b"3"):
        alice.broadcast("log", body)
    bus.settle()
    assert heard(reader) == [(b"1", ""), (b"2", "local:1"), (b"3", "local:1")]


def test_who_has_sent_what_nobody_hears_is_not_remembered(bus):
    bus.make("log")
    alice, reader = Far(bus, identity=ALICE), Far(bus)
    alice.broadcast("log", b"1")
    bus.settle()
    assert len(bus.gsb.senders) == 0
    reader.subscribe("log")
    alice.broadcast("log", b"2")
    reader.pipe.hang_up()
    bus.settle()
    assert len(bus.gsb.senders) == 0


def test_what_is_on_its_way_to_the_disk_is_bounded():
    bus = MemoryBus(Limits(max_uncommitted_bytes=10 * KIB), durable=True)
    bus.make("log")
    far = Far(bus)
    for _ in range(4):
        far.broadcast("log", b"x" * 4 * KIB)
    assert not far.is_read
    bus.settle()
    assert codes(far) == [0] * 4
    assert far.is_read


@pytest.mark.parametrize("behind", ["broadcasts", "others"])
def test_answers_that_wait_for_the_disk_are_bounded(behind):
    bus = MemoryBus(Limits(max_uncommitted_bytes=10 * KIB), durable=True)
    bus.make("log")
    far = Far(bus)
    far.broadcast("log", b"x")
    for _ in range(200):
        if behind == "broadcasts":
            far.broadcast("log", b"")
        else:
            far.send(register_request=pb.RegisterRequest(service_id="greeter"))
    assert not far.is_read
    bus.settle()
    assert len(far.packets()) == 201
    assert far.is_read


def test_what_waits_for_the_disk_is_kept_though_its_sender_has_gone():
    bus = MemoryBus(Limits(max_uncommitted_bytes=10 * KIB), durable=True)
    bus.make("log")
    far = Far(bus)
    for _ in range(6):
        far.broadcast("log", b"x" * 4 * KIB)
    assert not far.is_read
    far.pipe.hang_up()
    bus.settle()
    durable = bus.durable.topics
    assert durable is not None
    assert durable.store.bounds(durable.get("log").number).next_id == 7


def test_a_durable_broadcast_may_be_refused(bus):
    bus.broker.policy.replace([PlacedRule(Rule.parse("deny everyone produce log"), "config", None)])
    bus.make("log")
    far = Far(bus)
    far.broadcast("log")
    assert codes(far) == [403]


# --- the log of calls


def rows(bus: MemoryBus) -> list[dict[str, object]]:
    bus.pass_time(1)
    bus.settle()
    durable = bus.durable.topics
    assert durable is not None
    topic = durable.get("gsb.calls")
    found = durable.store.read(topic.number, ALL, 1, None, max_rows=10_000, max_bytes=1 << 24)
    ends = memoryview(found.body_offsets).cast("B").cast("i")
    bodies = bytes(found.bodies)
    return [json.loads(bodies[ends[n] : ends[n + 1]]) for n in range(found.count)]


def test_every_call_is_a_message_of_the_log():
    bus = MemoryBus(gsb=GsbLimits(audit=True), durable=True)
    bus.settle()
    service, caller = Far(bus), Far(bus, identity=ALICE)
    service.register("greeter")
    caller.call("/local/greeter/many", "1", b"four")
    call_id = service.called().request_id
    bus.pass_time(0.5)
    service.reply(call_id, b"123", partial=True)
    service.reply(call_id, b"45")
    caller.call("nobody", "2", b"x")
    caller.call("greeter", "3")
    service.reply(service.called().request_id, b"", code=500)
    caller.call("greeter", "4")
    caller.cancel("4")
    caller.call("sys/ping", "5", b"abc")
    found = rows(bus)
    assert [(row["address"], row["service"], row["code"]) for row in found] == [
        ("greeter/many", "greeter", 0),
        ("nobody", "", 404),
        ("greeter", "greeter", 500),
        ("greeter", "greeter", 499),
        ("sys/ping", "sys/ping", 0),
    ]
    first = found[0]
    assert first["caller"] == "local:1"
    assert (first["request_bytes"], first["reply_bytes"], first["replies"]) == (4, 5, 2)
    assert first["duration_ms"] == pytest.approx(500, abs=1)


def test_many_calls_are_written_in_pieces_in_their_order(monkeypatch):
    monkeypatch.setattr("polybus.dialects.gsb.server.call_log.BATCH", 10)  # more than a tick brings
    bus = MemoryBus(gsb=GsbLimits(audit=True), durable=True)
    bus.settle()
    service, caller = Far(bus), Far(bus)
    service.register("greeter")
    for n in range(200):
        if n % 7:
            caller.call("greeter", str(n), b"x" * (n % 7))
            service.reply(service.called().request_id)
        else:
            caller.call("nobody", str(n), b"x" * (n % 7))
    found = rows(bus)
    assert [row["request_bytes"] for row in found] == [n % 7 for n in range(200)]
    assert bus.stats("dropped") == {}


def test_what_the_disk_does_not_take_is_dropped_and_counted(monkeypatch):
    monkeypatch.setattr("polybus.dialects.gsb.server.call_log.MAX_PENDING", 10)
    bus = MemoryBus(gsb=GsbLimits(audit=True), durable=True)
    bus.settle()
    caller = Far(bus)
    for n in range(25):
        caller.call("sys/ping", str(n))
        bus.pass_time(0.25)  # nothing is committed
    assert len(rows(bus)) == 10
    assert bus.stats("dropped", "audit_overflow") == 15


def test_an_address_of_any_text_is_told():
    bus = MemoryBus(gsb=GsbLimits(audit=True), durable=True)
    bus.settle()
    Far(bus).call('"quoted\\\n', "1")
    assert rows(bus)[0]["address"] == '"quoted\\\n'


def test_a_call_that_was_too_large_is_told():
    bus = MemoryBus(gsb=GsbLimits(audit=True, max_packet_bytes=KIB), durable=True)
    bus.settle()
    caller = Far(bus, identity=ALICE)
    caller.call("greeter/many", "1", b"x" * (5 * KIB))
    found = rows(bus)[0]
    assert (found["address"], found["request_bytes"], found["code"]) == (
        "greeter/many",
        5 * KIB,
        413,
    )


@pytest.mark.parametrize("size", [KIB, 3 * KIB])
def test_of_a_long_address_the_beginning_is_told(size):
    bus = MemoryBus(gsb=GsbLimits(audit=True, max_packet_bytes=2 * KIB), durable=True)
    bus.settle()
    Far(bus).call("a" * size, "1")
    assert rows(bus)[0]["address"] == "a" * 512


def test_without_the_setting_there_is_no_log():
    bus = MemoryBus(durable=True)
    caller = Far(bus)
    caller.call("sys/ping")
    bus.pass_time(1)
    assert bus.durable.topics.find("gsb.calls") is None
