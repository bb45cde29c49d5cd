"""Connections of the deployed framing on a bus in memory, beside those of GSB's own."""

from __future__ import annotations

import pytest

from polybus.bus.policy import Policy
from polybus.bus.rule_table import PlacedRule
from polybus.dialects.gsb.limits import GsbLimits
from polybus.model.access_rule import Rule
from polybus.model.identity import Identity
from polybus.model.limits import KIB
from tests.rig import ya_wire
from tests.rig.gsb_memory_peer import MemoryPeer, Reply
from tests.rig.gsb_wire import read_failure
from tests.rig.memory_bus import MemoryBus
from tests.rig.ya_memory_peer import YaMemoryPeer
from tests.rig.ya_wire import (
    BROADCAST,
    BROADCAST_REPLY,
    PARTIAL,
    PING,
    PONG,
    REGISTER_REPLY,
    SUBSCRIBE,
    UNREGISTER,
    UNSUBSCRIBE,
)
from tests.vectors import ya as golden

MAX = 8 * KIB
LIMITS = GsbLimits(max_packet_bytes=MAX, ping_idle_s=30, ping_timeout_s=120)


@pytest.fixture
def bus(padding) -> MemoryBus:
    return MemoryBus(gsb=LIMITS, gsb_padding=padding)


# --- hello


def test_hello_is_answered_with_the_one_of_the_bus(bus):
    first, second = YaMemoryPeer(bus), YaMemoryPeer(bus)
    assert first.hello.text(1) == "polybus"
    assert len(first.hello.data(3)) == 16
    assert first.hello == second.hello


def test_bus_sends_nothing_before_the_hello(bus):
    pipe = bus.connect_ya()
    bus.turn()
    assert not pipe.taken


@pytest.mark.parametrize(
    "frame",
    [vector.frame for vector in golden.VECTORS if vector.kind != "hello"]
    + [b"\xff\xff\xff\xff", (MAX + 1).to_bytes(4, "big")],
)
def test_other_first_packets_close_the_connection(bus, frame):
    pipe = bus.connect_ya()
    pipe.deliver(frame)
    assert pipe.closed
    assert bus.close_reasons == {"no_hello": 1}


def test_second_hello_closes_the_connection(bus):
    peer = YaMemoryPeer(bus)
    peer.send(ya_wire.hello())
    assert peer.pipe.closed
    assert bus.close_reasons == {"second_hello": 1}


def test_long_instance_id_closes_the_connection(bus):
    pipe = bus.connect_ya()
    pipe.deliver(ya_wire.hello(b"x" * 256))
    assert bus.close_reasons == {"bad_hello": 1}


def test_connection_replaces_an_earlier_one_of_its_instance(bus):
    first = YaMemoryPeer(bus, instance=b"client")
    assert first.register("/local/greeter") == 0
    YaMemoryPeer(bus, instance=b"other")
    assert not first.pipe.closed
    second = YaMemoryPeer(bus, instance=b"client")
    assert first.pipe.closed
    assert bus.close_reasons == {"replaced": 1}
    assert second.register("/local/greeter") == 0


def test_other_user_replaces_no_connection(bus):
    first = YaMemoryPeer(bus, instance=b"client", identity=Identity(uid=1))
    YaMemoryPeer(bus, instance=b"client", identity=Identity(uid=2))
    assert not first.pipe.closed


# --- frames


def test_packets_may_arrive_byte_by_byte(bus):
    service = MemoryPeer(bus)
    service.register("greeter")
    pipe = bus.connect_ya()
    for byte in ya_wire.hello() + ya_wire.call("/local/greeter", "1", b"x" * 300):
        pipe.deliver(bytes([byte]))
    assert service.called().data == b"x" * 300


def test_many_packets_may_arrive_at_once(bus):
    service = YaMemoryPeer(bus)
    assert service.register("/local/greeter") == 0
    caller = YaMemoryPeer(bus)
    caller.send(*(ya_wire.call("/local/greeter", str(number)) for number in range(500)))
    assert len(service.packets()) == 500


