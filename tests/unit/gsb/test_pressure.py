"""Back-pressure in memory: who is not read, for how long, and what goes on all the same."""

from __future__ import annotations

import pytest

from polybus.dialects.gsb.limits import GsbLimits
from polybus.model.limits import KIB, Limits
from tests.rig.gsb_memory_peer import Far, Reply
from tests.rig.memory_bus import MemoryBus

FULL, PARTIAL = 0, 1
MARK = 64 * KIB
ITEM = b"x" * (8 * KIB)
LIMITS = GsbLimits(
    max_packet_bytes=MARK,
    outbox_full_bytes=MARK,
    outbox_free_bytes=MARK // 4,
    free_partials=4,
    free_bytes=MARK,
    stuck_timeout_s=30,
)


@pytest.fixture(params=[True, False], ids=["short", "long"])
def bus(request) -> MemoryBus:
    """With the kernel's short path, and without it."""
    bus = MemoryBus(Limits(outbox_max_bytes=16 * MARK), gsb=LIMITS)
    bus.gsb.calls.table.fast_path_enabled = request.param
    return bus


def service_of(bus: MemoryBus, *, with_credits: bool = False) -> Far:
    service = Far(bus, credits=True) if with_credits else Far(bus)
    assert service.register("greeter") == 0
    return service


def opened(service: Far, caller: Far, request_id: str = "1") -> str:
    caller.call("greeter", request_id)
    return str(service.called().request_id)


def fill(service: Far, caller: Far, call_id: str) -> int:
    """Streams to a caller that does not read until it is full; how many items that took."""
    caller.pipe.appetite = 0
    sent = 0
    while not caller.session.full:
        service.reply(call_id, ITEM, partial=True)
        sent += 1
        assert sent < 100
    return sent


# --- services without credits


def test_a_service_without_credits_is_not_read_while_a_caller_is_full(bus):
    service, slow, quick = service_of(bus), Far(bus), Far(bus)
    first, second = opened(service, slow), opened(service, quick)
    sent = fill(service, slow, first)
    assert not service.is_read
    service.reply(first, b"more", partial=True)
    service.reply(second, b"answer")
    assert quick.kinds() == []  # all callers of that connection wait
    slow.pipe.eat()
    bus.turn()
    assert service.is_read
    assert [reply.data for reply in slow.replies()] == [ITEM] * sent + [b"more"]
    assert quick.replies() == [Reply("1", 0, FULL, b"answer")]


