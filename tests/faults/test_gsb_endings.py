"""How calls end when somebody dies, is silent, or does not read: once, with a clear code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polybus.testing.bus_process import BusProcess
from tests.faults.gsb_live import check_nothing_is_left, failure, party, serving, tables
from tests.rig.gsb_peer import Peer, Silent, call, cancel, connect, hello, packet, partial, reply
from tests.rig.observer import count, rss_bytes, until

SHORT_MS = 150
ITEM = bytes(64 * 1024)
# What a caller that does not read can make the bus hold: its outbox, and a few packets.
HELD_BYTES = 24 << 20


@pytest.fixture(scope="module")
def running() -> Iterator[BusProcess]:
    with serving() as bus:
        yield bus


@pytest.fixture
def bus(running: BusProcess) -> Iterator[BusProcess]:
    """All tests share one."""
    yield running
    check_nothing_is_left(running)


def dropped(bus: BusProcess) -> int:
    """Replies that belonged to no call."""
    return count(bus, "dropped", "unknown_call")


# --- a service that dies, or is silent ------------------------------------------


@pytest.mark.sabotage("gone-off", expects="the call never ended")
def test_a_service_that_dies_in_the_middle_of_a_stream(bus):
    with party(bus) as caller, party(bus) as other:
        with party(bus) as service:
            service.register("many")
            caller.send(call("many", "1"))
            other.send(call("many", "1"))
            requests = [service.call(), service.call()]
            service.send(*(partial(requests[0].request_id, b"%d" % at) for at in range(3)))
        assert [caller.reply().data for _ in range(3)] == [b"0", b"1", b"2"]
        caller.socket.settimeout(3)
        try:
            ended = caller.reply()
        except Silent:
            raise AssertionError("the call never ended") from None
        assert failure(ended).code == 503
        assert failure(other.reply()).code == 503
        caller.send(call("many", "2"))
        assert failure(caller.reply()).code == 404


@pytest.mark.sabotage("deadlines-off", "cancel-off", expects="nobody was told")
def test_a_service_that_never_answers(bus):
    before = dropped(bus)
    with party(bus) as service, party(bus, first=hello(deadline_ms=SHORT_MS)) as caller:
        service.register("silent")
        service.socket.settimeout(3)
        caller.socket.settimeout(3)
        caller.send(call("silent", "1"))
        request = service.call()
        try:
            assert failure(caller.reply()).code == 504
            assert service.next("cancel").request_id == request.request_id
        except Silent:
            raise AssertionError("nobody was told") from None
        service.send(reply(request.request_id, b"late"))
        service.ping()
        assert dropped(bus) == before + 1


def test_the_deadline_runs_from_the_last_reply(bus):
    with party(bus) as service, party(bus, first=hello(deadline_ms=600)) as caller:
        service.register("slow")
        caller.send(call("slow", "1"))
        request = service.call()
        service.socket.settimeout(0.3)
        for at in range(4):  # twice as long as the deadline, in steps of half of it
            with pytest.raises(Silent):
                service.packet()
            service.send(partial(request.request_id, b"%d" % at))
        assert [caller.reply().data for _ in range(4)] == [b"0", b"1", b"2", b"3"]
        service.send(reply(request.request_id))
        assert caller.reply().code == 0


# --- a caller that dies, or cancels -----------------------------------------------


@pytest.mark.sabotage("cancel-off", expects="the service was not told")
def test_a_caller_that_dies_in_the_middle_of_a_stream(bus):
    before = dropped(bus)
    with party(bus) as service:
        service.register("many")
        service.socket.settimeout(3)
        with party(bus) as caller:
            caller.send(call("many", "1"), call("many", "2"))
            requests = {service.call().request_id, service.call().request_id}
            service.send(*(partial(one) for one in requests))
            caller.reply()
        try:
            cancelled = {service.next("cancel").request_id for _ in requests}
        except Silent:
            raise AssertionError("the service was not told") from None
        assert cancelled == requests
        assert tables(bus)["open_calls"] == 0
        service.send(*(partial(one) for one in requests))  # it may not have read it yet
        service.ping()
        assert dropped(bus) == before + 2


@pytest.mark.sabotage("cancel-off", expects="the service was not told")
def test_a_cancel_ends_the_call_behind_what_was_sent(bus):
    before, cancels = dropped(bus), count(bus, "refused", "unknown_cancel")
    with party(bus) as service, party(bus) as caller:
        service.register("many")
        service.socket.settimeout(3)
        caller.send(call("many", "1"))
        request = service.call()
        service.send(*(partial(request.request_id, b"%d" % at) for at in range(3)))
        service.ping()
        caller.send(cancel("1"), cancel("1"))
        assert [caller.reply().data for _ in range(3)] == [b"0", b"1", b"2"]
        assert failure(caller.reply()).code == 499
        try:
            assert service.next("cancel").request_id == request.request_id
        except Silent:
            raise AssertionError("the service was not told") from None
        service.send(partial(request.request_id), reply(request.request_id))
        service.ping()
        caller.ping()
        assert dropped(bus) == before + 2
        assert count(bus, "refused", "unknown_cancel") == cancels + 1


def test_open_calls_go_on_after_an_unregister(bus):
    with party(bus) as service, party(bus) as caller:
        service.register("echo")
        caller.send(call("echo", "1"))
        request = service.call()
        service.send(packet("unregister_request", service_id="echo"))
        assert service.next("unregister_reply").code == 0
        caller.send(call("echo", "2"))
        assert failure(caller.reply()).code == 404
        service.send(reply(request.request_id, b"still"))
        assert caller.reply().data == b"still"


# --- who does not read ------------------------------------------------------------


def flood(service: Peer, request_id: str, most: int) -> int:
    """Send items until the bus takes no more, without ever reading; how many it took."""
    service.socket.settimeout(0.5)
    sent = 0
    try:
        while sent < most:
            service.send(partial(request_id, ITEM))
            sent += 1
    except TimeoutError:
        pass
    return sent


@pytest.mark.parametrize("keeps_credits", [True, False], ids=["credits", "plain"])
@pytest.mark.sabotage("pressure-off", expects="the bus took everything")
def test_a_caller_that_never_reads_is_not_held_in_memory(bus, keeps_credits):
    with (
        party(bus, first=hello(credits=keeps_credits)) as service,
        connect(bus.address("gsb"), small=True) as caller,
        party(bus) as others,
        party(bus) as elsewhere,
    ):
        service.register("many")
        elsewhere.register("echo")
        caller.send(call("many", "1"))
        request = service.call()
        before = rss_bytes(bus.pid)
        most = 4 * HELD_BYTES // len(ITEM)
        sent = flood(service, request.request_id, most)
        assert sent < most, "the bus took everything"
        assert rss_bytes(bus.pid) - before < HELD_BYTES
        for at in range(20):  # nobody else is held up
            others.send(call("echo", f"{at}"))
            elsewhere.send(reply(elsewhere.call().request_id, b"%d" % at))
            assert others.reply().data == b"%d" % at
        caller.send(cancel("1"))  # it is heard, though nothing of the caller was read
        until(lambda: tables(bus)["open_calls"] == 0, "the call is cancelled")


def test_a_slow_caller_slows_only_its_own_stream(bus):
    with (
        party(bus, first=hello(credits=True)) as service,
        connect(bus.address("gsb"), small=True) as slow,
        party(bus) as quick,
    ):
        service.register("many")
        slow.send(call("many", "1"))
        stuck = service.call()
        service.send(*(partial(stuck.request_id, ITEM) for _ in range(16)))  # all of them free
        quick.send(call("many", "1"))
        while (found := service.packet()).WhichOneof("kind") != "call_request":
            pass  # credit for the first
        request = found.call_request
        for at in range(200):
            service.send(partial(request.request_id, b"%d" % at))
            assert quick.reply().data == b"%d" % at
            if at % 50 == 49:
                service.ping()  # takes the credit that came
        service.send(reply(request.request_id))
        assert quick.reply().type == 0


def test_a_service_that_never_reads_holds_up_its_callers_alone(bus):
    with (
        connect(bus.address("gsb"), small=True) as deaf,
        party(bus) as echo,
        party(bus) as caller,
        party(bus) as other,
    ):
        deaf.register("deaf")
        echo.register("echo")
        caller.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            caller.send(*(call("deaf", f"{at}", ITEM) for at in range(1000)))
        other.send(call("echo", "1", b"x"))
        echo.send(reply(echo.call().request_id, b"y"))
        assert other.reply().data == b"y"
        deaf.close()
        caller.socket.settimeout(20)
        assert failure(caller.reply()).code == 503


def test_a_service_that_calls_itself(bus):
    with party(bus) as peer:
        peer.register("me")
        peer.send(call("me", "1", b"x"))
        request = peer.call()
        peer.send(reply(request.request_id, request.data))
        assert peer.reply().data == b"x"
        peer.send(call("me", "2"))
        peer.call()  # and then it goes, as caller and as service


# --- clocks that stand ------------------------------------------------------------


@pytest.mark.parametrize("keeps_credits", [True, False], ids=["credits", "plain"])
@pytest.mark.sabotage("pressure-off", expects=r"assert (\d+) < \1")
def test_the_deadline_stands_while_the_service_may_not_send(bus, keeps_credits):
    first = hello(deadline_ms=SHORT_MS)
    with (
        party(bus, first=hello(credits=keeps_credits)) as service,
        connect(bus.address("gsb"), first=first, small=True) as caller,
    ):
        service.register("many")
        caller.send(call("many", "1"))
        request = service.call()
        most = 4 * HELD_BYTES // len(ITEM)
        sent = flood(service, request.request_id, most)  # it waits longer than the deadline
        assert sent < most
        assert tables(bus)["open_calls"] == 1
        replies = [caller.reply() for _ in range(sent)]
        assert {(one.code, one.type, len(one.data)) for one in replies} == {(0, 1, len(ITEM))}


def test_a_caller_full_of_items_hears_that_it_was_cancelled_behind_them(bus):
    with (
        party(bus, first=hello(credits=True)) as service,
        connect(bus.address("gsb"), small=True) as caller,
    ):
        service.register("many")
        caller.send(call("many", "1"))
        request = service.call()
        sent = flood(service, request.request_id, 4 * HELD_BYTES // len(ITEM))
        caller.send(cancel("1"))
        until(lambda: tables(bus)["open_calls"] == 0, "it is cancelled, though full")
        items = 0
        while (found := caller.reply()).type == 1:
            items += 1
        assert failure(found).code == 499
        assert items <= sent


@pytest.mark.parametrize("keeps_credits", [True, False], ids=["credits", "plain"])
def test_a_service_that_hangs_up_while_it_is_not_read(bus, keeps_credits):
    """What it sent lies in the bus's socket; more would keep its end from arriving at all."""
    with (
        connect(bus.address("gsb"), small=True) as caller,
        party(bus) as successor,
    ):
        with party(bus, first=hello(credits=keeps_credits)) as service:
            service.register("many")
            caller.send(call("many", "1"))
            request = service.call()
            sent = flood(service, request.request_id, 48)
        until(lambda: successor.register("many") == 0, "the name is free at once")
        items = 0
        while (found := caller.reply()).type == 1:
            items += 1
        assert failure(found).code == 503
        assert 0 < items <= sent + 1