def test_large_packet_arrives_in_pieces():
    bus = MemoryBus()
    service, caller = YaMemoryPeer(bus), YaMemoryPeer(bus)
    service.register("/local/greeter")
    data = bytes(range(256)) * 1024
    frame = ya_wire.call("/local/greeter", "1", data)
    for at in range(0, len(frame), 50_000):
        caller.send(frame[at : at + 50_000])
    assert service.called().data(4) == data


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "no_packet"),
        (b"\xff\xff\xff", "no_packet"),
        (b"\x32\x05\x12\x7fxxx", "no_packet"),
        (b"\x32\x04\x12\x02\xff\xfe", "no_packet"),  # an address that is not UTF-8
        (b"\x82\x01\x00", "no_packet"),  # kind 16
        (golden.BY_NAME["register_reply"].payload, "wrong_direction"),
        (golden.BY_NAME["broadcast_reply"].payload, "wrong_direction"),
        (ya_wire.reply("x", kind=2)[4:], "bad_reply_type"),
    ],
)
def test_bad_payload_closes_the_connection(bus, payload, reason):
    peer = YaMemoryPeer(bus)
    peer.send(len(payload).to_bytes(4, "big") + payload)
    assert peer.pipe.closed
    assert bus.close_reasons == {reason: 1}


def test_call_over_the_limit_is_refused_and_the_connection_lives(bus):
    service, caller = MemoryPeer(bus), YaMemoryPeer(bus)
    service.register("greeter")
    for piece in (
        ya_wire.call("/local/greeter", "1", b"x" * MAX),
        ya_wire.call("/local/greeter", "2"),
    ):
        for at in range(0, len(piece), 1000):
            caller.send(piece[at : at + 1000])
    ((request_id, code, kind, text),) = caller.replies()
    assert (request_id, code, kind) == ("1", 400, 0)
    assert text.startswith(b"413 ")
    assert service.called().data == b""


def test_reply_over_the_limit_ends_its_call(bus):
    service, caller = YaMemoryPeer(bus), MemoryPeer(bus)
    service.register("/local/greeter")
    caller.call("greeter")
    service.reply(service.called(), b"x" * MAX)
    assert caller.failure() == ("1", 413)


def test_other_packet_over_the_limit_closes_the_connection(bus):
    peer = YaMemoryPeer(bus)
    peer.send(ya_wire.frame(BROADCAST, {2: b"x" * MAX, 3: "t"}))
    assert peer.pipe.closed
    assert bus.close_reasons == {"too_large": 1}


# --- services


@pytest.mark.parametrize(
    ("service_id", "code"),
    [
        ("/local/greeter", 0),
        ("/public/market", 0),
        ("echo", 0),
        ("/local/public/market", 400),
        ("/local/net", 400),
        ("/local/sys/x", 400),
        ("/net/0x" + "ab" * 20, 400),
        ("/net/0x" + "ab" * 20 + "/x", 400),
        ("/from/x", 400),
        ("/local", 400),
        ("/", 400),
        ("", 400),
        ("/local/a//b", 400),
    ],
)
def test_names_that_can_be_registered(bus, service_id, code):
    assert YaMemoryPeer(bus).register(service_id) == code


def test_name_is_taken_on_both_framings(bus):
    first, second, third = MemoryPeer(bus), YaMemoryPeer(bus), YaMemoryPeer(bus)
    assert first.register("greeter") == 0
    assert second.register("/local/greeter") == 409
    assert second.register("/public/market") == 0
    assert first.register("public/market") == 409
    assert third.register("/public/market") == 409


def test_unregister_releases_a_name(bus):
    peer = YaMemoryPeer(bus)
    peer.register("/local/greeter")
    assert peer.request(UNREGISTER, "/local/greeter") == 0
    assert peer.request(UNREGISTER, "/local/greeter") == 404
    assert peer.request(UNREGISTER, "/nowhere") == 404
    assert MemoryPeer(bus).register("greeter") == 0


def test_denied_registration_is_a_bad_request():
    bus = MemoryBus(policy=Policy())
    rule = Rule.parse("deny everyone create secret")
    bus.broker.policy.replace([PlacedRule(rule, "config", None)])
    peer = YaMemoryPeer(bus)
    peer.send(ya_wire.frame(ya_wire.REGISTER, {1: "/local/secret"}))
    reply = peer.next(REGISTER_REPLY)
    assert reply.number(1) == 400
    assert "not allowed" in reply.text(2)


# --- calls


def test_call_from_one_framing_to_the_other(bus):
    service, caller = MemoryPeer(bus), YaMemoryPeer(bus)
    service.register("greeter")
    caller.call("/local/greeter/Hello", "77", b"data")
    request = service.called()
    assert (request.address, request.caller) == ("greeter/Hello", "local:anonymous")
    assert request.data == b"data"
    service.reply(request.request_id, b"one", partial=True)
    service.reply(request.request_id, b"two")
    assert caller.replies() == [("77", 0, PARTIAL, b"one"), ("77", 0, 0, b"two")]


