"""Calls of a bus in memory: they open, stream, and end in exactly one FULL."""

from __future__ import annotations

import pytest

from polybus.bus.policy import Policy
from polybus.bus.rule_table import PlacedRule
from polybus.dialects.gsb.limits import GsbLimits
from polybus.model.access_rule import Rule
from polybus.model.identity import Identity
from tests.rig.gsb_memory_peer import MemoryPeer, Reply
from tests.rig.memory_bus import MemoryBus

NODE = "0x" + "0123456789abcdef" * 2 + "01234567"
FULL, PARTIAL = 0, 1


@pytest.fixture
def bus(padding) -> MemoryBus:
    return MemoryBus(gsb=GsbLimits(max_open_calls=3, max_services=2), gsb_padding=padding)


@pytest.fixture(params=[False, True], ids=["tcp", "ipc"])
def pair(bus, request) -> tuple[MemoryPeer, MemoryPeer]:
    """Return a service `greeter` and a caller."""
    service, caller = (
        MemoryPeer(bus, is_unix=request.param),
        MemoryPeer(bus, is_unix=not request.param),
    )
    assert service.register("greeter") == 0
    return service, caller


def empty(bus: MemoryBus) -> bool:
    return all(bus.stats("gsb", name) == 0 for name in ("open_calls", "serving", "waiting"))


def test_call_reaches_the_service_and_its_reply_the_caller(bus, pair):
    service, caller = pair
    caller.call("greeter", "seven", b"data")
    request = service.called()
    assert (request.data, request.address) == (b"data", "greeter")
    assert request.caller == "local:anonymous"
    assert request.request_id != "seven"
    service.reply(request.request_id, b"hello")
    assert caller.replies() == [Reply("seven", 0, FULL, b"hello")]
    assert empty(bus)


def test_stream_is_ordered_and_ends_with_one_full(bus, pair):
    service, caller = pair
    caller.call("greeter")
    call_id = service.called().request_id
    items = [b"%d" % n for n in range(10)]
    for item in items:
        service.reply(call_id, item, partial=True)
    service.reply(call_id)
    assert caller.replies() == [
        *[Reply("1", 0, PARTIAL, item) for item in items],
        Reply("1", 0, FULL, b""),
    ]
    assert empty(bus)


def test_failure_of_the_service_is_forwarded_unchanged(pair):
    service, caller = pair
    caller.call("greeter")
    service.reply(service.called().request_id, b"\x80", code=500)
    assert caller.replies() == [Reply("1", 500, FULL, b"\x80")]


@pytest.mark.parametrize("address", ["greeter/many/more", "/local/greeter/many/more"])
def test_address_resolves_to_the_longest_registered_name(bus, pair, address):
    service, caller = pair
    other = MemoryPeer(bus)
    assert other.register("greeter/many") == 0
    caller.call(address)
    assert other.called().address == "greeter/many/more"
    caller.call("greeter/manymore", "2")
    assert service.called().address == "greeter/manymore"


def test_address_resolves_to_the_shorter_name_after_unregister(bus, pair):
    service, caller = pair
    other = MemoryPeer(bus)
    other.register("greeter/many")
    caller.call("greeter/many")
    assert other.called().address == "greeter/many"
    assert other.unregister("greeter/many") == 0
    caller.call("greeter/many", "2")
    assert service.called().address == "greeter/many"


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("unknown", 404),
        ("greeterx", 404),
        ("local/greeter", 404),
        ("net/greeter", 404),
        ("sys", 404),
        ("sys/nothing", 404),
        (f"/net/{NODE}/greeter", 404),
        (f"{NODE}/greeter", 404),
        ("", 400),
        ("/", 400),
        ("/greeter", 400),
        ("greeter/", 400),
        ("greeter//x", 400),
        ("/local/", 400),
        ("/local", 400),
        ("/net/", 400),
        ("/net/greeter", 400),
        ("/net/greeter/x", 400),
        (f"/net/{NODE}", 400),
        (f"/net/{NODE}/", 400),
        (NODE, 400),
        ("gre eter", 400),
        ("grüß", 400),
        ("x" * 65, 400),
        ("/".join(["x"] * 129), 400),
    ],
)
def test_call_to_an_unknown_or_invalid_address_is_refused(pair, address, code):
    _, caller = pair
    caller.call(address, "7")
    assert caller.failure() == ("7", code)


