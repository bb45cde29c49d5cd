"""One GSB connection of a bus in memory: its packets, and the packets that close it."""

from __future__ import annotations

import pytest

from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb import sp
from polybus.dialects.gsb.limits import GsbLimits
from polybus.model.limits import KIB
from tests.rig.gsb_memory_peer import MemoryPeer, Reply
from tests.rig.memory_bus import MemoryBus

MAX = 8 * KIB
LIMITS = GsbLimits(max_packet_bytes=MAX, ping_idle_s=30, ping_timeout_s=120)


@pytest.fixture
def bus(padding) -> MemoryBus:
    return MemoryBus(gsb=LIMITS, gsb_padding=padding)


# --- greeting and frames


def test_bus_sends_its_greeting_first(bus):
    pipe = bus.connect_gsb()
    assert bytes(pipe.taken) == sp.GREETING


@pytest.mark.parametrize(
    "greeting", [b"\0SP\1\0\x10\0\0", b"\0SP\0\0\x11\0\0", b"\0SP\0\0\x30\0\0", b"GET / HTTP"]
)
def test_bad_greeting_closes_the_connection(bus, greeting):
    pipe = bus.connect_gsb()
    pipe.deliver(greeting)
    assert pipe.closed
    assert bus.close_reasons == {sp.BAD_GREETING: 1}


@pytest.mark.parametrize("is_unix", [False, True])
def test_greeting_and_calls_may_arrive_byte_by_byte(bus, is_unix):
    service = MemoryPeer(bus)
    service.register("greeter")
    pipe = bus.connect_gsb(is_unix=is_unix)
    call = pb.ServiceCallRequest(address="greeter", request_id="1", data=b"x" * 300)
    payload = pb.Packet(service_call_request=call).SerializeToString()
    for byte in sp.GREETING + 2 * sp.frame(payload, sp.Form(is_unix)):
        pipe.deliver(bytes([byte]))
    assert service.called().data == b"x" * 300
    assert service.kinds() == []  # the second call is refused: its id is in use


def test_ipc_frame_without_mark_closes_the_connection(bus):
    peer = MemoryPeer(bus, is_unix=True)
    peer.pipe.deliver(b"\2")
    assert bus.close_reasons == {sp.BAD_FRAME: 1}


# --- packets that end the connection


def packed(**kind: object) -> bytes:
    return pb.Packet(**kind).SerializeToString()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "no_packet"),
        (b"\xff\xff\xff", "no_packet"),
        (b"\x32\x7f", "no_packet"),  # a truncated call
        (b"\x32\x03\x0a\x01\xff", "no_packet"),  # an address that is not UTF-8
        (b"\x98\x06\x01", "no_packet"),  # only an unknown field
        (packed(register_reply=pb.RegisterReply()), "wrong_direction"),
        (packed(unregister_reply=pb.UnregisterReply()), "wrong_direction"),
        (packed(subscribe_reply=pb.SubscribeReply()), "wrong_direction"),
        (packed(unsubscribe_reply=pb.UnsubscribeReply()), "wrong_direction"),
        (packed(broadcast_reply=pb.BroadcastReply()), "wrong_direction"),
        (packed(call_request=pb.CallRequest(request_id="1")), "wrong_direction"),
        (packed(credit=pb.Credit(request_id="1", replies=1)), "wrong_direction"),
        (packed(call_reply=pb.CallReply(request_id="1", type=2)), "bad_reply_type"),  # type: ignore[arg-type]
        (packed(call_reply=pb.CallReply(request_id="1", type=-1)), "bad_reply_type"),  # type: ignore[arg-type]
    ],
)
def test_packet_that_no_client_may_send_closes_the_connection(bus, payload, reason):
    peer = MemoryPeer(bus)
    peer.register("greeter")
    peer.send_payload(payload)
    assert peer.pipe.closed
    assert bus.close_reasons == {reason: 1}
    assert MemoryPeer(bus).register("greeter") == 0