# --- pings and rules ------------------------------------------------------------


RULES = "deny everyone call secret*; deny everyone create mine*; deny everyone call sys/stats"


def test_pings_and_rules():
    """Both in one bus, which has settings of its own."""
    impatient = {"POLYBUS_GSB_PING_IDLE_S": "0.2", "POLYBUS_GSB_PING_TIMEOUT_S": "1.5"}
    with serving(env={**impatient, "POLYBUS_ACL": RULES}) as bus:
        calls_and_names_that_a_rule_denies(bus)
        pings_go_to_those_who_asked_for_them(bus)
        check_nothing_is_left(bus)


def pings_go_to_those_who_asked_for_them(bus: BusProcess) -> None:
    with (
        party(bus, first=hello(ping=True)) as lively,
        party(bus, first=hello(ping=True)) as dead,
        party(bus, first=hello()) as plain,
    ):
        for _ in range(4):
            token = lively.next("ping").token
            lively.send(packet("pong", token=token))
        dead.wait_for_end()
        assert count(bus, "connections", "closed", "ping_timeout") == 1
        lively.ping()
        plain.send(packet("ping", token=b"still here"))
        assert plain.next("pong").token == b"still here"  # and no ping before it


def calls_and_names_that_a_rule_denies(bus: BusProcess) -> None:
    with party(bus) as service, party(bus) as caller:
        assert service.register("mine/x") == 403
        for name in ("secret", "open"):
            assert service.register(name) == 0
        for address in ("secret", "secret/x", "/local/secret", "sys/stats"):
            caller.send(call(address, "1"))
            found = failure(caller.reply())
            assert (found.code, found.origin) == (403, "bus")
        caller.send(call("open", "1"))
        service.send(reply(service.call().request_id, b"fine"))
        assert caller.reply().data == b"fine"
        assert count(bus, "refused", "call_denied") == 4