def test_name_may_have_255_bytes(bus):
    service, caller = MemoryPeer(bus), MemoryPeer(bus)
    name = "/".join(["x" * 63] * 3 + ["y" * 63])
    assert len(name) == 255
    assert service.register(name) == 0
    caller.call(f"/local/{name}")
    assert service.called().address == name
    assert service.register(name + "z") == 400


@pytest.mark.parametrize(
    "name",
    ["", "/x", "x/", "x//y", "x y", "x\n", "local", "local/x", "net/x", "sys", "sys/x", NODE],
)
def test_invalid_or_reserved_name_is_refused(bus, name):
    assert MemoryPeer(bus).register(name) == 400


def test_name_is_registered_by_one_connection_at_a_time(bus, pair):
    service, caller = pair
    assert caller.register("greeter") == 409
    assert service.register("greeter") == 409
    assert caller.unregister("greeter") == 404
    assert service.unregister("greeter") == 0
    assert caller.register("greeter") == 0


def test_services_per_connection_are_limited(bus):
    service = MemoryPeer(bus)
    assert [service.register(name) for name in ("a", "b", "c")] == [0, 0, 403]
    assert bus.stats("refused", "max_services") == 1


def test_open_calls_continue_after_an_unregister(bus, pair):
    service, caller = pair
    caller.call("greeter")
    call_id = service.called().request_id
    service.unregister("greeter")
    caller.call("greeter", "2")
    assert caller.failure() == ("2", 404)
    service.reply(call_id, b"late")
    assert caller.replies() == [Reply("1", 0, FULL, b"late")]


@pytest.mark.parametrize("request_id", ["", "x" * 256])
def test_empty_or_too_long_request_id_is_refused(pair, request_id):
    _, caller = pair
    caller.call("greeter", request_id)
    assert caller.failure() == (request_id, 400)


def test_id_of_an_open_call_is_refused_and_the_open_call_continues(bus, pair):
    service, caller = pair
    caller.call("greeter", "1", b"first")
    call_id = service.called().request_id
    caller.call("greeter", "1", b"second")
    assert caller.failure() == ("1", 409)
    assert service.kinds() == []
    service.reply(call_id, b"answer")
    assert caller.replies() == [Reply("1", 0, FULL, b"answer")]
    caller.call("greeter", "1")
    assert service.called().data == b""


def test_id_in_use_is_refused_before_a_bad_address(bus, pair):
    service, caller = pair
    caller.call("greeter", "1")
    service.called()
    caller.call("no//address", "1")
    assert caller.failure() == ("1", 409)
    caller.call("no//address", "2")
    assert caller.failure() == ("2", 400)


def test_two_callers_may_use_the_same_id(bus, pair):
    service, caller = pair
    other = MemoryPeer(bus)
    caller.call("greeter", "1", b"a")
    other.call("greeter", "1", b"b")
    first, second = service.called(), service.called()
    service.reply(second.request_id, b"B")
    service.reply(first.request_id, b"A")
    assert caller.replies() == [Reply("1", 0, FULL, b"A")]
    assert other.replies() == [Reply("1", 0, FULL, b"B")]


def test_open_calls_per_caller_are_limited(bus, pair):
    _, caller = pair
    for n in range(4):
        caller.call("greeter", str(n))
    assert caller.failure() == ("3", 503)
    assert bus.stats("refused", "max_open_calls") == 1


def test_cancelled_call_ends_after_the_items_already_sent(bus, pair):
    service, caller = pair
    caller.call("greeter")
    call_id = service.called().request_id
    service.reply(call_id, b"a", partial=True)
    caller.cancel()
    assert caller.next("call_reply").data == b"a"
    assert caller.failure() == ("1", 499)
    assert service.next("cancel").request_id == call_id
    service.reply(call_id, b"b", partial=True)
    service.reply(call_id, b"c")
    assert caller.kinds() == []
    assert bus.stats("dropped", "unknown_call") == 2
    assert empty(bus)