def test_it_is_read_again_only_when_most_was_taken(bus):
    service, slow = service_of(bus), Far(bus)
    call_id = opened(service, slow)
    sent = fill(service, slow, call_id)
    slow.pipe.eat(sent * len(ITEM) - MARK // 2)
    bus.turn()
    assert not service.is_read
    slow.pipe.eat()
    bus.turn()
    assert service.is_read


def test_other_services_go_on(bus):
    service, slow, quick = service_of(bus), Far(bus), Far(bus)
    other = Far(bus)
    other.register("other")
    fill(service, slow, opened(service, slow))
    quick.call("other")
    other.reply(other.called().request_id, b"answer")
    assert quick.replies() == [Reply("1", 0, FULL, b"answer")]


def test_a_full_caller_that_calls_holds_up_whom_it_calls(bus):
    service, slow = service_of(bus), Far(bus)
    other = Far(bus)
    other.register("other")
    fill(service, slow, opened(service, slow))
    slow.call("other", "2")
    assert not other.is_read
    slow.cancel("2")
    bus.turn()
    assert other.is_read


@pytest.mark.parametrize("with_credits", [False, True])
def test_a_full_callers_cancel_arrives_and_is_answered_behind_its_items(bus, with_credits):
    service, slow = service_of(bus, with_credits=with_credits), Far(bus)
    call_id = opened(service, slow)
    sent = fill(service, slow, call_id)
    slow.cancel()
    assert "cancel" in service.kinds()
    assert service.is_read
    slow.pipe.eat()
    for _ in range(sent):
        assert slow.next("call_reply").type == PARTIAL
    assert slow.failure() == ("1", 499)
    assert bus.stats("gsb", "waiting") == 0


def test_one_full_caller_is_enough(bus):
    service, one, other = service_of(bus), Far(bus), Far(bus)
    first, second = opened(service, one), opened(service, other)
    one.pipe.appetite = other.pipe.appetite = 0
    fill(service, one, first)
    assert not service.is_read
    other.session.on_filled(None)
    one.cancel()
    bus.turn()
    assert not service.is_read
    other.session.on_room(None)
    bus.turn()
    assert service.is_read
    service.reply(second)


def test_a_full_caller_that_goes_away_frees_the_service(bus):
    service, slow, quick = service_of(bus), Far(bus), Far(bus)
    first, second = opened(service, slow), opened(service, quick)
    fill(service, slow, first)
    service.reply(first, b"more", partial=True)
    service.reply(second, b"answer")
    slow.pipe.hang_up()
    bus.turn()
    assert service.is_read
    assert quick.replies() == [Reply("1", 0, FULL, b"answer")]
    assert bus.stats("dropped", "unknown_call") == 1


def test_the_deadline_stands_while_the_service_is_not_read(bus):
    service, slow, quick = service_of(bus), Far(bus), Far(bus, deadline_ms=5000)
    first, second = opened(service, slow), opened(service, quick)
    bus.pass_time(2.5)
    fill(service, slow, first)
    bus.pass_time(10)
    assert quick.kinds() == []
    slow.pipe.eat()
    bus.turn()
    bus.pass_time(2.45)
    assert quick.kinds() == []
    bus.pass_time(0.1)
    assert quick.failure() == ("1", 504)
    service.reply(second)
    assert bus.stats("dropped", "unknown_call") == 1


def test_time_before_a_call_is_not_its_own(bus):
    service, slow, quick = service_of(bus), Far(bus), Far(bus, deadline_ms=1000)
    fill(service, slow, opened(service, slow))
    bus.pass_time(10)
    quick.call("greeter")  # while its service is not read
    bus.pass_time(10)
    slow.pipe.eat()
    bus.turn()
    bus.pass_time(0.95)
    assert quick.kinds() == []
    bus.pass_time(0.1)
    assert quick.failure() == ("1", 504)


def test_a_hang_up_of_a_service_that_is_not_read_is_noticed(bus):
    service, slow, quick = service_of(bus), Far(bus), Far(bus)
    first, second = opened(service, slow), opened(service, quick)
    sent = fill(service, slow, first)
    service.reply(first, b"more", partial=True)
    service.reply(second, b"answer")
    service.pipe.hung_up()
    other = Far(bus)
    assert other.register("greeter") == 0  # free at once
    assert quick.replies() == [Reply("1", 0, FULL, b"answer")]  # what it sent is taken
    service.pipe.hang_up()
    slow.pipe.eat()
    assert [slow.next("call_reply").data for _ in range(sent + 1)] == [ITEM] * sent + [b"more"]
    assert slow.failure() == ("1", 503)  # and 503 follows it


def test_what_a_service_sent_before_its_connection_broke_is_passed_on(bus):
    service, slow = service_of(bus), Far(bus)
    call_id = opened(service, slow)
    sent = fill(service, slow, call_id)
    service.reply(call_id, b"more", partial=True)
    service.pipe.hang_up()
    slow.pipe.eat()
    assert [slow.next("call_reply").data for _ in range(sent + 1)] == [ITEM] * sent + [b"more"]
    assert slow.failure() == ("1", 503)


# --- services with credits


def credit(service: Far) -> int:
    """How much has been granted since last time."""
    return sum(packet.credit.replies for packet in service.packets())


def test_the_first_partials_need_no_credit(bus):
    service, caller = service_of(bus, with_credits=True), Far(bus)
    call_id = opened(service, caller)
    for _ in range(LIMITS.free_partials):
        service.reply(call_id, b"x", partial=True)
    assert len(caller.replies()) == LIMITS.free_partials
    assert credit(service) > 0


def test_credit_is_granted_as_long_as_the_caller_reads(bus):
    service, caller = service_of(bus, with_credits=True), Far(bus)
    call_id = opened(service, caller)
    allowance, sent = LIMITS.free_partials, 0
    while sent < 5000:
        assert allowance > 0
        for _ in range(allowance):
            service.reply(call_id, b"x", partial=True)
        sent += allowance
        allowance = credit(service)
    assert len(caller.replies()) == sent
    assert bus.stats("gsb", "waiting") == 0


def test_credit_for_small_items_comes_in_large_portions(bus):
    service, caller = service_of(bus, with_credits=True), Far(bus)
    call_id = opened(service, caller)
    for _ in range(1000):
        service.reply(call_id, b"x", partial=True)
    assert len(service.packets()) <= 12


def test_a_slow_caller_slows_its_own_stream_alone(bus):
    service, slow, quick = service_of(bus, with_credits=True), Far(bus), Far(bus)
    first, second = opened(service, slow), opened(service, quick)
    fill(service, slow, first)
    assert service.is_read
    service.reply(second, b"answer")
    assert quick.next("call_reply").data == b"answer"


def test_a_service_that_overruns_is_not_read_until_there_is_credit(bus):
    service, slow = service_of(bus, with_credits=True), Far(bus)
    call_id = opened(service, slow)
    sent = fill(service, slow, call_id)
    while service.is_read:
        service.reply(call_id, ITEM, partial=True)
        sent += 1
        assert sent < 100
    assert slow.session.outbox_bytes <= 4 * MARK
    slow.pipe.eat()
    bus.turn()
    assert service.is_read
    assert len(slow.replies()) == sent
    assert credit(service) > 0


def test_a_call_that_ends_frees_the_service_that_overran_it(bus):
    service, slow = service_of(bus, with_credits=True), Far(bus)
    call_id = opened(service, slow)
    fill(service, slow, call_id)
    sent = 0
    while service.is_read:
        service.reply(call_id, ITEM, partial=True)
        sent += 1
        assert sent < 100
    slow.cancel()
    assert service.is_read
    assert bus.stats("dropped", "unknown_call") == 1


def test_a_full_needs_no_credit(bus):
    service, slow = service_of(bus, with_credits=True), Far(bus)
    first = opened(service, slow)
    fill(service, slow, first)
    service.reply(first, b"end")
    assert bus.stats("gsb", "open_calls") == 0


def test_credit_dies_with_its_call(bus):
    service, slow = service_of(bus, with_credits=True), Far(bus)
    first = opened(service, slow)
    fill(service, slow, first)
    service.packets()
    service.reply(first)
    slow.pipe.eat()
    assert service.kinds() == []


@pytest.mark.parametrize("is_overrun", [False, True])
def test_the_deadline_stands_while_the_service_is_out_of_credit(bus, is_overrun):
    service, slow = service_of(bus, with_credits=True), Far(bus, deadline_ms=1000)
    call_id = opened(service, slow)
    sent = fill(service, slow, call_id)
    while not slow.session.calls[b"1"].is_out_of_credit:  # it keeps to its credit
        service.reply(call_id, ITEM, partial=True)
        sent += 1
        assert sent < 100
    if is_overrun:
        service.reply(call_id, ITEM, partial=True)
        sent += 1
    assert service.is_read is not is_overrun
    bus.pass_time(10)
    slow.pipe.eat()
    assert len(slow.replies()) == sent
    bus.pass_time(0.95)
    assert slow.kinds() == []
    bus.pass_time(0.1)
    assert slow.failure() == ("1", 504)


def test_an_item_that_came_late_starts_the_clock_again(bus):
    service, slow = service_of(bus, with_credits=True), Far(bus, deadline_ms=1000)
    call_id = opened(service, slow)
    sent = fill(service, slow, call_id)
    while not slow.session.calls[b"1"].is_out_of_credit:
        bus.pass_time(0.5)
        service.reply(call_id, ITEM, partial=True)
        sent += 1
    bus.pass_time(10)
    slow.pipe.eat()
    bus.turn()
    bus.pass_time(0.5)
    service.reply(call_id, ITEM, partial=True)
    bus.pass_time(0.95)
    assert len(slow.replies()) == sent + 1
    bus.pass_time(0.1)
    assert slow.failure() == ("1", 504)


def test_nothing_goes_far_beyond_the_mark_whatever_is_free(bus):
    """Many streams at once: their free PARTIALs wait, too, before the caller would be cut."""
    service, slow = service_of(bus, with_credits=True), Far(bus)
    calls = [opened(service, slow, str(n)) for n in range(40)]
    slow.pipe.appetite = 0
    for call_id in calls:
        for _ in range(LIMITS.free_partials):
            service.reply(call_id, ITEM, partial=True)
    assert not service.is_read
    assert not slow.session.party.is_closed
    slow.pipe.eat()
    bus.turn()
    assert len(slow.replies()) == 40 * LIMITS.free_partials


# --- callers of a full service


def test_a_caller_is_not_read_while_its_service_is_full(bus):
    service, caller, other = service_of(bus), Far(bus), Far(bus)
    service.pipe.appetite = 0
    sent = 0
    while caller.is_read:
        caller.call("greeter", str(sent), ITEM)
        sent += 1
        assert sent < 100
    other.call("sys/ping", "1", b"x")
    assert other.next("call_reply").data == b"x"
    service.pipe.eat()
    bus.turn()
    assert caller.is_read
    assert len(service.packets()) == sent


def test_callers_of_a_full_service_that_goes_away_are_told(bus):
    service, caller = service_of(bus), Far(bus)
    service.pipe.appetite = 0
    sent = 0
    while caller.is_read:
        caller.call("greeter", str(sent), ITEM)
        sent += 1
    service.pipe.hang_up()
    bus.turn()
    assert [caller.failure()[1] for _ in range(sent)] == [503] * (sent - 1) + [404]
    assert caller.is_read


def test_a_caller_that_vanishes_while_it_waits_is_forgotten(bus):
    service, caller = service_of(bus), Far(bus)
    service.pipe.appetite = 0
    sent = 0
    while caller.is_read:
        caller.call("greeter", str(sent), ITEM)
        sent += 1
    caller.pipe.hang_up()
    service.pipe.eat()
    bus.turn()
    kinds = service.kinds()
    assert kinds.count("call_request") == sent - 1
    assert kinds.count("cancel") == sent - 1
    assert bus.stats("gsb", "serving") == 0
    assert not service.session.waiters


# --- those who keep others waiting


def test_a_caller_that_keeps_others_waiting_for_long_is_cut(bus):
    service, stuck, quick = service_of(bus), Far(bus), Far(bus)
    first, second = opened(service, stuck), opened(service, quick)
    fill(service, stuck, first)
    service.reply(second, b"answer")
    bus.pass_time(10)
    assert any(event == "peer takes nothing" for event, _ in bus.log.warnings())
    assert quick.kinds() == []
    bus.pass_time(25)
    assert stuck.pipe.aborted
    stuck.pipe.hang_up()
    assert quick.replies() == [Reply("1", 0, FULL, b"answer")]
    assert bus.stats("connections", "closed", "stuck") == 1


def test_a_caller_that_harms_nobody_may_be_slow(bus):
    service, slow = service_of(bus), Far(bus)
    fill(service, slow, opened(service, slow))
    bus.pass_time(300)
    assert not slow.pipe.aborted
    quick = Far(bus)
    quick.call("greeter")  # now somebody waits with it
    bus.pass_time(29)
    assert not slow.pipe.aborted
    bus.pass_time(2)
    assert slow.pipe.aborted


def test_one_that_still_takes_something_is_not_cut(bus):
    service, slow, quick = service_of(bus), Far(bus), Far(bus)
    first = opened(service, slow)
    opened(service, quick)
    fill(service, slow, first)
    for _ in range(20):
        bus.pass_time(2)
        slow.pipe.eat(2500)
    assert not slow.pipe.aborted


def test_a_service_that_takes_no_calls_is_cut(bus):
    service, caller = service_of(bus), Far(bus)
    service.pipe.appetite = 0
    sent = 0
    while caller.is_read:
        caller.call("greeter", str(sent), ITEM)
        sent += 1
    bus.pass_time(35)
    assert service.pipe.aborted
