"""The end of calls whose peer disconnects, does not reply or does not read.

Each call ends once, with a code that names the reason.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polybus.testing.bus_process import BusProcess
from tests.faults.gsb_live import (
    check_no_state_left,
    connect_tcp,
    failure,
    failure_codes,
    serving,
    tables,
)
from tests.rig.gsb_peer import Peer, Silent, call, cancel, connect, hello, packet, partial, reply
from tests.rig.observer import count, rss_bytes, until

SHORT_MS = 150
ITEM = bytes(64 * 1024)
# The bus holds at most this much for a caller that does not read: its outbox, a few packets.
HELD_BYTES = 24 << 20


@pytest.fixture(scope="module")
def running() -> Iterator[BusProcess]:
    with serving() as bus:
        yield bus


@pytest.fixture
def bus(running: BusProcess) -> Iterator[BusProcess]:
    """The bus that all tests of the module share."""
    yield running
    check_no_state_left(running)


def dropped(bus: BusProcess) -> int:
    """Return the number of dropped replies to no open call."""
    return count(bus, "dropped", "unknown_call")


def cancelled_calls(service: Peer) -> list[str]:
    """Return the calls for which the service has received a cancel."""
    return [packet.cancel.request_id for packet in service.ping()]


# --- services that disconnect or do not reply ------------------------------------


@pytest.mark.sabotage("gone-off", expects="the call of a lost service got no reply")
def test_service_that_disconnects_within_a_stream_ends_its_calls(bus):
    with connect_tcp(bus) as caller, connect_tcp(bus) as other:
        with connect_tcp(bus) as service:
            service.register("many")
            caller.send(call("many", "1"))
            requests = [service.call()]
            # Calls of two connections have no order, so the second one comes after the first.
            other.send(call("many", "1"))
            requests.append(service.call())
            service.send(*(partial(requests[0].request_id, b"%d" % at) for at in range(3)))
        assert [caller.reply().data for _ in range(3)] == [b"0", b"1", b"2"]
        until(lambda: tables(bus)["open_calls"] == 0, "both calls are closed")
        for peer in (caller, other):
            assert failure_codes(peer.ping()) == [503], "the call of a lost service got no reply"
        caller.send(call("many", "2"))
        assert failure(caller.reply()).code == 404


@pytest.mark.sabotage("deadlines-off", expects="in vain: the call ends at its deadline")
@pytest.mark.sabotage("cancel-off", expects="the service got no cancel")
def test_call_without_a_reply_ends_at_its_deadline(bus):
    before = dropped(bus)
    with connect_tcp(bus) as service, connect_tcp(bus, first=hello(deadline_ms=SHORT_MS)) as caller:
        service.register("silent")
        caller.send(call("silent", "1"))
        request = service.call()
        until(lambda: tables(bus)["open_calls"] == 0, "the call ends at its deadline", 10.0)
        assert failure_codes(caller.ping()) == [504]
        assert cancelled_calls(service) == [request.request_id], "the service got no cancel"
        service.send(reply(request.request_id, b"late"))
        service.ping()
        assert dropped(bus) == before + 1


def test_each_reply_starts_the_deadline_again(bus):
    with connect_tcp(bus) as service, connect_tcp(bus, first=hello(deadline_ms=600)) as caller:
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


# --- callers that disconnect or cancel ---------------------------------------------


@pytest.mark.sabotage("cancel-off", expects="the service got no cancel")
def test_caller_that_disconnects_within_a_stream_cancels_its_calls(bus):
    before = dropped(bus)
    with connect_tcp(bus) as service:
        service.register("many")
        with connect_tcp(bus) as caller:
            caller.send(call("many", "1"), call("many", "2"))
            call_ids = [service.call().request_id, service.call().request_id]
            service.send(*map(partial, call_ids))
            caller.reply()
        until(lambda: tables(bus)["open_calls"] == 0, "the calls are closed")
        assert cancelled_calls(service) == call_ids, "the service got no cancel"
        service.send(*map(partial, call_ids))  # as a service that has not read the cancels yet
        service.ping()
        assert dropped(bus) == before + 2


@pytest.mark.sabotage("cancel-off", expects="the service got no cancel")
def test_cancel_ends_the_call_after_the_replies_already_sent(bus):
    before, cancels = dropped(bus), count(bus, "refused", "unknown_cancel")
    with connect_tcp(bus) as service, connect_tcp(bus) as caller:
        service.register("many")
        caller.send(call("many", "1"))
        request = service.call()
        service.send(*(partial(request.request_id, b"%d" % at) for at in range(3)))
        service.ping()
        caller.send(cancel("1"), cancel("1"))
        assert [caller.reply().data for _ in range(3)] == [b"0", b"1", b"2"]
        assert failure(caller.reply()).code == 499
        assert cancelled_calls(service) == [request.request_id], "the service got no cancel"
        service.send(partial(request.request_id), reply(request.request_id))
        service.ping()
        caller.ping()
        assert dropped(bus) == before + 2
        assert count(bus, "refused", "unknown_cancel") == cancels + 1


def test_open_calls_continue_after_an_unregister(bus):
    with connect_tcp(bus) as service, connect_tcp(bus) as caller:
        service.register("echo")
        caller.send(call("echo", "1"))
        request = service.call()
        service.send(packet("unregister_request", service_id="echo"))
        assert service.next("unregister_reply").code == 0
        caller.send(call("echo", "2"))
        assert failure(caller.reply()).code == 404
        service.send(reply(request.request_id, b"served"))
        assert caller.reply().data == b"served"


# --- peers that do not read ---------------------------------------------------------


def flood(service: Peer, request_id: str, most: int) -> int:
    """Send items without reading until the bus accepts no more. Returns their number."""
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
@pytest.mark.sabotage("pressure-off", expects="the bus accepted every item")
def test_items_for_a_caller_that_never_reads_are_bounded(bus, keeps_credits):
    with (
        connect_tcp(bus, first=hello(credits=keeps_credits)) as service,
        connect(bus.address("gsb"), small=True) as caller,
        connect_tcp(bus) as others,
        connect_tcp(bus) as elsewhere,
    ):
        service.register("many")
        elsewhere.register("echo")
        caller.send(call("many", "1"))
        request = service.call()
        before = rss_bytes(bus.pid)
        most = 4 * HELD_BYTES // len(ITEM)
        sent = flood(service, request.request_id, most)
        assert sent < most, "the bus accepted every item"
        assert rss_bytes(bus.pid) - before < HELD_BYTES
        for at in range(20):  # other connections continue
            others.send(call("echo", f"{at}"))
            elsewhere.send(reply(elsewhere.call().request_id, b"%d" % at))
            assert others.reply().data == b"%d" % at
        caller.send(cancel("1"))  # the bus still reads from the caller
        until(lambda: tables(bus)["open_calls"] == 0, "the call is cancelled")


def test_slow_caller_delays_only_its_own_stream(bus):
    with (
        connect_tcp(bus, first=hello(credits=True)) as service,
        connect(bus.address("gsb"), small=True) as slow,
        connect_tcp(bus) as quick,
    ):
        service.register("many")
        slow.send(call("many", "1"))
        stuck = service.call()
        service.send(*(partial(stuck.request_id, ITEM) for _ in range(16)))  # these need no credit
        quick.send(call("many", "1"))
        while (received := service.packet()).WhichOneof("kind") != "call_request":
            pass  # credit of the first call
        request = received.call_request
        for at in range(200):
            service.send(partial(request.request_id, b"%d" % at))
            assert quick.reply().data == b"%d" % at
            if at % 50 == 49:
                service.ping()  # reads the granted credit
        service.send(reply(request.request_id))
        assert quick.reply().type == 0


def test_service_that_never_reads_blocks_only_its_callers(bus):
    with (
        connect(bus.address("gsb"), small=True) as blocked,
        connect_tcp(bus) as echo,
        connect_tcp(bus) as caller,
        connect_tcp(bus) as other,
    ):
        blocked.register("blocked")
        echo.register("echo")
        caller.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            caller.send(*(call("blocked", f"{at}", ITEM) for at in range(1000)))
        other.send(call("echo", "1", b"x"))
        echo.send(reply(echo.call().request_id, b"y"))
        assert other.reply().data == b"y"
        blocked.close()
        caller.socket.settimeout(20)
        assert failure(caller.reply()).code == 503


def test_connection_may_call_its_own_service(bus):
    with connect_tcp(bus) as peer:
        peer.register("me")
        peer.send(call("me", "1", b"x"))
        request = peer.call()
        peer.send(reply(request.request_id, request.data))
        assert peer.reply().data == b"x"
        peer.send(call("me", "2"))
        peer.call()  # the connection ends as caller and as service of this call


# --- stopped clocks ----------------------------------------------------------------


@pytest.mark.parametrize("keeps_credits", [True, False], ids=["credits", "plain"])
@pytest.mark.sabotage("pressure-off", expects="the bus accepted every item")
def test_deadline_is_stopped_while_the_service_may_not_send(bus, keeps_credits):
    first = hello(deadline_ms=SHORT_MS)
    with (
        connect_tcp(bus, first=hello(credits=keeps_credits)) as service,
        connect(bus.address("gsb"), first=first, small=True) as caller,
    ):
        service.register("many")
        caller.send(call("many", "1"))
        request = service.call()
        most = 4 * HELD_BYTES // len(ITEM)
        sent = flood(service, request.request_id, most)  # waits longer than the deadline
        assert sent < most, "the bus accepted every item"
        assert tables(bus)["open_calls"] == 1
        replies = [caller.reply() for _ in range(sent)]
        assert {(item.code, item.type, len(item.data)) for item in replies} == {(0, 1, len(ITEM))}


def test_full_caller_gets_the_cancelled_reply_after_its_items(bus):
    with (
        connect_tcp(bus, first=hello(credits=True)) as service,
        connect(bus.address("gsb"), small=True) as caller,
    ):
        service.register("many")
        caller.send(call("many", "1"))
        request = service.call()
        sent = flood(service, request.request_id, 4 * HELD_BYTES // len(ITEM))
        caller.send(cancel("1"))
        until(lambda: tables(bus)["open_calls"] == 0, "the call of a full caller is cancelled")
        items = 0
        while (last := caller.reply()).type == 1:
            items += 1
        assert failure(last).code == 499
        assert items <= sent


@pytest.mark.parametrize("keeps_credits", [True, False], ids=["credits", "plain"])
def test_items_of_a_halted_service_that_disconnects_are_delivered(bus, keeps_credits):
    """48 items fit into the socket buffers. With more, the end could not reach the bus."""
    with (
        connect(bus.address("gsb"), small=True) as caller,
        connect_tcp(bus) as successor,
    ):
        with connect_tcp(bus, first=hello(credits=keeps_credits)) as service:
            service.register("many")
            caller.send(call("many", "1"))
            request = service.call()
            sent = flood(service, request.request_id, 48)
        until(lambda: successor.register("many") == 0, "the name is free at once")
        items = 0
        while (last := caller.reply()).type == 1:
            items += 1
        assert failure(last).code == 503
        assert 0 < items <= sent + 1


# --- pings and rules ------------------------------------------------------------


RULES = "deny everyone call secret*; deny everyone create mine*; deny everyone call sys/stats"


def test_pings_and_rules():
    """Both need settings of their own, and share one bus."""
    impatient = {"POLYBUS_GSB_PING_IDLE_S": "0.2", "POLYBUS_GSB_PING_TIMEOUT_S": "1.5"}
    with serving(env={**impatient, "POLYBUS_ACL": RULES}) as bus:
        check_denied_calls_and_names(bus)
        check_only_peers_that_asked_are_pinged(bus)
        check_no_state_left(bus)


def check_only_peers_that_asked_are_pinged(bus: BusProcess) -> None:
    with (
        connect_tcp(bus, first=hello(ping=True)) as active,
        connect_tcp(bus, first=hello(ping=True)) as silent,
        connect_tcp(bus, first=hello()) as plain,
    ):
        for _ in range(4):
            token = active.next("ping").token
            active.send(packet("pong", token=token))
        silent.wait_for_end()
        assert count(bus, "connections", "closed", "ping_timeout") == 1
        active.ping()
        plain.send(packet("ping", token=b"alive"))
        assert plain.next("pong").token == b"alive"  # and no ping before it


def check_denied_calls_and_names(bus: BusProcess) -> None:
    with connect_tcp(bus) as service, connect_tcp(bus) as caller:
        assert service.register("mine/x") == 403
        for name in ("secret", "open"):
            assert service.register(name) == 0
        for address in ("secret", "secret/x", "/local/secret", "sys/stats"):
            caller.send(call(address, "1"))
            refusal = failure(caller.reply())
            assert (refusal.code, refusal.origin) == (403, "bus")
        caller.send(call("open", "1"))
        service.send(reply(service.call().request_id, b"fine"))
        assert caller.reply().data == b"fine"
        assert count(bus, "refused", "call_denied") == 4