def test_cancel_of_an_unknown_id_is_counted(bus, pair):
    _, caller = pair
    caller.cancel("9")
    assert caller.kinds() == []
    assert bus.stats("refused", "unknown_cancel") == 1


def test_reply_to_no_open_call_is_dropped_and_counted(bus, pair):
    service, caller = pair
    caller.call("greeter")
    call_id = service.called().request_id
    service.reply(call_id)
    service.reply(call_id, b"again")
    service.reply("unknown")
    assert len(caller.replies()) == 1
    assert bus.stats("dropped", "unknown_call") == 2


def test_reply_of_a_connection_that_does_not_serve_the_call_is_dropped(bus, pair):
    service, caller = pair
    caller.call("greeter")
    MemoryPeer(bus).reply(service.called().request_id, b"false")
    assert caller.kinds() == []


def test_service_that_disconnects_ends_its_calls(bus, pair):
    service, caller = pair
    caller.call("greeter", "1")
    caller.call("greeter", "2")
    service.reply(service.called().request_id, b"part", partial=True)
    service.pipe.hang_up()
    assert caller.next("call_reply").data == b"part"
    assert [caller.failure(), caller.failure()] == [("1", 503), ("2", 503)]
    caller.call("greeter", "3")
    assert caller.failure() == ("3", 404)
    assert empty(bus)


def test_caller_that_disconnects_cancels_its_calls(bus, pair):
    service, caller = pair
    caller.call("greeter")
    call_id = service.called().request_id
    caller.pipe.hang_up()
    assert service.next("cancel").request_id == call_id
    service.reply(call_id)
    assert bus.stats("dropped", "unknown_call") == 1
    assert empty(bus)


def test_connection_may_call_its_own_service(bus):
    both = MemoryPeer(bus)
    both.register("me")
    both.call("me", "1", b"x")
    both.reply(both.called().request_id, b"y")
    assert both.replies() == [Reply("1", 0, FULL, b"y")]
    both.call("me", "2")
    both.pipe.hang_up()
    assert empty(bus)


# --- deadlines


def test_call_without_a_reply_ends_at_its_deadline(bus):
    service, caller = MemoryPeer(bus), MemoryPeer(bus, deadline_ms=500)
    service.register("greeter")
    caller.call("greeter")
    call_id = service.called().request_id
    bus.pass_time(0.4)
    assert caller.kinds() == []
    bus.pass_time(0.2)
    assert caller.failure() == ("1", 504)
    assert service.next("cancel").request_id == call_id
    assert empty(bus)


def test_each_reply_starts_the_deadline_again(bus):
    service, caller = MemoryPeer(bus), MemoryPeer(bus, deadline_ms=1000)
    service.register("greeter")
    caller.call("greeter")
    call_id = service.called().request_id
    for _ in range(3):
        bus.pass_time(0.9)
        service.reply(call_id, b"x", partial=True)
    assert len(caller.replies()) == 3
    bus.pass_time(1.1)
    assert caller.failure() == ("1", 504)


def test_deadline_without_a_hello_is_the_default(bus, pair):
    _, caller = pair
    caller.call("greeter")
    bus.pass_time(59)
    assert caller.kinds() == []
    bus.pass_time(1.1)
    assert caller.failure() == ("1", 504)


def test_deadline_zero_in_a_hello_is_the_default(bus):
    service, caller = MemoryPeer(bus), MemoryPeer(bus, credits=True, deadline_ms=0)
    service.register("greeter")
    caller.call("greeter")
    bus.pass_time(59)
    assert caller.kinds() == []
    bus.pass_time(2)
    assert caller.failure() == ("1", 504)