def test_call_the_other_way(bus):
    service, caller = YaMemoryPeer(bus), MemoryPeer(bus)
    service.register("/public/market")
    for number in ("1", "2"):  # the second one by a cached route
        caller.call("public/market/Get", number, b"data")
        request = service.called()
        assert request.text(1) == "local:anonymous"
        assert request.text(2) == "/public/market/Get"
        assert request.data(4) == b"data"
        assert request.number(5) == 0
        service.reply(request, b"one", kind=PARTIAL)
        service.reply(request, b"two")
        assert caller.replies() == [Reply(number, 0, 1, b"one"), Reply(number, 0, 0, b"two")]
    assert bus.stats("gsb", "open_calls") == 0


def test_service_gets_addresses_as_it_was_registered(bus):
    service, caller = YaMemoryPeer(bus), YaMemoryPeer(bus)
    service.register("echo")
    caller.call("/local/echo/a")
    assert service.called().text(2) == "echo/a"
    caller.call("echo", "2")
    assert service.called().text(2) == "echo"


def test_replies_of_both_framings_share_a_caller(bus):
    caller = YaMemoryPeer(bus)
    native, ya = MemoryPeer(bus), YaMemoryPeer(bus)
    native.register("a")
    ya.register("/local/b")
    caller.send(ya_wire.call("/local/a", "1"), ya_wire.call("/local/b", "2"))
    ya.reply(ya.called(), b"b")
    native.reply(native.called().request_id, b"a")
    assert caller.replies() == [("2", 0, 0, b"b"), ("1", 0, 0, b"a")]


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("/local/nothing", b"404 "),
        ("/public/nothing", b"404 "),
        ("/net/0x" + "11" * 20 + "/x", b"404 "),
        ("/net/x/y", b"400 "),
        ("/net/0x" + "11" * 20, b"400 "),
        ("/from/a/to/b", b"400 "),
        ("/local/public/x", b"400 "),
        ("", b"400 "),
    ],
)
def test_call_without_a_service_is_a_bad_request(bus, address, text):
    caller = YaMemoryPeer(bus)
    caller.call(address)
    ((request_id, code, kind, data),) = caller.replies()
    assert (request_id, code, kind) == ("1", 400, 0)
    assert data.startswith(text)


def test_request_id_in_use_is_a_bad_request(bus):
    service, caller = YaMemoryPeer(bus), YaMemoryPeer(bus)
    service.register("/local/x")
    caller.call("/local/x")
    caller.call("/local/x")
    ((_, code, _, data),) = caller.replies()
    assert (code, data[:4]) == (400, b"409 ")
    service.reply(service.called(), b"done")
    assert caller.replies() == [("1", 0, 0, b"done")]


def test_own_service_answers_through_the_bus(bus):
    caller = YaMemoryPeer(bus)
    caller.call("/local/sys/ping", "1", b"\x01")
    assert caller.replies() == [("1", 0, 0, b"\x01")]
    bus_id = bus.gsb.network.node_id
    service = YaMemoryPeer(bus)
    service.register("/public/x")
    caller.call(f"/net/{bus_id}/x", "2")  # the own node's id means local
    assert service.called().text(2) == "/public/x"


# --- failures


def test_failure_of_a_service_here_is_a_text_there(bus):
    service, caller = MemoryPeer(bus), YaMemoryPeer(bus)
    service.register("x")
    caller.call("/local/x")
    failure = b"\x83\xa4code\xcd\x01\xf4\xa7message\xa4boom\xa6origin\xa7service"
    service.reply(service.called().request_id, failure, code=500)
    assert caller.replies() == [("1", 500, 0, b"boom")]


@pytest.mark.parametrize("code", [400, 500, 77])
def test_failure_of_a_service_there_is_a_map_here(bus, code):
    service, caller = YaMemoryPeer(bus), MemoryPeer(bus)
    service.register("/local/x")
    caller.call("x")
    service.reply(service.called(), b"boom", code=code)
    (reply,) = caller.replies()
    assert (reply.code, reply.type) == (500, 0)
    assert read_failure(reply.data) == (400 if code == 400 else 500, "boom", "service")


def test_unknown_code_reaches_no_client(bus):
    service, caller = MemoryPeer(bus), YaMemoryPeer(bus)
    service.register("x")
    caller.call("/local/x")
    service.reply(service.called().request_id, b"text", code=-3)
    assert caller.replies() == [("1", 500, 0, b"text")]