def test_hello_after_the_first_packet_closes_the_connection(bus):
    first = MemoryPeer(bus, deadline_ms=1)
    first.send(hello=pb.Hello())
    late = MemoryPeer(bus)
    late.register("x")
    late.send(hello=pb.Hello())
    assert bus.close_reasons == {"second_hello": 2}


def test_unknown_fields_are_ignored(bus):
    service, caller = MemoryPeer(bus), MemoryPeer(bus)
    service.register("greeter")
    inner = pb.ServiceCallRequest(address="greeter", request_id="1", data=b"x").SerializeToString()
    later = inner + b"\xf8\x3f\x07"  # field 1023
    caller.send_payload(b"\x32" + bytes([len(later)]) + later + b"\xf8\x3f\x07")
    request = service.called()
    assert request.data == b"x"
    reply = pb.CallReply(request_id=request.request_id, data=b"y").SerializeToString()
    service.send_payload(b"\x3a" + bytes([len(reply) + 3]) + reply + b"\xf8\x3f\x07")
    assert caller.replies() == [Reply("1", 0, 0, b"y")]


def test_last_of_several_kinds_counts_as_in_protobuf(bus):
    peer = MemoryPeer(bus)
    ping = packed(ping=pb.Ping(token=b"a"))
    peer.send_payload(packed(cancel=pb.Cancel(request_id="1")) + ping)
    assert peer.next("pong").token == b"a"


def test_request_id_may_have_any_characters(bus):
    service, caller = MemoryPeer(bus), MemoryPeer(bus)
    service.register("greeter")
    caller.call("greeter", "eins–zwei")
    service.reply(service.called().request_id, b"y")
    assert caller.replies() == [Reply("eins–zwei", 0, 0, b"y")]


# --- oversized packets


def big(n: int = MAX) -> bytes:
    return b"x" * n


def test_packet_of_the_largest_size_is_forwarded(bus):
    service, caller = MemoryPeer(bus), MemoryPeer(bus)
    service.register("greeter")
    overhead = len(caller.encode(pb.Packet(service_call_request=_call(big())))) - MAX
    caller.send(service_call_request=_call(big(MAX - overhead)))
    assert len(service.called().data) == MAX - overhead
    caller.send(service_call_request=_call(big(MAX - overhead + 1), "2"))
    assert caller.failure() == ("2", 413)


def _call(data: bytes, request_id: str = "1") -> pb.ServiceCallRequest:
    return pb.ServiceCallRequest(address="greeter", request_id=request_id, data=data)


def test_oversized_call_is_refused_and_its_connection_continues(bus):
    service, caller = MemoryPeer(bus), MemoryPeer(bus)
    service.register("greeter")
    caller.call("greeter", "1", big(5 * MAX))
    caller.call("greeter", "2", b"small")
    assert caller.failure() == ("1", 413)
    assert service.called().data == b"small"
    assert caller.session.is_open


@pytest.mark.parametrize("step", [1, 100])
def test_request_id_of_an_oversized_call_is_found_at_any_place(bus, step):
    caller = MemoryPeer(bus)
    fields = [b"\x0a\x07greeter", b"\x1a\x81\x80\x01" + big(16385), b"\x12\x03abc", b"\x20\x05"]
    inner = b"".join(fields)
    payload = b"\x32" + _varint(len(inner)) + inner
    data = sp.frame(payload, sp.Form.TCP)
    for at in range(0, len(data), step):
        caller.pipe.deliver(data[at : at + step])
    assert caller.failure() == ("abc", 413)
    caller.call("sys/ping", "2", b"x")
    assert caller.replies() == [Reply("2", 0, 0, b"x")]


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def test_last_of_several_request_ids_counts(bus):
    caller = MemoryPeer(bus)
    inner = b"\x12\x01a" + b"\x1a\x81\x80\x01" + big(16385) + b"\x12\x02bc"
    caller.send_payload(b"\x32" + _varint(len(inner)) + inner)
    assert caller.failure() == ("bc", 413)


