"""Topics of other nodes: nodes that send garbage, subscribers that leave early, and shares.

The other node is a `LinkPeer`: a test plays its answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.codec import Origin, pack_failure
from polybus.dialects.gsb.network.node_key import NodeKey
from polybus.testing.bus_process import BusProcess
from tests.faults.gsb_live import MAX_PACKET_BYTES, check_no_state_left, serving, tables
from tests.rig.gsb_link_peer import LinkPeer, pack
from tests.rig.gsb_peer import Peer, connect, packet
from tests.rig.gsb_wire import read_failure
from tests.rig.observer import count, until

OTHER = NodeKey(b"o" * 32)
NEWS = f"/net/{OTHER.node_id}/public/news"
FEEDS = 3  # that one node may have
ENV = {
    "POLYBUS_ACL": "allow node:* subscribe public/*",
    "POLYBUS_GSB_MAX_CHANNELS": "8",
    "POLYBUS_GSB_MAX_NODE_CHANNELS": str(FEEDS),
}


@pytest.fixture
def bus() -> Iterator[BusProcess]:
    with serving(ENV) as running:
        yield running
        check_no_state_left(running)


@pytest.fixture
def node(bus) -> Iterator[LinkPeer]:
    with LinkPeer(bus.address("gsb"), OTHER) as linked:
        linked.announce()
        linked.settle()
        yield linked


@pytest.fixture
def reader(bus) -> Iterator[Peer]:
    with connect(bus.address("gsb")) as peer:
        yield peer


def subscribe(peer: Peer, topic: str = NEWS) -> None:
    peer.send(packet("subscribe_request", topic=topic))


def unsubscribe(peer: Peer, topic: str = NEWS) -> None:
    peer.send(packet("unsubscribe_request", topic=topic))


def answer(node: LinkPeer, call_id: str, data: bytes = b"", kind: str = "PARTIAL") -> None:
    node.peer.send(pack(call_reply=pb.CallReply(request_id=call_id, type=kind, data=data)))


def message(data: bytes) -> bytes:
    return pb.BroadcastRequest(topic="public/news", data=data).SerializeToString()


def test_a_bad_message_is_dropped_and_the_stream_goes_on(bus, node, reader):
    subscribe(reader)
    call = node.wait_for("relay_call")
    assert (call.address, call.data) == ("public/gsb/channel", b"public/news")
    answer(node, call.request_id)
    assert reader.next("subscribe_reply").code == 0
    answer(node, call.request_id, message(b"first"))
    for bad in (b"\xff", b"\x0a\x06short", message(b"cut")[:-1]):
        answer(node, call.request_id, bad)
    answer(node, call.request_id, message(b"second"))
    received = [reader.next("broadcast_request") for _ in range(2)]
    assert [one.data for one in received] == [b"first", b"second"]
    assert {(one.topic, one.caller) for one in received} == {(NEWS, OTHER.node_id)}
    assert count(bus, "dropped", "bad_channel_message") == 3


def test_an_unsubscribe_before_the_confirmation_ends_the_subscription(bus, node, reader):
    subscribe(reader)
    call = node.wait_for("relay_call")
    unsubscribe(reader)
    assert reader.next("subscribe_reply").code == 499
    assert reader.next("unsubscribe_reply").code == 0
    assert node.wait_for("cancel").request_id == call.request_id
    answer(node, call.request_id)  # too late
    answer(node, call.request_id, message(b"late"))
    node.settle()
    assert count(bus, "dropped", "unknown_call") == 2
    assert reader.ping() == []
    unsubscribe(reader)
    assert reader.next("unsubscribe_reply").code == 404


def test_others_keep_a_subscription_that_is_not_confirmed_yet(bus, node, reader):
    with connect(bus.address("gsb")) as other:
        subscribe(reader)
        call = node.wait_for("relay_call")
        subscribe(other)
        assert other.ping() == []  # its answer waits for that of the node
        unsubscribe(reader)
        assert reader.next("subscribe_reply").code == 499
        assert reader.next("unsubscribe_reply").code == 0
        answer(node, call.request_id)
        assert other.next("subscribe_reply").code == 0
        answer(node, call.request_id, message(b"news"))
        assert other.next("broadcast_request").data == b"news"
        assert reader.ping() == []


def test_a_subscriber_that_goes_before_the_confirmation_leaves_nothing(bus, node):
    with connect(bus.address("gsb")) as gone:
        subscribe(gone)
        call = node.wait_for("relay_call")
    assert node.wait_for("cancel").request_id == call.request_id
    until(lambda: tables(bus)["connections"] == 1, "the link alone is left")


def test_a_user_gets_its_share_of_the_topics_of_other_nodes(bus, node):
    """Of eight the last one is for admins; the user of the tests may be one."""
    with ExitStack() as stack:
        readers = [stack.enter_context(connect(bus.address("gsb"))) for _ in range(2)]
        for number in range(8):
            subscribe(readers[number % 2], f"{NEWS}{number}")
            answer(node, node.wait_for("relay_call").request_id)
            assert readers[number % 2].next("subscribe_reply").code == 0
        subscribe(readers[0], f"{NEWS}8")
        refused = readers[0].next("subscribe_reply")
        assert (refused.code, "max_channels" in refused.message) == (403, True)
        subscribe(readers[1], f"{NEWS}0")  # another connection of the same user: no new place
        assert readers[1].next("subscribe_reply").code == 0
        unsubscribe(readers[1], f"{NEWS}1")
        assert readers[1].next("unsubscribe_reply").code == 0
        subscribe(readers[0], f"{NEWS}8")
        answer(node, node.wait_for("relay_call").request_id)
        assert readers[0].next("subscribe_reply").code == 0
    assert count(bus, "refused", "max_channels") == 1
    until(lambda: tables(bus)["connections"] == 1, "the link alone is left")


def test_a_node_reads_a_bounded_number_of_topics(bus, node):
    def open_feed(topic: str) -> pb.CallReply:
        node.send_call(node.call("public/gsb/channel", data=topic.encode()))
        reply: pb.CallReply = node.wait_for("call_reply")
        return reply

    replies = [open_feed(f"public/{number}") for number in range(FEEDS)]
    assert [(one.type, one.data) for one in replies] == [(1, b"")] * FEEDS
    refused = read_failure(open_feed("public/more").data)
    assert refused.code == 503
    assert "has its share of max_channels (3 of 8)" in refused.message
    assert count(bus, "refused", "max_node_channels") == 1
    with LinkPeer(bus.address("gsb"), NodeKey(b"p" * 32)) as another:
        another.announce()
        another.settle()
        another.send_call(another.call("public/gsb/channel", data=b"public/1"))
        assert another.wait_for("call_reply").type == 1
    node.peer.send(pack(cancel=pb.Cancel(request_id=replies[0].request_id)))
    assert read_failure(node.wait_for("call_reply").data).code == 499
    node.settle()
    assert open_feed("public/again").type == 1


# --- streams that end


def fail(node: LinkPeer, call_id: str, code: int) -> None:
    data = pack_failure(code, "as planned", Origin.BUS)
    reply = pb.CallReply(request_id=call_id, data=data)
    reply.code = 500  # type: ignore[assignment]
    node.peer.send(pack(call_reply=reply))


def open_channel(node: LinkPeer, reader: Peer) -> str:
    """Subscribe, confirm it, and return the id of the call."""
    subscribe(reader)
    call_id: str = node.wait_for("relay_call").request_id
    answer(node, call_id)
    assert reader.next("subscribe_reply").code == 0
    return call_id


def test_a_stream_that_breaks_is_opened_again(node, reader):
    fail(node, open_channel(node, reader), 503)
    again = node.wait_for("relay_call")
    assert again.data == b"public/news"
    answer(node, again.request_id)
    answer(node, again.request_id, message(b"news"))
    assert reader.next("broadcast_request").data == b"news"


def test_a_stream_that_is_refused_later_ends_its_subscriptions(bus, node, reader):
    fail(node, open_channel(node, reader), 403)
    until(lambda: count(bus, "dropped", "channel_ended") == 1, "the subscription has ended")
    unsubscribe(reader)
    assert reader.next("unsubscribe_reply").code == 404
    assert open_channel(node, reader)


@pytest.mark.parametrize("code", [403, 404, 503])
def test_a_refused_subscription_gets_the_code(node, reader, code):
    subscribe(reader)
    fail(node, node.wait_for("relay_call").request_id, code)
    refused = reader.next("subscribe_reply")
    assert (refused.code, refused.message) == (code, "as planned")


def test_a_subscription_ends_with_the_right_to_it(bus, node, reader):
    call_id = open_channel(node, reader)
    rule = ("deny", "everyone", "subscribe", "net/*")
    assert bus.run("acl", "add", *rule).returncode == 0
    assert node.wait_for("cancel").request_id == call_id
    subscribe(reader)
    assert reader.next("subscribe_reply").code == 403
    assert count(bus, "refused", "subscribe_denied") == 1
    assert bus.run("acl", "rm", *rule).returncode == 0
    assert open_channel(node, reader)


def test_a_subscriber_that_does_not_read_loses_messages(bus, node):
    with connect(bus.address("gsb"), small=True) as slow, connect(bus.address("gsb")) as quick:
        call_id = open_channel(node, slow)
        subscribe(quick)
        assert quick.next("subscribe_reply").code == 0
        for _ in range(200):
            answer(node, call_id, message(bytes(64 * 1024)))
            assert len(quick.next("broadcast_request").data) == 64 * 1024
            if lost := count(bus, "dropped", "subscriber_full"):
                break
        assert lost, "a full subscriber loses nothing"


# --- topics that the other node reads


def feed(node: LinkPeer, **fields: Any) -> None:
    node.send_call(node.call("public/gsb/channel", data=b"public/news", **fields))
    confirmed = node.wait_for("call_reply")
    assert (confirmed.type, confirmed.data) == (1, b"")


def broadcast(peer: Peer, data: bytes) -> None:
    peer.send(packet("broadcast_request", topic="public/news", data=data))
    assert peer.next("broadcast_reply").code == 0


def test_a_node_gets_messages_without_the_names_of_users(node, reader):
    feed(node)
    broadcast(reader, b"news")
    received = pb.BroadcastRequest.FromString(node.wait_for("call_reply").data)
    assert (received.data, received.caller) == (b"news", "")


@pytest.mark.parametrize(("topic", "code"), [(b"private", 404), (b"public", 404), (b"", 400)])
def test_only_public_topics_exist_for_a_node(node, topic, code):
    node.send_call(node.call("public/gsb/channel", data=topic))
    assert read_failure(node.wait_for("call_reply").data).code == code


def test_a_message_too_large_for_a_link_is_dropped(bus, node, reader):
    feed(node)
    broadcast(reader, bytes(MAX_PACKET_BYTES - 100))
    broadcast(reader, b"small")
    assert b"small" in node.wait_for("call_reply").data
    assert count(bus, "dropped", "channel_too_large") == 1


def test_a_feed_without_credit_loses_messages(bus, node, reader):
    feed(node, free_partials=3)  # the confirmation is one of them
    for number in range(5):
        broadcast(reader, b"%d" % number)
    for number in range(2):
        assert b"%d" % number in node.wait_for("call_reply").data
    assert count(bus, "dropped", "channel_full") == 3
    node.peer.send(pack(credit=pb.Credit(request_id="1", replies=1)))
    node.settle()
    broadcast(reader, b"later")
    assert b"later" in node.wait_for("call_reply").data


def test_a_feed_ends_with_the_right_to_it(bus, node):
    feed(node)
    rule = ("deny", "node:*", "subscribe", "public/news")
    assert bus.run("acl", "add", *rule).returncode == 0
    assert read_failure(node.wait_for("call_reply").data).code == 403
    until(lambda: tables(bus)["connections"] == 1, "the link alone is left")
