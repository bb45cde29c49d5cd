"""Back-pressure between callers and services.

A connection that is owed more than a mark is *full*, until it has taken most of it.
What is then not read, so that it cannot send what nobody takes:

    a caller, while the service it calls is full
    a service without credits, while any caller of it is full
    a service with credits that has used them up (nothing is granted while its caller is full)

Every other stream goes on. With credits a service knows by itself when to stop, so that
a slow caller slows down its own stream alone.

A call's first PARTIALs are free. Later ones take one credit each. The bus grants a window
of them, about as many as fit into the mark, and fills it up when half is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from polybus.dialects.gsb.server.call_table import Desk

if TYPE_CHECKING:
    from polybus.dialects.gsb.server.call_peer import CallPeer
    from polybus.dialects.gsb.server.call_table import Call
    from polybus.model.limits import GsbLimits

MIN_WINDOW = 2  # one is on its way while the next is made
MAX_WINDOW = 256


class BackPressure:
    def __init__(self, limits: GsbLimits, max_owed: int, clock: Callable[[], float]) -> None:
        self.desk = Desk(
            clock,
            self.grant,
            max_packet_bytes=limits.max_packet_bytes,
            max_open_calls=limits.max_open_calls,
            free_partials=limits.free_partials,
            free_bytes=limits.free_bytes,
            window_bytes=limits.outbox_full_bytes,
            min_window=MIN_WINDOW,
            max_window=MAX_WINDOW,
        )
        self._clock = clock
        self._hard_limit_bytes = max_owed // 2  # beyond it even what needs no credit waits
        self.full: dict[CallPeer, None] = {}

    # --- what outboxes report

    def on_full(self, peer: CallPeer) -> None:
        peer.full = True
        self.full[peer] = None
        for call in peer.calls.values():
            self._halt_service(call)

    def on_room(self, peer: CallPeer) -> None:
        peer.full = False
        self.full.pop(peer, None)
        for call in peer.calls.values():
            self._resume_service(call)
        wanting = list(peer.wanting)
        peer.wanting.clear()
        for call in wanting:
            self.grant(call)
        self.resume_waiters(peer)

    def resume_waiters(self, peer: CallPeer) -> None:
        """Those who waited for it try again."""
        waiters = list(peer.waiters)
        peer.waiters.clear()
        for waiter in waiters:
            cast("CallPeer", waiter).waiting_for = None
            cast("CallPeer", waiter).schedule_retry()

    def remove(self, peer: CallPeer) -> None:
        """It is gone: it waits for nobody, and nobody for it."""
        peer.full = False
        self.full.pop(peer, None)
        if peer.waiting_for is not None:
            peer.waiting_for.waiters.pop(peer, None)
            peer.waiting_for = None
        self.resume_waiters(peer)

    # --- what happens to calls

    def on_call_open(self, call: Call) -> None:
        if call.caller.full:
            self._halt_service(call)

    def on_call_end(self, call: Call) -> None:
        call.caller.wanting.pop(call, None)
        if call.caller.full:
            self._resume_service(call)
        if call.end.halted:
            cast("CallPeer", call.end).schedule_retry()

    def wait(self, waiter: CallPeer, peer: CallPeer) -> None:
        """`waiter` is not read until the other has room, or is gone."""
        peer.waiters[waiter] = None
        waiter.waiting_for = peer
        waiter.halt()

    # --- replies

    def can_forward(self, call: Call, *, partial: bool) -> bool:
        """May this reply go to the caller now? What a service sent before it hung up, always."""
        caller = cast("CallPeer", call.caller)
        if call.end.lifted or not caller.full:
            return True
        if partial and not (call.end.credits and (call.free_left(self.desk) or call.credit > 0)):
            return False
        return caller.outbox_bytes <= self._hard_limit_bytes

    def on_partial(self, call: Call, size: int) -> None:
        """One PARTIAL has passed."""
        if not call.free_left(self.desk):
            call.credit = max(0, call.credit - 1)
        call.partials += 1
        call.reply_bytes += size
        if call.end.credits:
            self.grant(call)

    def grant(self, call: Call) -> None:
        window = call.window(self.desk)
        left = call.free_left(self.desk) + call.credit
        if left > window // 2:
            return
        now_s = self._clock()
        if call.caller.full:
            call.caller.wanting[call] = None
            if not left:
                call.stop_clock(now_s)
            return
        call.go_on_clock(now_s)
        call.credit += window - left
        cast("CallPeer", call.end).send_credit(call.id, window - left)

    def _halt_service(self, call: Call) -> None:
        if not call.end.credits:
            call.end.full_calls += 1
            cast("CallPeer", call.end).halt()

    def _resume_service(self, call: Call) -> None:
        if not call.end.credits:
            call.end.full_calls -= 1
            if not call.end.full_calls and call.end.halted:
                cast("CallPeer", call.end).schedule_retry()