@pytest.mark.parametrize(("size", "answered"), [(256, 256), (MAX, MAX), (MAX + 1, 0)])
def test_oversized_call_with_a_long_id_is_refused_and_its_connection_continues(bus, size, answered):
    caller = MemoryPeer(bus)
    caller.send(service_call_request=_call(big(), "i" * size))
    assert caller.failure() == ("i" * answered, 413)
    caller.call("sys/ping", "2", b"x")
    assert caller.replies() == [Reply("2", 0, 0, b"x")]


def test_oversized_reply_with_a_long_id_belongs_to_no_call(bus):
    service = MemoryPeer(bus)
    service.reply("i" * (2 * MAX))
    assert bus.stats("dropped", "unknown_call") == 1
    assert not service.pipe.closed


def test_unknown_fields_of_an_oversized_call_are_skipped(bus):
    caller = MemoryPeer(bus)
    call = packed(service_call_request=_call(big(), "1"))
    unknown = b"\x9a\x06\x02hi" + b"\xa0\x06\x05" + b"\xa5\x06four" + b"\xa1\x06eight..."
    caller.send_payload(unknown + call + unknown)
    assert caller.failure() == ("1", 413)
    inner = unknown + b"\x12\x01a" + b"\x1a\x81\x80\x01" + big(16385) + unknown
    caller.send_payload(b"\x32" + _varint(len(inner)) + inner)
    assert caller.failure() == ("a", 413)


def test_oversized_packet_with_several_calls_is_read_as_protobuf_does(bus):
    caller = MemoryPeer(bus)
    first, second = _call(big(), "1"), pb.ServiceCallRequest(address="x")
    caller.send_payload(packed(service_call_request=first) + packed(service_call_request=second))
    assert caller.failure() == ("1", 413)
    reply = packed(call_reply=pb.CallReply(request_id="1"))
    caller.send_payload(packed(service_call_request=first) + reply)
    assert bus.stats("dropped", "unknown_call") == 1
    caller.send_payload(reply + packed(service_call_request=pb.ServiceCallRequest(data=big())))
    assert caller.failure() == ("", 413)


@pytest.mark.parametrize(
    "payload",
    [
        b"\x32\x05\x12\x04a" + b"\x32\x81\x80\x01" + big(16385),
        b"\x32\x01\x12" + big(),
        b"\x32" + b"\x81\x80\x01" + big(),
        b"\x9a\x06\x81\x80\x01" + big(16385),
        b"\x33" + big(),
        b"\xff" * MAX * 2,
        packed(service_call_request=_call(big(), "1")) + b"\x12",
        b"\x32\x85\x80\x01\x12\x01\xff\x1a\xff\x7f" + big(16383),
    ],
    ids=[
        "field beyond its message", "tag beyond its message", "truncated",
        "no kind", "group", "varint too long", "tag at the end", "id not UTF-8",
    ],
)  # fmt: skip
def test_oversized_payload_that_is_not_a_packet_closes_the_connection(bus, payload):
    peer = MemoryPeer(bus)
    peer.send_payload(payload)
    assert peer.pipe.closed
    assert bus.close_reasons == {"no_packet": 1}


def test_oversized_call_is_not_held_in_memory(bus):
    caller = MemoryPeer(bus)
    payload = packed(service_call_request=_call(big(64 * MAX)))
    caller.pipe.deliver(sp.frame(payload, sp.Form.TCP)[: 32 * MAX])
    assert caller.pipe.unread == 0


def test_oversized_reply_ends_and_cancels_its_call(bus):
    service, caller = MemoryPeer(bus), MemoryPeer(bus)
    service.register("greeter")
    caller.call("greeter")
    call_id = service.called().request_id
    service.reply(call_id, big(2 * MAX), partial=True)
    assert caller.failure() == ("1", 413)
    assert service.next("cancel").request_id == call_id
    service.reply(call_id, big(2 * MAX))
    assert bus.stats("dropped", "unknown_call") == 1
    assert bus.stats("gsb", "open_calls") == 0


