"""Back-pressure of a bus in memory: which peers are halted, for how long, and which continue."""

from __future__ import annotations

import pytest

from polybus.dialects.gsb.limits import GsbLimits
from polybus.model.limits import KIB, Limits
from tests.rig.gsb_memory_peer import MemoryPeer, Reply
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


@pytest.fixture
def bus(padding) -> MemoryBus:
    limits = Limits(outbox_max_bytes=16 * MARK)
    return MemoryBus(limits, gsb=LIMITS, gsb_padding=padding)


def service_of(bus: MemoryBus, *, with_credits: bool = False) -> MemoryPeer:
    service = MemoryPeer(bus, credits=True) if with_credits else MemoryPeer(bus)
    assert service.register("greeter") == 0
    return service


def opened(service: MemoryPeer, caller: MemoryPeer, request_id: str = "1") -> str:
    caller.call("greeter", request_id)
    return str(service.called().request_id)


def fill(service: MemoryPeer, caller: MemoryPeer, call_id: str) -> int:
    """Stream to a caller that does not read until it is full. Returns the number of items."""
    caller.pipe.appetite = 0
    sent = 0
    while not caller.session.full:
        service.reply(call_id, ITEM, partial=True)
        sent += 1
        assert sent < 100
    return sent


# --- services without credits


def test_service_without_credits_is_not_read_while_a_caller_is_full(bus):
    service, slow, quick = service_of(bus), MemoryPeer(bus), MemoryPeer(bus)
    first, second = opened(service, slow), opened(service, quick)
    sent = fill(service, slow, first)
    assert not service.is_read
    service.reply(first, b"more", partial=True)
    service.reply(second, b"answer")
    assert quick.kinds() == []  # all callers of the service wait
    slow.pipe.eat()
    bus.turn()
    assert service.is_read
    assert [reply.data for reply in slow.replies()] == [ITEM] * sent + [b"more"]
    assert quick.replies() == [Reply("1", 0, FULL, b"answer")]


