"""Calls between nodes on a bus in memory, in packets of the usual form and of another."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polybus.bus.policy import Policy
from polybus.bus.rule_table import PlacedRule
from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb import sp
from polybus.dialects.gsb.codec import BAD_RELAY
from polybus.dialects.gsb.limits import GsbLimits
from polybus.dialects.gsb.network import announcement
from polybus.dialects.gsb.network.node_key import NodeKey
from polybus.model.access_rule import Rule
from tests.rig.gsb_link_peer import MemoryLink
from tests.rig.gsb_memory_peer import UNKNOWN_FIELD, MemoryPeer, Reply
from tests.rig.gsb_wire import read_failure
from tests.rig.memory_bus import MemoryBus

A, C, UNKNOWN = NodeKey(b"a" * 32), NodeKey(b"c" * 32), NodeKey(b"u" * 32)
MAX_PACKET_BYTES = 4096


def new_bus(padding: bytes) -> MemoryBus:
    limits = GsbLimits(max_open_calls=8, max_packet_bytes=MAX_PACKET_BYTES)
    bus = MemoryBus(gsb=limits, policy=Policy(), gsb_padding=padding)
    allow = Rule.parse("allow node:* call public/*")
    bus.broker.policy.replace([PlacedRule(allow, "config", None)])
    return bus


class Network:
    """The bus with a service and a caller of its own, and links to the nodes A and C."""

    def __init__(self, padding: bytes) -> None:
        self.bus = new_bus(padding)
        self.service, self.caller = MemoryPeer(self.bus), MemoryPeer(self.bus)
        assert self.service.register("public/echo") == 0
        self.a, self.c = MemoryLink(self.bus, A), MemoryLink(self.bus, C)
        self.bus.pass_time(1)
        self.a.packets(), self.c.packets()

    def warm_up(self) -> None:
        """Make one call on each way, by which the bus resolves the addresses."""
        self.a.send_call(self.a.call("public/echo"))
        self.a.send_call(self.a.call("public/x", C.node_id))
        self.caller.call(f"/net/{C.node_id}/public/x", "warm")
        self.service.reply(self.service.called().request_id)
        for packet in self.c.packets():
            self.c.peer.reply(packet.relay_call.request_id)
        self.a.packets(), self.caller.replies()


@pytest.fixture
def network(padding) -> Network:
    made = Network(padding)
    made.warm_up()
    return made


def one_reply(link: MemoryLink) -> Reply:
    (packet,) = link.packets()
    reply = packet.call_reply
    return Reply(reply.request_id, int(reply.code), int(reply.type), reply.data)


def test_a_call_of_another_node_reaches_a_service_and_is_answered(network):
    call = network.a.call("public/echo/now", data=b"hello")
    network.a.send_call(network.a.call("public/echo", data=b"data"))
    request = network.service.called()
    assert (request.data, request.address) == (b"data", "public/echo")
    assert request.caller == A.node_id
    network.service.reply(request.request_id, b"some", partial=True)
    network.service.reply(request.request_id, b"more")
    assert [packet.call_reply.data for packet in network.a.packets()] == [b"some", b"more"]
    assert call.address == "public/echo/now"


def test_a_call_of_this_node_is_signed_for_its_target(network):
    network.caller.call(f"/net/{C.node_id}/public/x", "7", b"data")
    (packet,) = network.c.packets()
    call = packet.relay_call
    assert (call.data, call.address, call.hops) == (b"data", "public/x", 1)
    assert (call.deadline_ms, call.free_partials) == (60_000, 64)
    assert network.c.signer.check(call, network.c.heard[network.c.bus_id])
    assert not network.c.signer.check(call, network.c.heard[network.c.bus_id])  # once
    network.c.peer.reply(call.request_id, b"reply")
    assert network.caller.replies() == [Reply("7", 0, 0, b"reply")]


def test_a_call_between_two_other_nodes_is_passed_on_unchanged(network):
    sent = network.a.call("public/x", C.node_id, b"data", hops=3, deadline_ms=70_000)
    network.a.send_call(sent)
    (packet,) = network.c.packets()
    passed = packet.relay_call
    network.c.peer.reply(passed.request_id, b"reply", code=500)
    assert one_reply(network.a) == Reply(sent.request_id, 500, 0, b"reply")
    assert passed.request_id != sent.request_id
    passed.request_id, passed.hops = sent.request_id, passed.hops - 1
    assert passed == sent


def test_a_repeated_call_is_refused(network):
    call = network.a.call("public/echo")
    network.a.send_call(call)
    network.service.reply(network.service.called().request_id)
    network.a.packets()
    call.request_id = "again"
    network.a.send_call(call)
    assert read_failure(one_reply(network.a).data).code == 403
    assert network.service.packets() == []


def test_a_call_of_a_node_that_announces_an_invalid_key_is_refused(network):
    sequence, links = 1 << 62, (network.a.bus_id,)
    fields = A.public, bytes(32), network.a.instance, sequence, links
    signature = A.sign(announcement.PURPOSE, *announcement._signed_parts(*fields))
    announced = announcement.Announcement(*fields, signature)
    network.a.peer.send(announce=network.a.announce_packet(announced))
    network.a.send_call(network.a.call("public/echo"))
    assert read_failure(one_reply(network.a).data).code == 403
    assert network.bus.stats("refused", "forged_call") == 1
    assert network.service.packets() == []


def test_a_restarted_node_gets_calls_with_its_new_key(network):
    network.c.instance += 1
    network.c.signer = type(network.c.signer)(C, network.c.instance)
    network.c.peer.send(announce=network.c.announce_packet())
    network.caller.call(f"/net/{C.node_id}/public/x", "8")
    (packet,) = network.c.packets()
    assert network.c.signer.check(packet.relay_call, network.c.heard[network.c.bus_id])


@pytest.mark.parametrize("kind", ["relay_call", "service_call_request", "call_reply"])
def test_calls_and_replies_before_the_handshake_is_done_end_the_connection(network, kind):
    packets = {
        "relay_call": network.a.call("public/echo"),
        "service_call_request": pb.ServiceCallRequest(address="public/echo", request_id="1"),
        "call_reply": pb.CallReply(request_id="1"),
    }
    stranger = MemoryPeer(network.bus)
    stranger.send(link_hello=pb.LinkHello(version=1, public_key=bytes(32), nonce=bytes(32)))
    stranger.send(**{kind: packets[kind]})
    assert network.service.packets() == []
    assert network.bus.close_reasons == {"bad_link_handshake": 1}


def test_calls_of_a_link_that_has_hung_up_are_not_executed(network):
    pipe = network.a.peer.pipe
    pipe.session.halt()  # as after many packets in one read
    network.a.send_call(network.a.call("public/echo"))
    pipe.session.on_ended()
    assert network.service.packets() == []


def test_announcements_fit_into_the_packets_of_every_bus(network):
    """They are sent in packets below the lowest `max_packet_bytes`, none is left out."""
    others = [NodeKey(bytes([number]) * 32) for number in range(1, 65)]
    ids = sorted(one.node_id for one in others)
    for key in others:
        own = network.a.announcement(key, set(ids) - {key.node_id})
        network.a.peer.send(announce=network.a.announce_packet(own))
    network.bus.pass_time(1)
    packets = [packet for packet in network.c.peer.packets() if packet.HasField("announce")]
    assert max(packet.ByteSize() for packet in packets) <= MAX_PACKET_BYTES
    for packet in packets:
        network.c.hear(packet.announce)
    assert network.c.heard.keys() >= set(ids)


def test_the_account_of_a_node_counts_its_calls(network):
    for code in (0, 500):
        network.a.send_call(network.a.call("public/echo", data=b"four"))
        network.service.reply(network.service.called().request_id, b"123", code=code)
    (account,) = network.bus.gsb.network.stats()["callers"].values()
    assert account == {"calls": 3, "failures": 1, "request_bytes": 8, "reply_bytes": 6}


def test_a_call_that_is_too_large_for_its_link_is_refused(network):
    network.caller.call(f"/net/{C.node_id}/public/x", "7", bytes(MAX_PACKET_BYTES - 100))
    (reply,) = network.caller.replies()
    assert read_failure(reply.data).code == 413
    assert network.c.packets() == []


@pytest.mark.parametrize("field", [{"origin": bytes(19)}, {"hops": 9}])
def test_a_relayed_call_of_a_bad_form_ends_the_link(network, field):
    call = network.a.call("public/echo")
    for name, value in field.items():
        setattr(call, name, value)
    network.a.send_call(call)
    assert network.service.packets() == []
    assert network.bus.close_reasons == {BAD_RELAY: 1}


def test_a_call_that_has_made_all_hops_is_not_passed_on(network):
    network.a.send_call(network.a.call("public/x", C.node_id, hops=8))
    assert network.c.packets() == []
    assert read_failure(one_reply(network.a).data).code == 503


def test_a_relayed_call_has_the_deadline_of_its_caller(network):
    network.a.send_call(network.a.call("public/echo", deadline_ms=2000))
    network.bus.pass_time(3)
    assert read_failure(one_reply(network.a).data).code == 504


def test_a_relayed_call_waits_for_credit_and_its_deadline_stands_still(network):
    sent = network.a.call("public/echo", free_partials=1, deadline_ms=5000)
    network.a.send_call(sent)
    called = network.service.called()
    for data in (b"first", b"second"):
        network.service.reply(called.request_id, data, partial=True)
    assert one_reply(network.a).data == b"first"
    network.bus.pass_time(10)
    assert network.a.packets() == []
    network.a.peer.send(credit=pb.Credit(request_id=sent.request_id, replies=1))
    assert one_reply(network.a).data == b"second"


CHANGES = st.one_of(
    st.fixed_dictionaries({}),
    st.fixed_dictionaries({"hops": st.integers(0, 10)}),
    st.fixed_dictionaries({"deadline_ms": st.sampled_from([0, 1, 60_000, 2**32 - 1])}),
    st.fixed_dictionaries({"free_partials": st.sampled_from([0, 1, 1 << 16, (1 << 16) + 1])}),
    st.fixed_dictionaries({"free_bytes": st.sampled_from([0, 1, 1 << 24, (1 << 24) + 1])}),
    st.fixed_dictionaries({"counter": st.integers(0, 3)}),
    st.fixed_dictionaries({"instance": st.integers(0, 9)}),
    st.fixed_dictionaries({"target_instance": st.integers(0, 9)}),
    st.fixed_dictionaries({"mac": st.binary(max_size=17)}),
    st.fixed_dictionaries({"origin": st.sampled_from([b"", bytes(20), bytes(19)])}),
    st.fixed_dictionaries({"target": st.sampled_from([b"", bytes(20), bytes(21)])}),
    st.fixed_dictionaries({"request_id": st.sampled_from(["", "same", "ü", "x" * 256])}),
    st.fixed_dictionaries({"address": st.text(max_size=8)}),
    st.fixed_dictionaries({"address": st.just("public/" + "x" * 300)}),
    # Large, but not so near the limit that the bytes of an unknown field make it too large.
    st.fixed_dictionaries({"data": st.just(bytes(MAX_PACKET_BYTES - 400))}),
)
CALLS = st.tuples(
    st.sampled_from(["public/echo", "public/none", "private", "public/gsb/ping"]),
    st.sampled_from(["", C.node_id, A.node_id, UNKNOWN.node_id]),
    CHANGES,
    st.booleans(),  # answered at once
)


def play(network: Network, calls: list[Any]) -> list[Any]:
    """Return what each end has received. Ids, keys and counters are of one run and left out."""
    seen: list[Any] = []
    for address, to, changes, is_answered in calls:
        call = network.a.call(address, to, b"data")
        for name, value in changes.items():
            setattr(call, name, value)
        network.a.send_call(call)
        for end in (network.service, network.c):
            for packet in end.packets():
                request = (
                    packet.relay_call if packet.HasField("relay_call") else packet.call_request
                )
                seen.append((address, request.address, request.data, packet.relay_call.hops))
                if is_answered:
                    peer = end if end is network.service else network.c.peer
                    peer.reply(request.request_id, b"done")
        seen += [
            (reply.request_id, reply.code, reply.type, reply.data)
            for reply in (packet.call_reply for packet in network.a.packets())
        ]
        seen.append(network.a.peer.session.connection.is_closed)
    counters = [network.bus.broker.counters.family(name) for name in ("refused", "dropped")]
    return [*seen, counters, network.bus.stats("gsb", "ended")]


@settings(max_examples=60)
@given(st.lists(CALLS, min_size=1, max_size=8))
def test_calls_get_the_same_answers_whatever_their_form(calls):
    usual, unusual = Network(b""), Network(UNKNOWN_FIELD)
    usual.warm_up(), unusual.warm_up()
    assert play(usual, calls) == play(unusual, calls)


# --- whole conversations: streams, credit, cancels and time, several packets in one read

NUMBERS = st.integers(0, 1)  # few calls, so that they get many replies
CALL_STEP = st.tuples(st.just("call"), st.sampled_from(["", C.node_id]), st.sampled_from([1, 2]))
PARTIAL_STEP = st.tuples(st.just("partial"), NUMBERS, st.sampled_from([10, 10, 3000]))
CREDIT_STEP = st.tuples(st.just("credit"), NUMBERS, st.integers(1, 2))
OTHER_STEPS = [
    CALL_STEP,
    st.tuples(st.just("local_call"), NUMBERS, st.just(0)),
    st.tuples(st.just("full"), NUMBERS, st.sampled_from([0, 500, 1])),
    st.tuples(st.just("cancel"), NUMBERS, st.just(0)),
    st.tuples(st.just("wait"), st.sampled_from([1, 6]), st.just(0)),
]
# `one_of` would choose each with the same probability, and few streams would need credit.
CHOICES = [PARTIAL_STEP] * 8 + [CREDIT_STEP] * 3 + OTHER_STEPS
STEPS = st.sampled_from(CHOICES).flatmap(lambda one: one)
TURNS = st.lists(st.lists(STEPS, min_size=1, max_size=4), min_size=3, max_size=12)


class Conversation:
    """Calls of A and of a local caller, and their replies by the service and by C."""

    def __init__(self, padding: bytes) -> None:
        self.network = Network(padding)
        self.network.warm_up()
        self.ends: dict[str, MemoryPeer | MemoryLink] = {
            "a": self.network.a,
            "c": self.network.c,
            "service": self.network.service,
            "caller": self.network.caller,
        }
        self.made: list[str] = []  # request ids of A
        self.requests: list[tuple[str, str]] = []  # received: an end, and the id of the bus
        self.seen: list[Any] = []

    def packet(self, kind: str, first: Any, second: int) -> tuple[str, pb.Packet] | None:
        """Return the packet of a step and the end that sends it, None if there is no call."""
        if kind == "call":
            fields = {"free_partials": second, "free_bytes": 4000}
            call = self.network.a.call("public/echo", first, b"data", **fields)
            self.made.append(call.request_id)
            return "a", pb.Packet(relay_call=call)
        if kind == "local_call":
            address = f"/net/{C.node_id}/public/x"
            request = pb.ServiceCallRequest(address=address, request_id=str(first))
            return "caller", pb.Packet(service_call_request=request)
        if kind in ("credit", "cancel"):
            if not self.made:
                return None
            request_id = self.made[first % len(self.made)]
            if kind == "credit":
                return "a", pb.Packet(credit=pb.Credit(request_id=request_id, replies=second))
            return "a", pb.Packet(cancel=pb.Cancel(request_id=request_id))
        if not self.requests:
            return None
        end, call_id = self.requests[first % len(self.requests)]
        reply = pb.CallReply(request_id=call_id)
        if kind == "partial":
            reply.type, reply.data = pb.PARTIAL, bytes(second)
        else:
            reply.code = second  # type: ignore[assignment]
        return end, pb.Packet(call_reply=reply)

    def play(self, steps: list[Any]) -> None:
        """Run steps; the packets of one end go to the bus in one read."""
        sent: dict[str, list[pb.Packet]] = {}
        for kind, first, second in steps:
            if kind == "wait":
                self.network.bus.pass_time(first)
            elif (made := self.packet(kind, first, second)) is not None:
                sent.setdefault(made[0], []).append(made[1])
        for end, packets in sent.items():
            chosen = self.ends[end]
            peer = chosen.peer if isinstance(chosen, MemoryLink) else chosen
            frames = [sp.frame(peer.encode(one), peer.form) for one in packets]
            peer.pipe.deliver(b"".join(frames))
        for name, end_of in self.ends.items():
            for packet in end_of.packets():
                self._see(name, packet)

    def _see(self, end: str, packet: pb.Packet) -> None:
        call = packet.relay_call if packet.HasField("relay_call") else packet.call_request
        if call.request_id:
            self.requests.append((end, call.request_id))
        # These are of one run, and the rest must be the same.
        if packet.HasField("relay_call"):
            for field in ("mac", "counter", "target_instance", "instance"):
                call.ClearField(field)
        self.seen.append((end, packet.SerializeToString()))

    def result(self) -> list[Any]:
        bus = self.network.bus
        counters = [bus.broker.counters.family(name) for name in ("refused", "dropped")]
        tables = [bus.stats("gsb", name) for name in ("open_calls", "serving", "ended")]
        accounts = bus.stats("gsb", "network", "callers")
        return [*self.seen, counters, tables, accounts, bus.close_reasons]


@settings(max_examples=150)
@given(CALL_STEP, TURNS)
def test_conversations_are_the_same_whatever_the_form_of_their_packets(first_call, turns):
    results = []
    for padding in (b"", UNKNOWN_FIELD):
        conversation = Conversation(padding)
        for steps in [[first_call], *turns]:
            conversation.play(steps)
        results.append(conversation.result())
    assert results[0] == results[1]