@pytest.mark.parametrize(
    "payload",
    [
        packed(broadcast_request=pb.BroadcastRequest(topic="t", data=big())),
        packed(ping=pb.Ping(token=big())),
        packed(cancel=pb.Cancel(request_id="x" * MAX)),
    ],
    ids=["broadcast", "ping", "cancel"],
)
def test_other_oversized_packet_closes_the_connection(bus, payload):
    peer = MemoryPeer(bus)
    peer.send_payload(payload)
    assert peer.pipe.closed
    assert bus.close_reasons == {"too_large": 1}


def test_frame_of_impossible_length_is_not_held_in_memory(bus):
    peer = MemoryPeer(bus)
    peer.pipe.deliver((2**63).to_bytes(8, "big"))
    peer.pipe.deliver(b"\x32\xff\xff\xff\xff\x0f" + big())
    assert peer.pipe.unread == 0


# --- pings


def test_ping_is_answered_with_its_token(bus):
    peer = MemoryPeer(bus)
    peer.send(ping=pb.Ping(token=b"abc"))
    assert peer.next("pong").token == b"abc"


def test_only_peers_that_asked_are_pinged_and_closed(bus):
    quiet, asked = MemoryPeer(bus), MemoryPeer(bus, ping=True)
    bus.pass_time(29)
    assert asked.kinds() == []
    bus.pass_time(2)
    assert asked.kinds() == ["ping"]
    bus.pass_time(20)
    assert asked.kinds() == []
    asked.send(pong=pb.Pong())
    bus.pass_time(100)
    assert asked.kinds() == ["ping"]
    bus.pass_time(30)
    assert asked.pipe.aborted
    assert not quiet.pipe.aborted
    assert quiet.kinds() == []
    assert bus.close_reasons == {"ping_timeout": 1}
    asked.pipe.hang_up()
    assert not bus.gsb.calls.pings.peers


def test_any_packet_is_a_sign_of_life(bus):
    peer = MemoryPeer(bus, ping=True)
    for _ in range(10):
        bus.pass_time(25)
        peer.cancel("x")
    assert peer.kinds() == []


def test_ping_clock_is_stopped_while_the_peer_is_not_read(bus):
    peer = MemoryPeer(bus, ping=True)
    peer.session.halt()
    bus.pass_time(500)
    assert not peer.pipe.aborted
    peer.session.schedule_retry()
    bus.turn()
    bus.pass_time(29)
    assert peer.kinds() == []


# --- ends


def test_half_close_ends_the_session(bus):
    service, caller = MemoryPeer(bus), MemoryPeer(bus)
    service.register("greeter")
    caller.call("greeter")
    service.pipe.shut_down()
    assert caller.failure() == ("1", 503)
    assert service.pipe.closed


def test_connections_lists_services_and_calls(bus):
    service, caller = MemoryPeer(bus), MemoryPeer(bus)
    service.register("greeter")
    caller.call("greeter")
    first, second = bus.connections()
    assert (first["services"], first["serving"], first["open_calls"]) == (1, 1, 0)
    assert (second["services"], second["serving"], second["open_calls"]) == (0, 0, 1)


# --- built-in services


@pytest.mark.parametrize("prefix", ["sys/", "/local/sys/"])
def test_built_in_services(bus, prefix):
    import msgpack

    service, caller = MemoryPeer(bus), MemoryPeer(bus)
    service.register("b")
    service.register("a")
    caller.call("a", "1")
    caller.call(prefix + "services", "2")
    listed = msgpack.unpackb(caller.next("call_reply").data)
    assert [(row["id"], row["calls"], row["pending"]) for row in listed] == [
        ("a", 1, 1),
        ("b", 0, 0),
    ]
    assert listed[0]["since_ms"] == bus.wall_ns() // 1_000_000
    caller.call(prefix + "ping", "3", b"\x93\x01\x02\x03")
    assert caller.next("call_reply").data == b"\x93\x01\x02\x03"
    caller.call(prefix + "stats", "4")
    stats = msgpack.unpackb(caller.next("call_reply").data)
    assert stats["gsb"]["services"] == 2
    service.reply(service.called().request_id)
    caller.packets()
    caller.call(prefix + "services", "5")
    assert msgpack.unpackb(caller.next("call_reply").data)[0]["pending"] == 0