def test_shorter_deadline_of_a_later_call_is_met(bus):
    service = MemoryPeer(bus)
    service.register("greeter")
    slow, quick = MemoryPeer(bus, deadline_ms=10_000), MemoryPeer(bus, deadline_ms=100)
    slow.call("greeter")
    quick.call("greeter")
    bus.pass_time(0.3)
    assert quick.failure() == ("1", 504)
    assert slow.kinds() == []
    bus.pass_time(10)
    assert slow.failure() == ("1", 504)


# --- rules


ALICE, BOB = Identity(1, groups=frozenset()), Identity(2, groups=frozenset())


def ruled(*lines: str) -> MemoryBus:
    bus = MemoryBus(policy=Policy())
    set_rules(bus, *lines)
    return bus


def set_rules(bus: MemoryBus, *lines: str) -> None:
    rules = [Rule.parse(line) for line in lines]
    bus.broker.policy.replace([PlacedRule(rule, "config", rule.who.number) for rule in rules])


def test_rule_denies_a_call(bus):
    bus = ruled("deny user:2 call greeter")
    service = MemoryPeer(bus)
    service.register("greeter")
    alice, bob = MemoryPeer(bus, identity=ALICE), MemoryPeer(bus, identity=BOB)
    alice.call("greeter/x")
    assert service.called().caller == "local:1"
    bob.call("greeter/x")
    assert bob.failure() == ("1", 403)
    assert bus.stats("refused", "call_denied") == 1


def test_rule_denies_one_method(bus):
    bus = ruled("allow user:1 call greeter/secret*")
    service = MemoryPeer(bus)
    service.register("greeter")
    bob = MemoryPeer(bus, identity=BOB)
    bob.call("greeter/open", "1")
    bob.call("greeter/secret", "2")
    assert bob.failure() == ("2", 403)
    assert service.called().address == "greeter/open"


def test_changed_rules_end_open_calls_and_deny_the_next(bus):
    bus = ruled()
    service = MemoryPeer(bus)
    alice, bob = MemoryPeer(bus, identity=ALICE), MemoryPeer(bus, identity=BOB)
    service.register("greeter")
    bob.call("greeter", "1")
    alice.call("greeter", "1")
    set_rules(bus, "deny user:2 call *")
    assert bob.failure() == ("1", 403)
    bob.call("greeter", "2")
    assert bob.failure() == ("2", 403)
    of_bob, of_alice = service.called().request_id, service.called().request_id
    service.reply(of_bob)  # too late
    service.reply(of_alice)
    assert bob.replies() == []
    assert alice.replies() == [Reply("1", 0, FULL, b"")]
    assert bus.stats("refused", "call_revoked") == 1


def test_service_that_may_no_longer_register_its_name_loses_it(bus):
    bus = ruled()
    service, caller = MemoryPeer(bus, identity=ALICE), MemoryPeer(bus, identity=BOB)
    for name in ("lost", "kept"):
        service.register(name)
    caller.call("lost", "1")
    caller.call("kept", "2")
    set_rules(bus, "deny user:1 create lost")
    assert caller.failure() == ("1", 503)
    caller.call("lost", "3")
    assert caller.failure() == ("3", 404)
    lost, kept = service.called().request_id, service.called().request_id
    service.reply(lost)
    service.reply(kept)
    assert caller.replies() == [Reply("2", 0, FULL, b"")]
    assert bus.stats("refused", "service_revoked") == 1


def test_rule_denies_a_registration():
    bus = ruled("allow user:1 create greeter*")
    assert MemoryPeer(bus, identity=BOB).register("greeter") == 403
    assert MemoryPeer(bus, identity=ALICE).register("greeter") == 0
    assert bus.stats("refused", "register_denied") == 1


@pytest.mark.parametrize("code", [1, 404, 2**31 - 1, -1, -(2**31)])
def test_unknown_reply_code_is_forwarded_unchanged(bus, pair, code):
    service, caller = pair
    caller.call("greeter")
    service.reply(service.called().request_id, b"x", code=code)
    assert caller.replies() == [Reply("1", code, FULL, b"x")]
    assert set(bus.stats("gsb", "ended")) <= {"404", "500"}