def test_service_is_read_again_at_the_low_water_mark(bus):
    service, slow = service_of(bus), MemoryPeer(bus)
    call_id = opened(service, slow)
    sent = fill(service, slow, call_id)
    slow.pipe.eat(sent * len(ITEM) - MARK // 2)
    bus.turn()
    assert not service.is_read
    slow.pipe.eat()
    bus.turn()
    assert service.is_read


def test_other_services_continue(bus):
    service, slow, quick = service_of(bus), MemoryPeer(bus), MemoryPeer(bus)
    other = MemoryPeer(bus)
    other.register("other")
    fill(service, slow, opened(service, slow))
    quick.call("other")
    other.reply(other.called().request_id, b"answer")
    assert quick.replies() == [Reply("1", 0, FULL, b"answer")]


def test_call_of_a_full_caller_halts_its_service(bus):
    service, slow = service_of(bus), MemoryPeer(bus)
    other = MemoryPeer(bus)
    other.register("other")
    fill(service, slow, opened(service, slow))
    slow.call("other", "2")
    assert not other.is_read
    slow.cancel("2")
    bus.turn()
    assert other.is_read


@pytest.mark.parametrize("with_credits", [False, True])
def test_cancel_of_a_full_caller_is_answered_after_its_items(bus, with_credits):
    service, slow = service_of(bus, with_credits=with_credits), MemoryPeer(bus)
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


def test_service_is_not_read_while_any_caller_is_full(bus):
    service, slow, other = service_of(bus), MemoryPeer(bus), MemoryPeer(bus)
    first, second = opened(service, slow), opened(service, other)
    slow.pipe.appetite = other.pipe.appetite = 0
    fill(service, slow, first)
    assert not service.is_read
    other.session.on_filled(None)
    slow.cancel()
    bus.turn()
    assert not service.is_read
    other.session.on_room(None)
    bus.turn()
    assert service.is_read
    service.reply(second)


def test_full_caller_that_disconnects_resumes_the_service(bus):
    service, slow, quick = service_of(bus), MemoryPeer(bus), MemoryPeer(bus)
    first, second = opened(service, slow), opened(service, quick)
    fill(service, slow, first)
    service.reply(first, b"more", partial=True)
    service.reply(second, b"answer")
    slow.pipe.hang_up()
    bus.turn()
    assert service.is_read
    assert quick.replies() == [Reply("1", 0, FULL, b"answer")]
    assert bus.stats("dropped", "unknown_call") == 1


def test_deadline_is_stopped_while_the_service_is_not_read(bus):
    service, slow, quick = service_of(bus), MemoryPeer(bus), MemoryPeer(bus, deadline_ms=5000)
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


def test_unread_time_extends_the_deadline_at_every_check(bus):
    service, slow, quick = service_of(bus), MemoryPeer(bus), MemoryPeer(bus, deadline_ms=5000)
    first = opened(service, slow)
    opened(service, quick)
    fill(service, slow, first)
    bus.pass_time(10)
    slow.pipe.eat()
    bus.turn()
    other = MemoryPeer(bus, deadline_ms=500)
    other.call("greeter")  # its deadline makes the bus check all calls
    bus.pass_time(1)
    assert other.failure() == ("1", 504)
    assert quick.kinds() == []


def test_unread_time_before_a_call_does_not_extend_its_deadline(bus):
    service, slow, quick = service_of(bus), MemoryPeer(bus), MemoryPeer(bus, deadline_ms=1000)
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


def test_hangup_of_a_halted_service_is_noticed(bus):
    service, slow, quick = service_of(bus), MemoryPeer(bus), MemoryPeer(bus)
    first, second = opened(service, slow), opened(service, quick)
    sent = fill(service, slow, first)
    service.reply(first, b"more", partial=True)
    service.reply(second, b"answer")
    service.pipe.hung_up()
    other = MemoryPeer(bus)
    assert other.register("greeter") == 0  # released at the hang-up
    assert quick.replies() == [Reply("1", 0, FULL, b"answer")]  # received before the hang-up
    service.pipe.hang_up()
    slow.pipe.eat()
    assert [slow.next("call_reply").data for _ in range(sent + 1)] == [ITEM] * sent + [b"more"]
    assert slow.failure() == ("1", 503)


def test_items_sent_before_a_lost_connection_are_forwarded(bus):
    service, slow = service_of(bus), MemoryPeer(bus)
    call_id = opened(service, slow)
    sent = fill(service, slow, call_id)
    service.reply(call_id, b"more", partial=True)
    service.pipe.hang_up()
    slow.pipe.eat()
    assert [slow.next("call_reply").data for _ in range(sent + 1)] == [ITEM] * sent + [b"more"]
    assert slow.failure() == ("1", 503)


# --- services with credits


def credit(service: MemoryPeer) -> int:
    """Return the credit granted since the last call."""
    return sum(packet.credit.replies for packet in service.packets())


def test_first_partials_need_no_credit(bus):
    service, caller = service_of(bus, with_credits=True), MemoryPeer(bus)
    call_id = opened(service, caller)
    for _ in range(LIMITS.free_partials):
        service.reply(call_id, b"x", partial=True)
    assert len(caller.replies()) == LIMITS.free_partials
    assert credit(service) > 0


def test_credit_is_granted_while_the_caller_reads(bus):
    service, caller = service_of(bus, with_credits=True), MemoryPeer(bus)
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


def test_credit_for_small_items_is_granted_in_large_windows(bus):
    service, caller = service_of(bus, with_credits=True), MemoryPeer(bus)
    call_id = opened(service, caller)
    for _ in range(1000):
        service.reply(call_id, b"x", partial=True)
    assert len(service.packets()) <= 12


def test_slow_caller_delays_only_its_own_stream(bus):
    service, slow, quick = service_of(bus, with_credits=True), MemoryPeer(bus), MemoryPeer(bus)
    first, second = opened(service, slow), opened(service, quick)
    fill(service, slow, first)
    assert service.is_read
    service.reply(second, b"answer")
    assert quick.next("call_reply").data == b"answer"


def test_service_that_exceeds_its_credit_is_not_read_until_credit_is_granted(bus):
    service, slow = service_of(bus, with_credits=True), MemoryPeer(bus)
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


def test_end_of_a_call_resumes_the_service_that_exceeded_its_credit(bus):
    service, slow = service_of(bus, with_credits=True), MemoryPeer(bus)
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


def test_full_reply_needs_no_credit(bus):
    service, slow = service_of(bus, with_credits=True), MemoryPeer(bus)
    first = opened(service, slow)
    fill(service, slow, first)
    service.reply(first, b"end")
    assert bus.stats("gsb", "open_calls") == 0


def test_no_credit_is_granted_for_an_ended_call(bus):
    service, slow = service_of(bus, with_credits=True), MemoryPeer(bus)
    first = opened(service, slow)
    fill(service, slow, first)
    service.packets()
    service.reply(first)
    slow.pipe.eat()
    assert service.kinds() == []


@pytest.mark.parametrize("is_overrun", [False, True])
def test_deadline_is_stopped_while_the_service_is_out_of_credit(bus, is_overrun):
    service, slow = service_of(bus, with_credits=True), MemoryPeer(bus, deadline_ms=1000)
    call_id = opened(service, slow)
    sent = fill(service, slow, call_id)
    while not slow.session.calls[b"1"].is_out_of_credit:  # within its credit
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


def test_item_after_a_stopped_clock_starts_the_deadline_again(bus):
    service, slow = service_of(bus, with_credits=True), MemoryPeer(bus, deadline_ms=1000)
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


def test_free_partials_wait_at_the_hard_limit(bus):
    """The free PARTIALs of many streams together must not overflow the outbox."""
    service, slow = service_of(bus, with_credits=True), MemoryPeer(bus)
    calls = [opened(service, slow, str(n)) for n in range(40)]
    slow.pipe.appetite = 0
    for call_id in calls:
        for _ in range(LIMITS.free_partials):
            service.reply(call_id, ITEM, partial=True)
    assert not service.is_read
    assert not slow.session.connection.is_closed
    slow.pipe.eat()
    bus.turn()
    assert len(slow.replies()) == 40 * LIMITS.free_partials


# --- callers of a full service


def test_caller_is_not_read_while_its_service_is_full(bus):
    service, caller, other = service_of(bus), MemoryPeer(bus), MemoryPeer(bus)
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


def test_calls_to_a_full_service_that_disconnects_fail(bus):
    service, caller = service_of(bus), MemoryPeer(bus)
    service.pipe.appetite = 0
    sent = 0
    while caller.is_read:
        caller.call("greeter", str(sent), ITEM)
        sent += 1
    service.pipe.hang_up()
    bus.turn()
    assert [caller.failure()[1] for _ in range(sent)] == [503] * (sent - 1) + [404]
    assert caller.is_read


def test_waiting_caller_that_disconnects_leaves_no_state(bus):
    service, caller = service_of(bus), MemoryPeer(bus)
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


# --- peers that block others


def test_stuck_caller_that_blocks_others_is_closed(bus):
    service, stuck, quick = service_of(bus), MemoryPeer(bus), MemoryPeer(bus)
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


def test_slow_caller_that_blocks_no_other_peer_is_not_closed(bus):
    service, slow = service_of(bus), MemoryPeer(bus)
    fill(service, slow, opened(service, slow))
    bus.pass_time(300)
    assert not slow.pipe.aborted
    quick = MemoryPeer(bus)
    quick.call("greeter")  # this caller waits for the same service
    bus.pass_time(29)
    assert not slow.pipe.aborted
    bus.pass_time(2)
    assert slow.pipe.aborted


def test_full_caller_that_still_reads_is_not_closed(bus):
    service, slow, quick = service_of(bus), MemoryPeer(bus), MemoryPeer(bus)
    first = opened(service, slow)
    opened(service, quick)
    fill(service, slow, first)
    for _ in range(20):
        bus.pass_time(2)
        slow.pipe.eat(2500)
    assert not slow.pipe.aborted


def test_stuck_service_is_closed(bus):
    service, caller = service_of(bus), MemoryPeer(bus)
    service.pipe.appetite = 0
    sent = 0
    while caller.is_read:
        caller.call("greeter", str(sent), ITEM)
        sent += 1
    bus.pass_time(35)
    assert service.pipe.aborted
