"""Bad input of GSB peers on a live bus, sent through plain sockets.

The bus closes a connection that violates the protocol and counts the reason. It refuses an
invalid request and keeps the connection. Other connections are not affected, and no state is
left.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polybus.testing.bus_process import BusProcess
from tests.faults.gsb_live import (
    MAX_PACKET_BYTES,
    check_no_state_left,
    connect_ipc,
    connect_tcp,
    failure,
    failure_codes,
    serving,
)
from tests.rig.byte_feeder import one_by_one
from tests.rig.gsb_peer import GREETING, HungUp, call, cancel, hello, packet, partial, reply
from tests.rig.observer import count, until


@pytest.fixture(scope="module")
def running() -> Iterator[BusProcess]:
    with serving() as bus:
        yield bus


@pytest.fixture
def bus(running: BusProcess) -> Iterator[BusProcess]:
    """The bus that all tests of the module share."""
    yield running
    check_no_state_left(running)


# --- greetings and frames ------------------------------------------------------


@pytest.mark.parametrize(
    "greeting",
    [
        b"\0SP\1\0\x10\0\0",  # another version of SP
        b"\0SP\0\0\x30\0\0",  # REQ
        b"\0SP\0\0\x11\0\0",  # PAIR version 1
        b"\0SP\0\0\x10\0\1",  # reserved bytes
        b"GET / HTTP/1.1\r\n\r\n",
        b"\1",
    ],
    ids=["version", "req", "pair1", "reserved", "http", "one-byte"],
)
def test_bad_greeting_closes_the_connection(bus, greeting):
    before = count(bus, "connections", "closed", "bad_greeting")
    with connect_tcp(bus, greeting=greeting) as peer:
        peer.wait_for_end()
    until(
        lambda: count(bus, "connections", "closed", "bad_greeting") == before + 1,
        "the close is counted",
    )


def test_ipc_frame_without_mark_closes_the_connection(bus):
    before = count(bus, "connections", "closed", "bad_frame")
    with connect_ipc(bus) as peer, connect_ipc(bus) as other:
        other.ping()
        peer.send_bytes(b"\0" + peer.frame(call("echo", "1"))[1:])
        peer.wait_for_end()
        other.ping()
    assert count(bus, "connections", "closed", "bad_frame") == before + 1


def test_ipc_and_tcp_peers_call_each_other(bus):
    with connect_ipc(bus) as service, connect_tcp(bus) as caller, connect_ipc(bus) as other:
        service.register("echo")
        for peer in (caller, other):
            for piece in one_by_one(peer.frame(call("echo", "1", b"x"))):
                peer.send_bytes(piece)
            service.send(reply(service.call().request_id, b"y"))
            assert peer.reply().data == b"y"


def test_greeting_and_call_may_arrive_byte_by_byte(bus):
    with connect_tcp(bus) as service, connect_tcp(bus, greeting=b"") as caller:
        service.register("echo")
        for piece in one_by_one(GREETING + caller.frame(call("echo", "1", b"x"))):
            caller.send_bytes(piece)
        assert caller.greeting() == GREETING
        service.send(reply(service.call().request_id, b"y"))
        assert caller.reply().data == b"y"


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "no_packet"),
        (b"\xff\xff\xff", "no_packet"),
        (b"\x0a\x7f", "no_packet"),  # a field that is longer than the packet
        (b"\xfa\x01\x00", "no_packet"),  # an unknown kind only
        (b"\x32\x04\x0a\x02\xff\xfe", "no_packet"),  # an address that is not UTF-8
        (packet("register_reply"), "wrong_direction"),
        (packet("unregister_reply"), "wrong_direction"),
        (packet("subscribe_reply"), "wrong_direction"),
        (packet("unsubscribe_reply"), "wrong_direction"),
        (packet("broadcast_reply"), "wrong_direction"),
        (packet("call_request", request_id="1"), "wrong_direction"),
        (packet("credit", request_id="1", replies=1), "wrong_direction"),
        (packet("call_reply", request_id="1", type=2), "bad_reply_type"),
    ],
    ids=str,
)
def test_packet_that_no_client_may_send_closes_the_connection(bus, payload, reason):
    before = count(bus, "connections", "closed", reason)
    with connect_tcp(bus) as peer:
        peer.send(payload)
        peer.wait_for_end()
    until(lambda: count(bus, "connections", "closed", reason) == before + 1, "the close is counted")


@pytest.mark.parametrize("first", [hello(), packet("ping", token=b"1")], ids=["hello", "ping"])
def test_hello_after_the_first_packet_closes_the_connection(bus, first):
    before = count(bus, "connections", "closed", "second_hello")
    with connect_tcp(bus, first=first) as peer:
        peer.send(hello())
        peer.wait_for_end()
    until(
        lambda: count(bus, "connections", "closed", "second_hello") == before + 1,
        "the close is counted",
    )


def test_unknown_fields_are_ignored(bus):
    later = b"\xba\x3e\x03new"  # field 999, in a packet and in the message inside
    inner = packet("service_call_request", address="echo", request_id="1", data=b"x")[2:] + later
    known = b"\x32" + bytes([len(inner)]) + inner + later
    with connect_tcp(bus) as service, connect_tcp(bus, first=hello() + later) as caller:
        service.register("echo")
        caller.send(known)
        request = service.call()
        assert (request.data, request.address) == (b"x", "echo")
        service.send(reply(request.request_id, b"y") + later)
        assert caller.reply().data == b"y"


# --- sizes ---------------------------------------------------------------------


TOO_MUCH = bytes(MAX_PACKET_BYTES + 1)


@pytest.mark.sabotage("sizes-off", expects="the oversized call was not refused")
def test_oversized_call_is_refused_and_its_connection_continues(bus):
    with connect_tcp(bus) as service, connect_tcp(bus) as caller:
        service.register("echo")
        caller.send(call("echo", "big", TOO_MUCH))
        assert failure_codes(caller.ping()) == [413], "the oversized call was not refused"
        caller.send(call("echo", "small", b"x"))
        service.send(reply(service.call().request_id, b"y"))
        answer = caller.reply()
        assert (answer.request_id, answer.data) == ("small", b"y")


def test_packet_of_the_largest_size_is_forwarded(bus):
    room = MAX_PACKET_BYTES - len(call("echo", "1", TOO_MUCH)) + len(TOO_MUCH)
    with connect_tcp(bus) as service, connect_tcp(bus) as caller:
        service.register("echo")
        caller.send(call("echo", "1", bytes(room)))
        assert len(service.call().data) == room


def test_oversized_reply_ends_only_its_call(bus):
    with connect_tcp(bus) as service, connect_tcp(bus) as caller:
        service.register("echo")
        caller.send(call("echo", "1"), call("echo", "2"))
        first, second = service.call(), service.call()
        service.send(partial(first.request_id, b"p"), reply(first.request_id, TOO_MUCH))
        service.send(reply(second.request_id, b"fine"))
        assert caller.reply().data == b"p"
        answers = {answer.request_id: answer for answer in (caller.reply(), caller.reply())}
        assert failure(answers["1"]).code == 413
        assert answers["2"].data == b"fine"
        assert service.next("cancel").request_id == first.request_id


@pytest.mark.parametrize(
    "large",
    [
        packet("broadcast_request", topic="t", data=TOO_MUCH),
        packet("ping", token=TOO_MUCH),
        packet("register_request", service_id="x" * len(TOO_MUCH)),
        b"\xff" * len(TOO_MUCH),
    ],
    ids=["broadcast", "ping", "register", "noise"],
)
def test_other_oversized_packet_closes_the_connection(bus, large):
    with connect_tcp(bus) as peer:
        peer.send_bytes(peer.frame(large))
        peer.wait_for_end()


def test_frame_of_impossible_length_closes_the_connection(bus):
    with connect_tcp(bus) as peer:
        peer.send_bytes(b"\xff" * 8 + b"\x0a\x00")
        peer.wait_for_end()


# --- names and addresses -------------------------------------------------------


NODE_ID = "0x" + "ab" * 20


@pytest.mark.parametrize(
    "name",
    [
        "", "/a", "a/", "a//b", "a b", "ä", "x" * 65, "a/" * 127 + "aa", "a\0b", "a*",
        "local", "local/a", "net", "net/a", "sys", "sys/ping", NODE_ID, NODE_ID + "/a",
    ],
    ids=ascii,
)  # fmt: skip
def test_invalid_or_reserved_name_is_refused(bus, name):
    with connect_tcp(bus) as peer:
        assert peer.register(name) == 400


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "x" * 64, "/".join(["y" * 50] * 5), "sysx/a"])
def test_valid_name_is_registered_once(bus, name):
    with connect_tcp(bus) as peer, connect_tcp(bus) as other:
        assert peer.register(name) == 0
        assert peer.register(name) == 409
        assert other.register(name) == 409


def test_unregister_of_a_name_of_another_connection_is_refused(bus):
    with connect_tcp(bus) as peer, connect_tcp(bus) as other:
        other.register("theirs")
        for name in ("theirs", "unknown", ""):
            peer.send(packet("unregister_request", service_id=name))
            assert peer.next("unregister_reply").code == 404


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("", 400), ("/", 400), ("/echo", 400), ("/other/echo", 400), ("echo/", 400),
        ("/local/", 400), ("/local", 400), ("/net/", 400), ("/net/echo", 400), ("ec ho", 400),
        ("echo//x", 400), (NODE_ID, 400), (f"/net/{NODE_ID}", 400), (f"/net/{NODE_ID}/", 400),
        (f"/net/{NODE_ID}/echo", 404), (f"{NODE_ID}/echo", 404), ("unknown", 404), ("ech", 404),
        ("echoes", 404), ("/local/unknown", 404), ("sys/nothing", 404), ("sys", 404),
    ],
    ids=ascii,
)  # fmt: skip
def test_call_to_an_unknown_or_invalid_address_is_refused(bus, address, code):
    with connect_tcp(bus) as service, connect_tcp(bus) as caller:
        service.register("echo")
        caller.send(call(address, "1"))
        refusal = failure(caller.reply())
        assert (refusal.code, refusal.origin) == (code, "bus")
        assert refusal.message


def test_empty_request_id_is_refused(bus):
    with connect_tcp(bus) as service, connect_tcp(bus) as caller:
        service.register("echo")
        caller.send(call("echo", ""))
        answer = caller.reply()
        assert (answer.request_id, failure(answer).code) == ("", 400)


@pytest.mark.parametrize("address", ["a/b/c", "/local/a/b/c", "a/b/c/d"])
def test_address_resolves_to_the_longest_registered_name(bus, address):
    with connect_tcp(bus) as short, connect_tcp(bus) as long, connect_tcp(bus) as caller:
        short.register("a")
        long.register("a/b/c")
        caller.send(call(address, "1"))
        assert long.call().address == address.removeprefix("/local/")
        caller.send(call("a/b/cc", "2"))
        assert short.call().address == "a/b/cc"


# --- ids -----------------------------------------------------------------------


@pytest.mark.sabotage("ids-off", expects="the id of an open call was accepted again")
def test_id_of_an_open_call_is_refused_and_the_open_call_continues(bus):
    with connect_tcp(bus) as service, connect_tcp(bus) as caller, connect_tcp(bus) as other:
        service.register("echo")
        caller.send(call("echo", "1", b"first"))
        request = service.call()
        caller.send(call("echo", "1", b"second"))
        assert failure_codes(caller.ping()) == [409], "the id of an open call was accepted again"
        other.send(call("echo", "1", b"from another caller"))
        assert service.call().data == b"from another caller"
        service.send(reply(request.request_id, b"answer"))
        assert caller.reply().data == b"answer"
        caller.send(call("echo", "1", b"again"))  # the first call has ended, so its id is free
        assert service.call().data == b"again"


@pytest.mark.sabotage("late-off", expects="a late reply was not counted")
def test_reply_to_no_open_call_is_dropped_and_counted(bus):
    before = count(bus, "dropped", "unknown_call")
    with connect_tcp(bus) as service, connect_tcp(bus) as caller:
        service.register("echo")
        service.send(reply("never-given", b"x"), partial("never-given"))
        caller.send(call("echo", "1"))
        request = service.call()
        service.send(
            reply(request.request_id, b"answer"),
            reply(request.request_id, b"second"),
            partial(request.request_id, b"third"),
        )
        assert caller.reply().data == b"answer"
        service.ping()
        dropped = count(bus, "dropped", "unknown_call") - before
        assert dropped == 4, "a late reply was not counted"
        assert caller.ping() == []


def test_reply_of_a_connection_that_does_not_serve_the_call_is_dropped(bus):
    with connect_tcp(bus) as service, connect_tcp(bus) as forger, connect_tcp(bus) as caller:
        service.register("echo")
        caller.send(call("echo", "1"))
        request = service.call()
        forger.send(reply(request.request_id, b"forged"))
        forger.ping()
        service.send(reply(request.request_id, b"true"))
        assert caller.reply().data == b"true"


def test_cancel_of_an_unknown_id_is_counted(bus):
    before = count(bus, "refused", "unknown_cancel")
    with connect_tcp(bus) as caller:
        caller.send(cancel("nothing"))
        caller.ping()
    assert count(bus, "refused", "unknown_cancel") == before + 1


def test_all_names_of_a_connection_are_released_when_it_ends(bus):
    with connect_tcp(bus) as service:
        service.register("one")
        service.register("two")
    with connect_tcp(bus) as other:
        until(lambda: other.register("one") == 0, "the name is free")
        assert other.register("two") == 0


def test_hangup_within_a_frame_leaves_no_state(bus):
    for piece in (
        b"",
        GREETING[:3],
        GREETING,
        GREETING + b"\0\0",
        GREETING + b"\0" * 7 + b"\x09\x32",
    ):
        with connect_tcp(bus, greeting=piece):
            pass


def test_half_closed_connection_ends_after_its_calls(bus):
    with connect_tcp(bus) as service, connect_tcp(bus) as caller:
        service.register("echo")
        caller.send(call("echo", "1"))
        service.packet()  # the call is open
        service.close()
        assert failure(caller.reply()).code == 503
        caller.socket.shutdown(1)
        with pytest.raises(HungUp):
            caller.packet()