def test_service_that_goes_ends_its_calls(bus):
    service, caller = YaMemoryPeer(bus), YaMemoryPeer(bus)
    service.register("/local/x")
    caller.call("/local/x")
    service.pipe.hang_up()
    ((_, code, _, data),) = caller.replies()
    assert (code, data[:4]) == (500, b"503 ")
    assert YaMemoryPeer(bus).register("/local/x") == 0


def test_caller_that_goes_cancels_its_calls(bus):
    service, caller = MemoryPeer(bus), YaMemoryPeer(bus)
    service.register("x")
    caller.call("/local/x")
    call_id = service.called().request_id
    caller.pipe.hang_up()
    assert service.next("cancel").request_id == call_id
    assert bus.stats("gsb", "open_calls") == 0


def test_cancelled_service_there_gets_no_packet(bus):
    service, caller = YaMemoryPeer(bus), MemoryPeer(bus)
    service.register("/local/x")
    caller.call("x")
    request = service.called()
    caller.cancel()
    assert caller.failure() == ("1", 499)
    assert service.packets() == []
    service.reply(request, b"late")
    assert bus.stats("dropped", "unknown_call") == 1
    assert not service.pipe.closed


def test_deadline_ends_a_call(bus):
    service, caller = YaMemoryPeer(bus), YaMemoryPeer(bus)
    service.register("/local/x")
    caller.call("/local/x")
    bus.pass_time(59)
    caller.next(PING)
    assert caller.replies() == []
    bus.pass_time(2)
    ((_, code, _, data),) = caller.replies()
    assert (code, data[:4]) == (500, b"504 ")


# --- calls without a reply


def push(address: str) -> bytes:
    return ya_wire.call(address, "17", b"data", no_reply=1)


def test_call_without_a_reply_to_a_service_there(bus):
    service, caller = YaMemoryPeer(bus), YaMemoryPeer(bus)
    service.register("/local/x")
    caller.send(push("/local/x"), push("/local/x"))  # with one id, which no reply will have
    for _ in range(2):
        request = service.called()
        assert request.number(5) == 1
        assert request.data(4) == b"data"
    assert bus.stats("gsb", "open_calls") == 0
    assert bus.stats("gsb", "ended") == {"0": 2}
    service.reply(request, b"unwanted")
    assert caller.packets() == []


def test_call_without_a_reply_to_a_service_here(bus):
    service, caller = MemoryPeer(bus), YaMemoryPeer(bus)
    service.register("x")
    caller.send(push("/local/x"))
    request = service.called()
    assert request.data == b"data"
    service.reply(request.request_id, b"one", partial=True)
    service.reply(request.request_id, b"two")
    assert caller.packets() == []
    assert bus.stats("gsb", "open_calls") == 0


@pytest.mark.parametrize("address", ["/local/nothing", "/from/x", ""])
def test_refusal_of_a_call_without_a_reply_is_silent(bus, address):
    caller = YaMemoryPeer(bus)
    caller.send(push(address))
    assert caller.packets() == []
    assert not caller.pipe.closed


# --- back-pressure


def test_full_caller_stops_a_service_there(bus):
    service, other = YaMemoryPeer(bus), MemoryPeer(bus)
    service.register("/local/x")
    caller = YaMemoryPeer(bus, appetite=100)
    caller.call("/local/x")
    other.call("x")
    first, second = service.called(), service.called()
    for _ in range(400):
        if not service.is_read:
            break
        service.reply(first, b"x" * 4000, kind=PARTIAL)
    assert not service.is_read
    service.reply(second, b"for the other")
    assert other.packets() == []  # that connection is not read
    caller.pipe.eat()
    bus.turn()
    assert service.is_read
    assert other.replies() == [Reply("1", 0, 0, b"for the other")]


def test_full_caller_gets_no_credit_from_a_service_here(bus):
    service = MemoryPeer(bus, credits=True)
    service.register("x")
    caller = YaMemoryPeer(bus, appetite=100)
    caller.call("/local/x")
    request = service.called()
    sent = 0
    while service.is_read and sent < 10_000:
        service.reply(request.request_id, b"x" * 4000, partial=True)
        sent += 1
    assert not service.is_read  # it has used up its credit
    caller.pipe.eat()
    bus.turn()
    assert service.is_read
    service.reply(request.request_id, b"end")
    received = caller.packets()[1:]  # after the hello
    assert [packet.number(3) for packet in received] == [PARTIAL] * sent + [0]


