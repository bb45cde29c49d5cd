"""Links with hostile nodes: forged and repeated calls, false announcements, loops, bad packets."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from polybus import gsb
from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.network.announcement import Announcement
from polybus.dialects.gsb.network.link_handshake import LinkHandshake
from polybus.dialects.gsb.network.node_key import NodeKey
from polybus.testing.bus_process import BusProcess, clean_environment, run
from tests.faults.gsb_live import MAX_PACKET_BYTES, check_no_state_left, serving, tables
from tests.rig.gsb_call_signer import CallSigner
from tests.rig.gsb_link_peer import INSTANCE, LinkPeer, pack
from tests.rig.gsb_peer import HungUp, Silent, call, connect, hello, partial, reply
from tests.rig.gsb_wire import read_failure
from tests.rig.observer import (
    check_unharmed,
    count,
    log_lines,
    read_counter,
    rss_bytes,
    stats,
    until,
)

HOSTILE, HONEST, FAR = NodeKey(b"h" * 32), NodeKey(b"n" * 32), NodeKey(b"f" * 32)
FUZZED = 400
ACL = {"POLYBUS_ACL": "allow node:* call public/*"}


@pytest.fixture(scope="module")
def running() -> Iterator[BusProcess]:
    with serving(ACL) as bus:
        yield bus


@pytest.fixture
def bus(running: BusProcess) -> Iterator[BusProcess]:
    """The bus that all tests of the module share."""
    yield running
    check_no_state_left(running)


@pytest.fixture
def counted(bus: BusProcess) -> Callable[..., int]:
    """Return a counter of the bus by its path, since the begin of the test."""
    before = stats(bus)
    return lambda *path: read_counter(stats(bus), *path) - read_counter(before, *path)


@pytest.fixture
def peer(bus) -> Iterator[LinkPeer]:
    with LinkPeer(bus.address("gsb"), HOSTILE) as linked:
        linked.announce()
        linked.settle()
        yield linked


@pytest.fixture
def service(bus) -> Iterator[list[str]]:
    """A service of the bus. Yields the callers that it has seen."""
    callers: list[str] = []
    with gsb.blocking.connect(str(bus.address("gsb"))) as client:

        @client.service("public/greeter")
        def greet(call: gsb.Call) -> object:
            callers.append(call.caller)
            return "hello"

        yield callers


def refusal(peer: LinkPeer) -> int:
    """Return the code of the failure with which a call has ended."""
    reply = peer.wait_for("call_reply")
    assert (reply.code, reply.type) == (500, 0), reply
    return read_failure(reply.data).code


def is_linked(bus: BusProcess, key: NodeKey, instance: int = INSTANCE) -> bool:
    """Link and hang up. Returns False if the bus refuses the link."""
    try:
        with LinkPeer(bus.address("gsb"), key, instance) as peer:
            peer.settle()
            return True
    except (HungUp, OSError):
        return False


def test_an_honest_call_is_answered(peer, service):
    peer.send_call(peer.call("public/greeter"))
    reply = peer.wait_for("call_reply")
    assert (reply.request_id, reply.code, reply.data) == ("1", 0, b"\xa5hello")
    assert service == [HOSTILE.node_id]


@pytest.mark.sabotage("signature-off", expects="a forged call was executed")
def test_a_call_in_the_name_of_another_node_is_refused(counted, peer, service):
    """The other node exists, and is linked to the hostile one."""
    peer.announce(
        peer.announcement(HOSTILE, [peer.bus_id, HONEST.node_id]),
        peer.announcement(HONEST, [HOSTILE.node_id]),
    )
    forged = peer.call("public/greeter")
    CallSigner(HOSTILE, peer.instance).sign(forged, peer.heard[peer.bus_id])
    forged.origin = bytes.fromhex(HONEST.node_id[2:])
    peer.send_call(forged)
    reply = peer.wait_for("call_reply")
    assert reply.code == 500, "a forged call was executed"
    assert read_failure(reply.data).code == 403
    assert service == []
    assert counted("refused", "forged_call") == 1


@pytest.mark.sabotage("replays-off", expects="a repeated call was executed")
def test_a_call_is_executed_once(bus, peer, service):
    call = peer.call("public/greeter")
    peer.send_call(call)
    assert peer.wait_for("call_reply").code == 0
    call.request_id = "again"
    peer.send_call(call)
    assert peer.wait_for("call_reply").code == 500, "a repeated call was executed"
    assert len(service) == 1


@pytest.mark.parametrize("change", [{"data": b"\x02"}, {"counter": 1}])
def test_a_call_that_was_changed_is_refused(peer, service, change):
    call = peer.call("public/greeter", data=b"\x01")
    call.MergeFrom(pb.RelayCall(**change))
    peer.send_call(call)
    assert refusal(peer) == 403
    assert service == []


@pytest.mark.sabotage("hops-off", expects="a call went on beyond the last hop")
def test_a_call_ends_at_the_last_hop(bus, peer):
    """A call to a node of another link, which has made all its hops already."""
    with LinkPeer(bus.address("gsb"), HONEST) as other:
        other.announce()
        other.settle()
        peer.send_call(peer.call("public/x", HONEST.node_id, hops=7))
        relayed = other.wait_for("relay_call")
        assert relayed.hops == 8
        peer.send_call(peer.call("public/x", HONEST.node_id, hops=8))
        answers = peer.peer.ping()
        assert "relay_call" not in kinds(other.peer.ping()), "a call went on beyond the last hop"
        (reply,) = [one.call_reply for one in answers if one.HasField("call_reply")]
        assert read_failure(reply.data).code == 503


def kinds(packets: list[pb.Packet]) -> list[str | None]:
    return [packet.WhichOneof("kind") for packet in packets]


def test_a_call_does_not_go_back_where_it_came_from(peer):
    peer.announce(
        peer.announcement(HOSTILE, [peer.bus_id, FAR.node_id]),
        peer.announcement(FAR, [HOSTILE.node_id]),
    )
    peer.settle()
    peer.send_call(peer.call("public/x", FAR.node_id))
    assert refusal(peer) == 503


@pytest.mark.sabotage("credits-off", expects="items were sent without credit")
def test_a_stream_stops_without_credit_and_goes_on_with_it(bus, peer):
    """The service is one that knows no credits: the bus stops reading from it."""
    with connect(bus.address("gsb")) as service:
        assert service.register("public/items") == 0
        peer.send_call(peer.call("public/items", free_partials=10))
        request = service.call()
        service.send(*(partial(request.request_id, b"%d" % n) for n in range(100)))
        for number in range(10):
            assert peer.wait_for("call_reply").data == b"%d" % number
        more = kinds(peer.peer.ping()).count("call_reply")
        assert not more, f"{more} items were sent without credit"
        peer.peer.send(pack(credit=pb.Credit(request_id="1", replies=25)))
        for number in range(10, 35):
            assert peer.wait_for("call_reply").data == b"%d" % number
        assert "call_reply" not in kinds(peer.peer.ping())
        peer.peer.send(pack(cancel=pb.Cancel(request_id="1")))
        assert refusal(peer) == 499


@pytest.mark.parametrize(
    "fields",
    [
        {"hops": 0},
        {"hops": 9},
        {"origin": b"short"},
        {"target": b""},
        {"deadline_ms": 0},
        {"free_partials": 0},
        {"free_bytes": 1 << 30},
        {"address": "x" * 70_000},
    ],
)
def test_fields_out_of_their_bounds_end_the_link(counted, peer, fields):
    call = peer.call("public/x")
    for name, value in fields.items():
        setattr(call, name, value)
    peer.send_call(call)
    with pytest.raises(HungUp):
        peer.wait_for("call_reply")
    assert counted("connections", "closed", "bad_relay") == 1


def test_an_oversized_call_is_answered_and_the_link_stays(bus, peer, service):
    peer.send_call(peer.call("public/greeter", data=bytes(MAX_PACKET_BYTES)))
    assert refusal(peer) == 413
    peer.send_call(peer.call("public/greeter"))
    assert peer.wait_for("call_reply").code == 0


def test_a_node_that_dials_again_replaces_its_old_link(bus, counted, peer):
    """The bus may not have noticed that the old link has ended."""
    with LinkPeer(bus.address("gsb"), HOSTILE) as again:
        again.settle()
        peer.peer.wait_for_end()
        assert tables(bus)["network"]["links"] == 1
    assert counted("connections", "closed", "duplicate_link") == 1


def test_a_restarted_node_replaces_a_link_that_is_dead(bus, counted, peer):
    """The old process sends nothing: its connection is open, and it reads nothing."""
    until(lambda: is_linked(bus, HOSTILE, instance=8), "the new process is linked")
    assert counted("connections", "closed", "duplicate_node") > 0
    assert json.loads(bus.run("stats", "--json").stdout)["alarms"] == []


@pytest.mark.parametrize(
    ("address", "code"), [("", 400), ("/x", 400), ("private", 404), ("public/none", 404)]
)
def test_addresses_are_checked(peer, address, code):
    peer.send_call(peer.call(address))
    assert refusal(peer) == code
    peer.send_call(peer.call("public/x", request_id=""))
    assert refusal(peer) == 400


def test_false_announcements_end_the_link(counted, peer):
    message = peer.announcement(HONEST, [HOSTILE.node_id]).encode()
    message.signature = peer.announcement(HOSTILE, [HONEST.node_id]).signature
    peer.peer.send(pack(announce=pb.Announce(announcements=[message])))
    with pytest.raises(HungUp):
        peer.wait_for("call_reply")
    assert counted("connections", "closed", "bad_announcement") == 1


def test_a_link_that_only_one_end_announces_is_not_used(bus, peer):
    """The hostile node announces a link to a node that does not announce it."""
    peer.announce(peer.announcement(HOSTILE, [peer.bus_id, FAR.node_id]))
    peer.announce(peer.announcement(FAR, []))
    peer.settle()
    with connect(bus.address("gsb")) as caller:
        address = f"/net/{FAR.node_id}/public/x"
        caller.send(
            pack(service_call_request=pb.ServiceCallRequest(address=address, request_id="1"))
        )
        assert read_failure(caller.reply().data).code == 503


@pytest.mark.parametrize("size", [64, 32], ids=["of a packet", "of a second"])
def test_announcements_are_bounded_in_number_and_rate(bus, counted, peer, size):
    """A flood of nodes that exist only in the announcements of one peer."""
    keys = [NodeKey(os.urandom(32)) for _ in range(size)]
    flood = [peer.announcement(key, []) for _ in range(100) for key in keys]

    def announce_all() -> None:
        for at in range(0, len(flood), len(keys)):
            peer.announce(*flood[at : at + len(keys)])
        peer.settle()

    with pytest.raises((HungUp, OSError)):
        announce_all()
    assert counted("connections", "closed", "announcement_flood") == 1
    assert tables(bus)["network"]["nodes"] == 0


def test_a_second_process_with_the_key_of_a_linked_node_is_refused(bus, counted, peer):
    with pytest.raises(HungUp), LinkPeer(bus.address("gsb"), HOSTILE, instance=8) as second:
        second.settle()
    assert counted("connections", "closed", "duplicate_node") == 1
    peer.settle()


def test_packets_of_clients_are_refused_on_a_link(counted, peer):
    peer.peer.send(pack(register_request=pb.RegisterRequest(service_id="x")))
    with pytest.raises(HungUp):
        peer.settle()
    assert counted("connections", "closed", "wrong_direction") == 1


def test_a_large_packet_without_data_is_not_decoded(bus, counted):
    """Empty announcements take fifty times their size in memory; neither kind is allowed."""
    large = pack(announce=pb.Announce(announcements=[pb.Announcement()] * 200_000))
    hidden = pack(cancel=pb.Cancel(request_id="1")) + large
    for payload in (large, hidden):
        with connect(bus.address("gsb")) as stranger:
            stranger.send(payload)
            stranger.wait_for_end()
    assert counted("connections", "closed", "too_large") == 2


def test_strangers_of_one_host_have_few_handshakes_at_a_time(bus, counted):
    """Hellos without a proof take places of handshakes, not of links."""
    hello = pb.LinkHello(version=1, public_key=HONEST.public, nonce=bytes(32), instance=1)
    with ExitStack() as stack:
        strangers = [stack.enter_context(connect(bus.address("gsb"))) for _ in range(40)]
        for stranger in strangers:
            stranger.send(pack(link_hello=hello))
        until(lambda: counted("connections", "closed", "max_links") == 24, "24 are refused")


def test_a_call_of_an_earlier_run_of_the_bus_is_refused(peer, service):
    call = peer.call("public/greeter")
    call.target_instance += 1
    peer.send_call(call)
    assert refusal(peer) == 503
    assert service == []


def test_a_large_ping_is_refused(peer):
    peer.send_call(peer.call("public/gsb/ping", data=bytes(2000)))
    assert refusal(peer) == 413
    peer.send_call(peer.call("public/gsb/ping", data=b"\x01"))
    assert peer.wait_for("call_reply").data == b"\x01"


def test_a_stranger_without_the_key_of_its_hello_gets_no_link(bus, counted):
    with connect(bus.address("gsb")) as stranger:
        hello = pb.LinkHello(version=1, public_key=HONEST.public, nonce=bytes(32), instance=1)
        stranger.send(pack(link_hello=hello))
        stranger.next("link_accept")
        stranger.send(pack(link_proof=pb.LinkProof(signature=bytes(64))))
        stranger.wait_for_end()
    assert counted("connections", "closed", "bad_link_handshake") == 1
    assert tables(bus)["network"]["links"] == 0


def test_mutated_packets_of_a_link_harm_nothing(bus, service):
    """Packets of every kind with random changes; each ends the link, or has no effect."""
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    address = bus.address("gsb")
    sent = 0
    while sent < FUZZED:
        with LinkPeer(address, NodeKey(chance.randbytes(32))) as peer:
            peer.announce()
            peer.settle()
            samples = [
                pack(relay_call=peer.call("public/greeter", data=b"\x01")),
                pack(announce=pb.Announce(announcements=[_announced(peer)])),
                pack(call_reply=pb.CallReply(request_id="1", type="PARTIAL", data=b"x")),
                pack(credit=pb.Credit(request_id="1", replies=5)),
                pack(cancel=pb.Cancel(request_id="1")),
                pack(ping=pb.Ping(token=b"12345678")),
                pack(link_proof=pb.LinkProof(signature=bytes(64))),
            ]
            try:
                for _ in range(40):
                    packet = bytearray(chance.choice(samples))
                    for _ in range(chance.randint(1, 4)):
                        packet[chance.randrange(len(packet))] = chance.randrange(256)
                    peer.peer.send(bytes(packet))
                    sent += 1
                peer.settle()
            except (HungUp, OSError, AssertionError):
                continue
    with LinkPeer(address, HONEST) as peer:
        peer.announce()
        peer.settle()
        peer.send_call(peer.call("public/greeter"))
        assert peer.wait_for("call_reply").code == 0, f"seed {seed}"
    until(lambda: tables(bus)["network"]["links"] == 0, "the links have ended")
    check_unharmed(bus)


def _announced(peer: LinkPeer) -> pb.Announcement:
    made: Announcement = peer.announcement(peer.key, [peer.bus_id])
    return made.encode()


# --- who may link, and how many


def test_only_named_nodes_may_link():
    allowed = {"POLYBUS_GSB_LINK_NODES": f"{HONEST.node_id}, {FAR.node_id}"}
    with serving(ACL | allowed) as bus:
        assert is_linked(bus, HONEST)
        assert is_linked(bus, FAR)
        assert not is_linked(bus, HOSTILE)
        assert count(bus, "connections", "closed", "link_not_allowed") == 1
        refused = {"event": "link is not allowed", "node": HOSTILE.node_id}
        until(lambda: len(log_lines(bus, **refused)) == 1, "the log names the node")
        check_no_state_left(bus)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("LINK_NODES", "0xabc", "gsb.link_nodes: must be 0x and 40 hex digits, got '0xabc'"),
        ("LINKS", "tcp://192.0.2.1:1", "gsb.links: tcp://192.0.2.1:1: a link to another machine"),
        ("LINKS", "tls+tcp://a:1,tls+tcp://b:1", "[gsb] links: expected at most max_links of them"),
    ],
)
def test_wrong_nodes_and_links_are_found_before_the_start(tmp_path, key, value, text):
    settings = {f"POLYBUS_GSB_{key}": value, "POLYBUS_GSB_MAX_LINKS": "1"}
    env = clean_environment(tmp_path) | settings
    for command in (("config", "check"), ("serve", "--listen", "gsb=tcp://127.0.0.1:0")):
        done = run(*command, env=env)
        assert done.returncode == 2
        assert text in done.stderr


@pytest.mark.sabotage("link-bound-off", expects="a link too many")
def test_links_are_bounded_and_a_dialled_address_has_a_place():
    """The dialled address is one where no bus answers: its place stays free for it."""
    nothing = "tcp://127.0.0.1:9"
    with serving(ACL | {"POLYBUS_GSB_MAX_LINKS": "3", "POLYBUS_GSB_LINKS": nothing}) as bus:
        keys = [NodeKey(bytes([n]) * 32) for n in range(1, 4)]
        with ExitStack() as stack:
            for key in keys[:2]:
                stack.enter_context(LinkPeer(bus.address("gsb"), key)).settle()
            assert not is_linked(bus, keys[2]), "a link too many"
            assert count(bus, "connections", "closed", "max_links") == 1
            failed = bus.run("gsb", "link", "add", "tcp://127.0.0.1:10")
            assert (failed.returncode, "max_links is reached" in failed.stderr) == (4, True)
            assert bus.run("gsb", "link", "rm", nothing).returncode == 0
            stack.enter_context(LinkPeer(bus.address("gsb"), keys[2])).settle()
            assert tables(bus)["network"]["links"] == 3
            assert bus.run("gsb", "link", "add", nothing).returncode != 0
        until(lambda: bus.run("gsb", "link", "add", nothing).returncode == 0, "there is room again")
        check_no_state_left(bus)


def test_handshakes_that_wait_do_not_add_up_to_more_links():
    """All begin while there is room, and all finish: the last ones find none."""
    with serving(ACL | {"POLYBUS_GSB_MAX_LINKS": "2"}) as bus:
        keys = [NodeKey(bytes([n]) * 32) for n in range(1, 6)]
        with ExitStack() as stack:
            waiting = []
            for key in keys:
                shake = LinkHandshake(key, 7, b"")
                peer = connect(bus.address("gsb"), first=pack(link_hello=shake.hello()))
                stack.enter_context(peer)
                waiting.append((peer, shake.on_accept(peer.next("link_accept"))))
            for peer, proof in waiting:
                peer.send(pack(link_proof=proof))
            until(
                lambda: count(bus, "connections", "closed", "max_links") == 3,
                "3 are refused",
            )
            assert tables(bus)["network"]["links"] == 2


# --- a node that does not read


PATIENCE_S = 10.0  # shorter than the 15 s after which a silent link ends and frees the service
ITEM = bytes(64 * 1024)
ITEMS = 3000  # some 190 MB
ROOM_BYTES = 96 << 20  # an outbox has at most 64 MiB


@pytest.mark.sabotage("full-links-wait", expects="the service was stopped")
def test_a_node_that_grants_credit_and_does_not_read_stops_no_service(bus):
    """The stream ends with a cancel; the service, its other callers and the bus go on."""
    address = bus.address("gsb")
    with (
        LinkPeer(address, HOSTILE, small=True) as hostile,
        connect(address, first=hello(credits=True)) as service,
        connect(address) as caller,
    ):
        hostile.announce()
        hostile.settle()
        assert service.register("public/items") == 0
        hostile.send_call(hostile.call("public/items"))
        request = service.call()
        for _ in range(4):
            hostile.peer.send(pack(credit=pb.Credit(request_id="1", replies=1 << 16)))
        until(lambda: "credit" in kinds(service.ping()), "the credit has arrived")
        before = rss_bytes(bus.process.pid)
        service.socket.settimeout(PATIENCE_S)
        sent, packets = 0, []
        while sent < ITEMS and "cancel" not in kinds(packets):
            sent += 50
            try:
                service.send(*[partial(request.request_id, ITEM)] * 50)
                packets += service.ping()
            except (Silent, TimeoutError):
                raise AssertionError("the service was stopped") from None
        assert "cancel" in kinds(packets), "the stream goes on without end"
        assert rss_bytes(bus.process.pid) - before < ROOM_BYTES
        caller.send(call("public/items", "2"))
        service.send(reply(service.call().request_id, b"quick"))
        assert caller.reply().data == b"quick"


@pytest.mark.sabotage("starved-calls-stay", expects="the other caller waits")
def test_a_node_that_grants_no_credit_stops_a_service_for_a_bounded_time():
    """A service without credits is not read meanwhile, so its other callers wait with it."""
    with (
        serving(ACL | {"POLYBUS_GSB_STUCK_TIMEOUT_S": "1"}) as bus,
        LinkPeer(bus.address("gsb"), HOSTILE) as hostile,
        connect(bus.address("gsb")) as service,
        connect(bus.address("gsb")) as caller,
    ):
        hostile.announce()
        hostile.settle()
        assert service.register("public/items") == 0
        hostile.send_call(hostile.call("public/items", free_partials=2))
        request = service.call()
        service.send(*[partial(request.request_id, b"x")] * 5)
        until(lambda: tables(bus)["waiting"] == 1, "the service waits for credit")
        caller.send(call("public/items", "2"))
        service.send(reply(service.call().request_id, b"quick"))
        caller.socket.settimeout(PATIENCE_S)
        try:
            assert caller.reply().data == b"quick"
        except Silent:
            raise AssertionError("the other caller waits") from None
        assert service.next("cancel").request_id == request.request_id
        for _ in range(2):
            assert hostile.wait_for("call_reply").type == 1
        assert refusal(hostile) == 503
        assert count(bus, "refused", "call_without_credit") == 1


@pytest.mark.parametrize("replies", [0, 1 << 17])
def test_credit_out_of_its_bounds_ends_the_link(counted, peer, replies):
    peer.peer.send(pack(credit=pb.Credit(request_id="1", replies=replies)))
    peer.peer.wait_for_end()
    assert counted("connections", "closed", "bad_credit") == 1


def test_a_handshake_that_takes_too_long_is_ended(bus, counted):
    shake = LinkHandshake(HONEST, 7, b"")
    with connect(bus.address("gsb"), first=pack(link_hello=shake.hello())) as stranger:
        stranger.next("link_accept")
        stranger.wait_for_end()
    assert counted("connections", "closed", "link_timeout") == 1


def test_a_dialled_node_that_dials_needs_no_second_place():
    nothing = f"tcp://127.0.0.1:9#{HONEST.node_id}"
    with serving(ACL | {"POLYBUS_GSB_MAX_LINKS": "1", "POLYBUS_GSB_LINKS": nothing}) as bus:
        assert not is_linked(bus, HOSTILE)
        assert is_linked(bus, HONEST)
        check_no_state_left(bus)