# --- turns


def test_peer_with_many_slow_packets_yields_to_others(bus):
    busy, other = MemoryPeer(bus), MemoryPeer(bus)
    ping = sp.frame(packed(ping=pb.Ping(token=b"x")), sp.Form.TCP)
    busy.pipe.deliver(ping * 1000)
    assert 0 < busy.pipe.unread < 1000 * len(ping)
    other.send_payload(packed(ping=pb.Ping(token=b"y")))  # runs turns until all packets are handled
    assert other.next("pong").token == b"y"
    assert len(busy.packets()) == 1000
    assert busy.is_read


def test_all_packets_received_before_a_hangup_are_handled(bus):
    service, caller = MemoryPeer(bus), MemoryPeer(bus)
    service.register("greeter")
    caller.call("greeter")
    call_id = service.called().request_id
    odd = b"\x98\x06\x01"  # an unknown field sends the packet to the slow path
    partial = pb.CallReply(request_id=call_id, type=pb.PARTIAL)
    data = sp.frame(packed(call_reply=partial) + odd, sp.Form.TCP)
    service.pipe.deliver(data * 1000)
    service.pipe.hang_up()
    assert len(caller.packets()) == 1001


def test_half_close_reported_twice_ends_the_session_once(bus, monkeypatch):
    """With TLS, redelivering the received bytes reports the end again."""
    service, caller = MemoryPeer(bus), MemoryPeer(bus)
    service.register("greeter")
    caller.call("greeter")
    monkeypatch.setattr(service.pipe, "redeliver", service.session.on_half_closed)
    service.pipe.shut_down()
    assert service.pipe.closed
    assert caller.failure() == ("1", 503)


def test_end_of_the_connection_while_it_drains_ends_the_session_once(bus, monkeypatch):
    service, caller = MemoryPeer(bus), MemoryPeer(bus)
    service.register("greeter")
    caller.call("greeter")
    monkeypatch.setattr(service.pipe, "redeliver", service.session.on_ended)
    service.pipe.shut_down()
    assert caller.failure() == ("1", 503)


# --- packets larger than one read

LARGE = b"x" * 150_000
PIECE = 50_000


@pytest.fixture
def roomy(padding) -> MemoryBus:
    limits = GsbLimits(outbox_full_bytes=64 * KIB, outbox_free_bytes=16 * KIB)
    return MemoryBus(gsb=limits, gsb_padding=padding)


def in_pieces(peer: MemoryPeer, payload: bytes, stop: int | None = None) -> None:
    data = sp.frame(payload, peer.form)[:stop]
    for at in range(0, len(data), PIECE):
        peer.pipe.deliver(data[at : at + PIECE])
    peer.bus.turn()


@pytest.mark.parametrize("is_unix", [False, True])
def test_large_call_and_reply_may_arrive_in_pieces(roomy, is_unix):
    service, caller = MemoryPeer(roomy), MemoryPeer(roomy, is_unix=is_unix)
    service.register("greeter")
    in_pieces(caller, packed(service_call_request=_call(LARGE)))
    assert caller.pipe.unread == 0
    request = service.called()
    assert request.data == LARGE
    reply = pb.CallReply(request_id=request.request_id, type=pb.PARTIAL, data=LARGE)
    in_pieces(service, packed(call_reply=reply))
    service.reply(request.request_id)
    assert caller.replies() == [Reply("1", 0, 1, LARGE), Reply("1", 0, 0, b"")]


def test_waiting_large_packet_is_handled_once(roomy):
    service, caller = MemoryPeer(roomy), MemoryPeer(roomy)
    service.register("greeter")
    service.pipe.appetite = 0
    in_pieces(caller, packed(service_call_request=_call(LARGE, "1")))
    in_pieces(caller, packed(service_call_request=_call(LARGE, "2")))
    assert not caller.is_read
    caller.call("sys/ping", "3", b"x")
    assert caller.kinds() == []  # after the waiting call
    service.pipe.eat()
    roomy.turn()
    assert [packet.call_request.data for packet in service.packets()] == [LARGE, LARGE]
    assert caller.replies() == [Reply("3", 0, 0, b"x")]


