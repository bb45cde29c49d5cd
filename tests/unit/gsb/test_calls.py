"""Calls in memory: how they open, stream and end, each in exactly one FULL."""

from __future__ import annotations

import pytest

from polybus.bus.policy import Policy
from polybus.bus.rule_table import PlacedRule
from polybus.dialects.gsb.limits import GsbLimits
from polybus.model.access_rule import Rule
from polybus.model.identity import Identity
from tests.rig.gsb_memory_peer import Far, Reply
from tests.rig.memory_bus import MemoryBus

NODE = "0x" + "0123456789abcdef" * 2 + "01234567"
FULL, PARTIAL = 0, 1


@pytest.fixture(params=[True, False], ids=["short", "long"])
def bus(request) -> MemoryBus:
    """With the kernel's short path, and without it."""
    bus = MemoryBus(gsb=GsbLimits(max_open_calls=3, max_services=2))
    bus.gsb.calls.table.fast_path_enabled = request.param
    return bus


@pytest.fixture(params=[False, True], ids=["tcp", "ipc"])
def pair(bus, request) -> tuple[Far, Far]:
    """A service `greeter`, and a caller."""
    service, caller = Far(bus, is_unix=request.param), Far(bus, is_unix=not request.param)
    assert service.register("greeter") == 0
    return service, caller


def empty(bus: MemoryBus) -> bool:
    return all(bus.stats("gsb", name) == 0 for name in ("open_calls", "serving", "waiting"))


def test_a_call_reaches_its_service_and_the_answer_its_caller(bus, pair):
    service, caller = pair
    caller.call("greeter", "seven", b"data")
    request = service.called()
    assert (request.data, request.address) == (b"data", "greeter")
    assert request.caller == "local:anonymous"
    assert request.request_id != "seven"
    service.reply(request.request_id, b"hello")
    assert caller.replies() == [Reply("seven", 0, FULL, b"hello")]
    assert empty(bus)


def test_a_stream_comes_in_order_and_ends_with_one_full(bus, pair):
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


def test_a_failure_of_the_service_passes_unchanged(pair):
    service, caller = pair
    caller.call("greeter")
    service.reply(service.called().request_id, b"\x80", code=500)
    assert caller.replies() == [Reply("1", 500, FULL, b"\x80")]


@pytest.mark.parametrize("address", ["greeter/many/more", "/local/greeter/many/more"])
def test_an_address_finds_the_longest_name_at_a_slash(bus, pair, address):
    service, caller = pair
    other = Far(bus)
    assert other.register("greeter/many") == 0
    caller.call(address)
    assert other.called().address == "greeter/many/more"
    caller.call("greeter/manymore", "2")
    assert service.called().address == "greeter/manymore"


def test_a_name_gone_leaves_the_shorter_one(bus, pair):
    service, caller = pair
    other = Far(bus)
    other.register("greeter/many")
    caller.call("greeter/many")
    assert other.called().address == "greeter/many"
    assert other.unregister("greeter/many") == 0
    caller.call("greeter/many", "2")
    assert service.called().address == "greeter/many"


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("nobody", 404),
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
def test_addresses_that_lead_nowhere(pair, address, code):
    _, caller = pair
    caller.call(address, "7")
    assert caller.failure() == ("7", code)


def test_the_longest_name_is_one_of_255_bytes(bus):
    service, caller = Far(bus), Far(bus)
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
def test_names_that_cannot_be_registered(bus, name):
    assert Far(bus).register(name) == 400


def test_a_taken_name_and_one_of_nobody(bus, pair):
    service, caller = pair
    assert caller.register("greeter") == 409
    assert service.register("greeter") == 409
    assert caller.unregister("greeter") == 404
    assert service.unregister("greeter") == 0
    assert caller.register("greeter") == 0


def test_a_connection_registers_only_so_many(bus):
    service = Far(bus)
    assert [service.register(name) for name in ("a", "b", "c")] == [0, 0, 403]
    assert bus.stats("refused", "max_services") == 1


def test_open_calls_outlive_the_name(bus, pair):
    service, caller = pair
    caller.call("greeter")
    call_id = service.called().request_id
    service.unregister("greeter")
    caller.call("greeter", "2")
    assert caller.failure() == ("2", 404)
    service.reply(call_id, b"late")
    assert caller.replies() == [Reply("1", 0, FULL, b"late")]


@pytest.mark.parametrize("request_id", ["", "x" * 256])
def test_a_request_id_that_is_none(pair, request_id):
    _, caller = pair
    caller.call("greeter", request_id)
    assert caller.failure() == (request_id, 400)


def test_a_request_id_in_use_does_not_end_the_open_call(bus, pair):
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


def test_two_callers_may_use_one_id(bus, pair):
    service, caller = pair
    other = Far(bus)
    caller.call("greeter", "1", b"a")
    other.call("greeter", "1", b"b")
    first, second = service.called(), service.called()
    service.reply(second.request_id, b"B")
    service.reply(first.request_id, b"A")
    assert caller.replies() == [Reply("1", 0, FULL, b"A")]
    assert other.replies() == [Reply("1", 0, FULL, b"B")]


def test_a_caller_has_only_so_many_open_calls(bus, pair):
    _, caller = pair
    for n in range(4):
        caller.call("greeter", str(n))
    assert caller.failure() == ("3", 503)
    assert bus.stats("refused", "max_open_calls") == 1


def test_a_cancelled_call_ends_at_once_behind_what_was_streamed(bus, pair):
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


def test_a_cancel_of_what_is_not_open_is_counted(bus, pair):
    _, caller = pair
    caller.cancel("9")
    assert caller.kinds() == []
    assert bus.stats("refused", "unknown_cancel") == 1