def test_full_service_stops_its_callers(bus):
    service, caller = YaMemoryPeer(bus), YaMemoryPeer(bus)
    service.register("/local/x")
    service.pipe.appetite = 0
    number = 0
    while caller.is_read and number < 1000:
        caller.send(ya_wire.call("/local/x", str(number), b"x" * 4000))
        number += 1
    assert not caller.is_read
    service.pipe.eat()
    bus.turn()
    assert caller.is_read
    assert len(service.packets()) == number


# --- topics


def test_broadcasts_between_framings(bus):
    here, there = MemoryPeer(bus), YaMemoryPeer(bus)
    assert here.subscribe("news") == 0
    assert there.request(SUBSCRIBE, "news") == 0
    there.send(ya_wire.frame(BROADCAST, {1: "forged", 2: b"one", 3: "news"}))
    message = here.next("broadcast_request")
    assert (message.topic, message.data, message.caller) == ("news", b"one", "local:anonymous")
    own, reply = sorted(there.packets())
    assert (own.text(1), own.data(2), own.text(3)) == ("local:anonymous", b"one", "news")
    assert (reply.kind, reply.number(1)) == (BROADCAST_REPLY, 0)
    here.broadcast("news", b"two" * 100)
    message = there.next(BROADCAST)
    assert (message.data(2), message.text(3)) == (b"two" * 100, "news")


def test_broadcast_frame_is_that_of_protobuf(bus):
    sender = MemoryPeer(bus, identity=Identity(node="0x" + "ab" * 20))
    sender.session.caller_name = b"0x" + b"ab" * 20
    there = YaMemoryPeer(bus)
    there.request(SUBSCRIBE, "news")
    before = len(there.pipe.taken)
    sender.broadcast("news", b"\xa2hi")
    bus.turn()
    assert bytes(there.pipe.taken[before:]) == golden.BY_NAME["broadcast_request"].frame


def test_codes_of_topics(bus):
    peer = YaMemoryPeer(bus)
    assert peer.request(SUBSCRIBE, "a,b") == 400
    assert peer.request(UNSUBSCRIBE, "news") == 404
    assert peer.request(SUBSCRIBE, "news") == 0
    assert peer.request(SUBSCRIBE, "news") == 0
    assert peer.request(UNSUBSCRIBE, "news") == 0
    peer.send(ya_wire.frame(BROADCAST, {2: b"x", 3: "a,b"}))
    assert peer.next(BROADCAST_REPLY).number(1) == 400


def test_full_subscriber_loses_broadcasts(bus):
    sender, subscriber = MemoryPeer(bus), YaMemoryPeer(bus)
    subscriber.request(SUBSCRIBE, "news")
    subscriber.pipe.appetite = 0
    for _ in range(400):
        sender.broadcast("news", b"x" * 4000)
    assert bus.stats("dropped", "subscriber_full") > 0


# --- pings


def test_ping_is_answered(bus):
    peer = YaMemoryPeer(bus)
    peer.send(ya_wire.frame(PING))
    assert peer.next(PONG).fields == {}


def test_silent_peer_is_pinged_and_then_dropped(bus):
    peer, silent = YaMemoryPeer(bus), YaMemoryPeer(bus)
    bus.pass_time(31)
    peer.next(PING)
    peer.send(ya_wire.frame(PONG))
    silent.next(PING)
    bus.pass_time(95)
    assert silent.pipe.aborted or silent.pipe.closed
    assert not peer.pipe.closed
    assert bus.close_reasons == {"ping_timeout": 1}


# --- what the bus shows


def test_connections_are_listed_by_the_name_of_their_listener(bus):
    peer = YaMemoryPeer(bus)
    peer.register("/local/x")
    (row,) = bus.connections()
    assert (row["dialect"], row["services"]) == ("gsb+ya", 1)


def test_audit_has_calls_of_this_framing():
    bus = MemoryBus(gsb=GsbLimits(audit=True), durable=True)
    bus.settle()
    service, caller = YaMemoryPeer(bus), YaMemoryPeer(bus)
    service.register("/local/x")
    caller.send(ya_wire.call("/local/x/y", "1"), push("/local/x"))
    service.reply(service.called())
    log = bus.gsb.calls.table.log
    assert log is not None
    assert sorted(call.address for call, _, _ in log) == [b"x", b"x/y"]