def test_waiting_large_packet_needs_no_further_bytes(roomy, monkeypatch):
    service, caller = MemoryPeer(roomy), MemoryPeer(roomy)
    service.register("greeter")
    service.pipe.appetite = 0
    for request_id in ("1", "2"):
        in_pieces(caller, packed(service_call_request=_call(LARGE, request_id)))
    assert not caller.is_read
    monkeypatch.setattr(caller.pipe, "_offer", lambda: None)  # the transport has no more bytes
    service.pipe.eat()
    roomy.turn()
    assert len(service.packets()) == 2


def test_waiting_large_reply_is_forwarded_when_its_service_disconnects(roomy):
    service, caller = MemoryPeer(roomy), MemoryPeer(roomy)
    service.register("greeter")
    caller.call("greeter")
    call_id = service.called().request_id
    caller.pipe.appetite = 0
    partial = pb.CallReply(request_id=call_id, type=pb.PARTIAL, data=LARGE)
    for _ in range(2):
        in_pieces(service, packed(call_reply=partial))
    service.pipe.hang_up()
    caller.pipe.eat()
    assert [caller.next("call_reply").data for _ in range(2)] == [LARGE, LARGE]
    assert caller.failure() == ("1", 503)


def test_incomplete_large_packet_is_dropped_with_its_connection(roomy):
    service, caller = MemoryPeer(roomy), MemoryPeer(roomy)
    service.register("greeter")
    in_pieces(caller, packed(service_call_request=_call(LARGE)), stop=140_000)
    caller.pipe.hang_up()
    assert service.kinds() == []


def test_large_payload_that_is_not_a_packet_closes_the_connection(roomy):
    peer = MemoryPeer(roomy)
    in_pieces(peer, b"\xff" * 150_000)
    assert peer.pipe.closed
    assert roomy.close_reasons == {"no_packet": 1}


# --- several packets in one read


def in_one_read(peer: MemoryPeer, *payloads: bytes) -> None:
    peer.pipe.deliver(b"".join(sp.frame(payload, sp.Form(False)) for payload in payloads))


def encoded_call(peer: MemoryPeer, request_id: str) -> bytes:
    call = pb.ServiceCallRequest(address="greeter", request_id=request_id)
    return peer.encode(pb.Packet(service_call_request=call))


def test_call_before_a_bad_packet_reaches_its_service(bus):
    service, caller = MemoryPeer(bus), MemoryPeer(bus)
    service.register("greeter")
    in_one_read(caller, encoded_call(caller, "1"), b"\xff")
    assert caller.pipe.closed
    assert service.kinds() == ["call_request", "cancel"]


def test_reply_before_a_bad_packet_reaches_its_caller(bus):
    peer = MemoryPeer(bus)  # calls itself
    peer.register("greeter")
    peer.call("greeter")
    reply = pb.CallReply(request_id=peer.called().request_id, type=pb.FULL, data=b"hello")
    in_one_read(peer, peer.encode(pb.Packet(call_reply=reply)), b"\xff")
    assert peer.pipe.closed
    assert peer.replies() == [Reply("1", 0, 0, b"hello")]


def test_cancel_reaches_the_service_after_its_call(bus):
    service, caller = MemoryPeer(bus), MemoryPeer(bus)
    service.register("greeter")
    cancel = caller.encode(pb.Packet(cancel=pb.Cancel(request_id="1")))
    in_one_read(caller, encoded_call(caller, "1"), cancel)
    assert service.kinds() == ["call_request", "cancel"]


def test_call_ends_once(bus):
    service, caller = MemoryPeer(bus), MemoryPeer(bus)
    service.register("greeter")
    caller.call("greeter")
    (call,) = caller.session.calls.values()
    ended = [bus.gsb.calls.table.end(call, code) for code in (504, 500)]
    assert ended == [True, False]
    assert bus.stats("gsb", "ended") == {"504": 1}