def test_replies_to_nobody_are_counted(bus, pair):
    service, caller = pair
    caller.call("greeter")
    call_id = service.called().request_id
    service.reply(call_id)
    service.reply(call_id, b"again")
    service.reply("unknown")
    assert len(caller.replies()) == 1
    assert bus.stats("dropped", "unknown_call") == 2


def test_nobody_answers_the_calls_of_others(bus, pair):
    service, caller = pair
    caller.call("greeter")
    Far(bus).reply(service.called().request_id, b"false")
    assert caller.kinds() == []


def test_a_service_that_goes_away_ends_its_calls(bus, pair):
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


def test_a_caller_that_goes_away_cancels_its_calls(bus, pair):
    service, caller = pair
    caller.call("greeter")
    call_id = service.called().request_id
    caller.pipe.hang_up()
    assert service.next("cancel").request_id == call_id
    service.reply(call_id)
    assert bus.stats("dropped", "unknown_call") == 1
    assert empty(bus)


def test_a_connection_may_call_itself(bus):
    both = Far(bus)
    both.register("me")
    both.call("me", "1", b"x")
    both.reply(both.called().request_id, b"y")
    assert both.replies() == [Reply("1", 0, FULL, b"y")]
    both.call("me", "2")
    both.pipe.hang_up()
    assert empty(bus)


# --- deadlines


def test_a_call_without_an_answer_ends_at_its_deadline(bus):
    service, caller = Far(bus), Far(bus, deadline_ms=500)
    service.register("greeter")
    caller.call("greeter")
    call_id = service.called().request_id
    bus.pass_time(0.4)
    assert caller.kinds() == []
    bus.pass_time(0.2)
    assert caller.failure() == ("1", 504)
    assert service.next("cancel").request_id == call_id
    assert empty(bus)


def test_the_deadline_runs_from_the_last_reply(bus):
    service, caller = Far(bus), Far(bus, deadline_ms=1000)
    service.register("greeter")
    caller.call("greeter")
    call_id = service.called().request_id
    for _ in range(3):
        bus.pass_time(0.9)
        service.reply(call_id, b"x", partial=True)
    assert len(caller.replies()) == 3
    bus.pass_time(1.1)
    assert caller.failure() == ("1", 504)


def test_without_a_hello_the_deadline_is_the_default(bus, pair):
    _, caller = pair
    caller.call("greeter")
    bus.pass_time(59)
    assert caller.kinds() == []
    bus.pass_time(1.1)
    assert caller.failure() == ("1", 504)


def test_zero_is_the_default(bus):
    service, caller = Far(bus), Far(bus, credits=True, deadline_ms=0)
    service.register("greeter")
    caller.call("greeter")
    bus.pass_time(59)
    assert caller.kinds() == []
    bus.pass_time(2)
    assert caller.failure() == ("1", 504)


def test_a_shorter_deadline_is_kept_behind_a_longer_one(bus):
    service = Far(bus)
    service.register("greeter")
    slow, quick = Far(bus, deadline_ms=10_000), Far(bus, deadline_ms=100)
    slow.call("greeter")
    quick.call("greeter")
    bus.pass_time(0.3)
    assert quick.failure() == ("1", 504)
    assert slow.kinds() == []
    bus.pass_time(10)
    assert slow.failure() == ("1", 504)


# --- who may


ALICE, BOB = Identity(1, groups=frozenset()), Identity(2, groups=frozenset())


def ruled(*lines: str) -> MemoryBus:
    bus = MemoryBus(policy=Policy())
    set_rules(bus, *lines)
    return bus


def set_rules(bus: MemoryBus, *lines: str) -> None:
    rules = [Rule.parse(line) for line in lines]
    bus.broker.policy.replace([PlacedRule(rule, "config", rule.who.number) for rule in rules])


def test_a_rule_refuses_a_call(bus):
    bus = ruled("deny user:2 call greeter")
    service = Far(bus)
    service.register("greeter")
    alice, bob = Far(bus, identity=ALICE), Far(bus, identity=BOB)
    alice.call("greeter/x")
    assert service.called().caller == "local:1"
    bob.call("greeter/x")
    assert bob.failure() == ("1", 403)
    assert bus.stats("refused", "call_denied") == 1


def test_a_rule_may_speak_of_one_method(bus):
    bus = ruled("allow user:1 call greeter/secret*")
    service = Far(bus)
    service.register("greeter")
    bob = Far(bus, identity=BOB)
    bob.call("greeter/open", "1")
    bob.call("greeter/secret", "2")
    assert bob.failure() == ("2", 403)
    assert service.called().address == "greeter/open"


def test_new_rules_hold_for_the_next_call(bus):
    bus = ruled()
    service, bob = Far(bus), Far(bus, identity=BOB)
    service.register("greeter")
    bob.call("greeter", "1")
    set_rules(bus, "deny user:2 call *")
    bob.call("greeter", "2")
    assert bob.failure() == ("2", 403)
    service.reply(service.called().request_id)
    assert bob.replies() == [Reply("1", 0, FULL, b"")]


def test_a_rule_refuses_a_name():
    bus = ruled("allow user:1 create greeter*")
    assert Far(bus, identity=BOB).register("greeter") == 403
    assert Far(bus, identity=ALICE).register("greeter") == 0
    assert bus.stats("refused", "register_denied") == 1


@pytest.mark.parametrize("code", [1, 404, 2**31 - 1, -1, -(2**31)])
def test_a_code_that_nobody_knows_passes_unchanged(bus, pair, code):
    service, caller = pair
    caller.call("greeter")
    service.reply(service.called().request_id, b"x", code=code)
    assert caller.replies() == [Reply("1", code, FULL, b"x")]
    assert set(bus.stats("gsb", "ended")) <= {"404", "500"}
