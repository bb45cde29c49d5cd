"""What GSB's peers may do wrong, on a live bus with plain sockets.

Whoever breaks the protocol is cut, with the reason counted; whoever only asks for what
cannot be is told so, and goes on. Nobody else notices, and nothing is left behind.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polybus.testing.bus_process import BusProcess
from tests.faults.gsb_live import (
    MAX_PACKET_BYTES,
    check_nothing_is_left,
    failure,
    party,
    party_over_ipc,
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
    """All tests share one."""
    yield running
    check_nothing_is_left(running)


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
def test_a_bad_greeting_is_cut(bus, greeting):
    before = count(bus, "connections", "closed", "bad_greeting")
    with party(bus, greeting=greeting) as peer:
        peer.wait_for_end()
    until(
        lambda: count(bus, "connections", "closed", "bad_greeting") == before + 1, "it is counted"
    )


def test_a_frame_over_ipc_without_its_mark_is_cut(bus):
    before = count(bus, "connections", "closed", "bad_frame")
    with party_over_ipc(bus) as peer, party_over_ipc(bus) as other:
        other.ping()
        peer.send_bytes(b"\0" + peer.frame(call("echo", "1"))[1:])
        peer.wait_for_end()
        other.ping()
    assert count(bus, "connections", "closed", "bad_frame") == before + 1


def test_over_ipc_and_tcp_they_meet(bus):
    with party_over_ipc(bus) as service, party(bus) as caller, party_over_ipc(bus) as other:
        service.register("echo")
        for one in (caller, other):
            for piece in one_by_one(one.frame(call("echo", "1", b"x"))):
                one.send_bytes(piece)
            service.send(reply(service.call().request_id, b"y"))
            assert one.reply().data == b"y"


def test_a_greeting_and_a_call_byte_by_byte(bus):
    with party(bus) as service, party(bus, greeting=b"") as caller:
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
        (b"\xfa\x01\x00", "no_packet"),  # a kind that nobody knows, and no other
        (b"\x32\x04\x0a\x02\xff\xfe", "no_packet"),  # an address that is no text
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
def test_what_is_no_packet_of_a_client_is_cut(bus, payload, reason):
    before = count(bus, "connections", "closed", reason)
    with party(bus) as peer:
        peer.send(payload)
        peer.wait_for_end()
    until(lambda: count(bus, "connections", "closed", reason) == before + 1, "it is counted")


@pytest.mark.parametrize("first", [hello(), packet("ping", token=b"1")], ids=["hello", "ping"])
def test_a_hello_that_is_not_the_first_packet_is_cut(bus, first):
    before = count(bus, "connections", "closed", "second_hello")
    with party(bus, first=first) as peer:
        peer.send(hello())
        peer.wait_for_end()
    until(
        lambda: count(bus, "connections", "closed", "second_hello") == before + 1, "it is counted"
    )


def test_unknown_fields_are_ignored(bus):
    later = b"\xba\x3e\x03new"  # field 999, in a packet and in the message inside
    inner = packet("service_call_request", address="echo", request_id="1", data=b"x")[2:] + later
    known = b"\x32" + bytes([len(inner)]) + inner + later
    with party(bus) as service, party(bus, first=hello() + later) as caller:
        service.register("echo")
        caller.send(known)
        request = service.call()
        assert (request.data, request.address) == (b"x", "echo")
        service.send(reply(request.request_id, b"y") + later)
        assert caller.reply().data == b"y"


# --- sizes ---------------------------------------------------------------------


TOO_MUCH = bytes(MAX_PACKET_BYTES + 1)


@pytest.mark.sabotage("sizes-off", expects="Silent: the bus said nothing")
def test_a_call_over_the_limit_is_refused_and_its_connection_lives(bus):
    with party(bus) as service, party(bus) as caller:
        service.register("echo")
        caller.send(call("echo", "big", TOO_MUCH), call("echo", "small", b"x"))
        assert failure(caller.reply()).code == 413
        service.send(reply(service.call().request_id, b"y"))
        answer = caller.reply()
        assert (answer.request_id, answer.data) == ("small", b"y")


def test_the_largest_packet_passes(bus):
    room = MAX_PACKET_BYTES - len(call("echo", "1", TOO_MUCH)) + len(TOO_MUCH)
    with party(bus) as service, party(bus) as caller:
        service.register("echo")
        caller.send(call("echo", "1", bytes(room)))
        assert len(service.call().data) == room


def test_a_reply_over_the_limit_ends_its_call_and_no_other(bus):
    with party(bus) as service, party(bus) as caller:
        service.register("echo")
        caller.send(call("echo", "1"), call("echo", "2"))
        first, second = service.call(), service.call()
        service.send(partial(first.request_id, b"p"), reply(first.request_id, TOO_MUCH))
        service.send(reply(second.request_id, b"fine"))
        assert caller.reply().data == b"p"
        answers = {one.request_id: one for one in (caller.reply(), caller.reply())}
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
def test_any_other_packet_over_the_limit_is_cut(bus, large):
    with party(bus) as peer:
        peer.send_bytes(peer.frame(large))
        peer.wait_for_end()


def test_a_frame_of_an_impossible_length_is_cut(bus):
    with party(bus) as peer:
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
def test_names_that_cannot_be_registered(bus, name):
    with party(bus) as peer:
        assert peer.register(name) == 400


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "x" * 64, "/".join(["y" * 50] * 5), "sysx/a"])
def test_names_that_can(bus, name):
    with party(bus) as peer, party(bus) as other:
        assert peer.register(name) == 0
        assert peer.register(name) == 409
        assert other.register(name) == 409


def test_unregistering_what_is_not_ours(bus):
    with party(bus) as peer, party(bus) as other:
        other.register("theirs")
        for name in ("theirs", "nobody's", ""):
            peer.send(packet("unregister_request", service_id=name))
            assert peer.next("unregister_reply").code == 404


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("", 400), ("/", 400), ("/echo", 400), ("/other/echo", 400), ("echo/", 400),
        ("/local/", 400), ("/local", 400), ("/net/", 400), ("/net/echo", 400), ("ec ho", 400),
        ("echo//x", 400), (NODE_ID, 400), (f"/net/{NODE_ID}", 400), (f"/net/{NODE_ID}/", 400),
        (f"/net/{NODE_ID}/echo", 404), (f"{NODE_ID}/echo", 404), ("nobody", 404), ("ech", 404),
        ("echoes", 404), ("/local/nobody", 404), ("sys/nothing", 404), ("sys", 404),
    ],
    ids=ascii,
)  # fmt: skip
def test_addresses_that_lead_nowhere(bus, address, code):
    with party(bus) as service, party(bus) as caller:
        service.register("echo")
        caller.send(call(address, "1"))
        found = failure(caller.reply())
        assert (found.code, found.origin) == (code, "bus")
        assert found.message


def test_an_empty_request_id(bus):
    with party(bus) as service, party(bus) as caller:
        service.register("echo")
        caller.send(call("echo", ""))
        answer = caller.reply()
        assert (answer.request_id, failure(answer).code) == ("", 400)


@pytest.mark.parametrize("address", ["a/b/c", "/local/a/b/c", "a/b/c/d"])
def test_the_longest_name_wins_at_a_slash(bus, address):
    with party(bus) as short, party(bus) as long, party(bus) as caller:
        short.register("a")
        long.register("a/b/c")
        caller.send(call(address, "1"))
        assert long.call().address == address.removeprefix("/local/")
        caller.send(call("a/b/cc", "2"))
        assert short.call().address == "a/b/cc"


# --- ids -----------------------------------------------------------------------


@pytest.mark.sabotage("ids-off", expects="Silent: the bus said nothing")
def test_an_id_that_is_in_use_is_refused_and_the_open_call_goes_on(bus):
    with party(bus) as service, party(bus) as caller, party(bus) as other:
        service.register("echo")
        caller.send(call("echo", "1", b"first"))
        request = service.call()
        caller.send(call("echo", "1", b"second"))
        assert failure(caller.reply()).code == 409
        other.send(call("echo", "1", b"of another"))
        assert service.call().data == b"of another"
        service.send(reply(request.request_id, b"answer"))
        assert caller.reply().data == b"answer"
        caller.send(call("echo", "1", b"again"))  # it has ended: the id is free
        assert service.call().data == b"again"


@pytest.mark.sabotage("late-off", expects=r"assert 0 == \(0 \+ 4\)")
def test_replies_that_belong_to_no_call_are_counted_and_dropped(bus):
    before = count(bus, "dropped", "unknown_call")
    with party(bus) as service, party(bus) as caller:
        service.register("echo")
        service.send(reply("never-given", b"x"), partial("never-given"))
        caller.send(call("echo", "1"))
        request = service.call()
        service.send(
            reply(request.request_id, b"answer"),
            reply(request.request_id, b"once more"),
            partial(request.request_id, b"and more"),
        )
        assert caller.reply().data == b"answer"
        service.ping()
        assert count(bus, "dropped", "unknown_call") == before + 4
        caller.send(packet("ping", token=b"last"))
        assert caller.next("pong").token == b"last"  # nothing came before it


def test_replies_of_a_connection_that_was_not_asked_reach_nobody(bus):
    with party(bus) as service, party(bus) as forger, party(bus) as caller:
        service.register("echo")
        caller.send(call("echo", "1"))
        request = service.call()
        forger.send(reply(request.request_id, b"forged"))
        forger.ping()
        service.send(reply(request.request_id, b"true"))
        assert caller.reply().data == b"true"


def test_a_cancel_of_an_unknown_id_is_count(bus):
    before = count(bus, "refused", "unknown_cancel")
    with party(bus) as caller:
        caller.send(cancel("nothing"))
        caller.ping()
    assert count(bus, "refused", "unknown_cancel") == before + 1


def test_two_services_on_one_connection_end_with_it(bus):
    with party(bus) as service:
        service.register("one")
        service.register("two")
    with party(bus) as other:
        until(lambda: other.register("one") == 0, "the name is free")
        assert other.register("two") == 0


def test_a_client_that_hangs_up_in_the_middle_of_a_frame(bus):
    for piece in (
        b"",
        GREETING[:3],
        GREETING,
        GREETING + b"\0\0",
        GREETING + b"\0" * 7 + b"\x09\x32",
    ):
        with party(bus, greeting=piece):
            pass


def test_the_bus_still_works(bus):
    with party(bus) as service, party(bus) as caller:
        service.register("echo")
        caller.send(call("echo", "1"))
        service.packet()  # the call is under way
        service.close()
        assert failure(caller.reply()).code == 503
        caller.socket.shutdown(1)
        with pytest.raises(HungUp):
            caller.packet()
