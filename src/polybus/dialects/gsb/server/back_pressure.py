"""Back-pressure between callers and services.

A connection whose outbox is over its high-water mark is *full*, until its peer has taken most
of it. While a connection is full the bus does not read from

    a caller, if the service that it calls is full
    a service without credits, if any of its callers is full
    a service with credits that has used them up (a full caller grants none)

All other streams continue. A service with credits stops by itself, so a slow caller slows down
only its own stream.

The first PARTIALs of a call are free. Each later one takes one credit. The bus grants a window
of credits, about as many as fill an outbox, and refills it when half is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.server.call_table import CallTable

if TYPE_CHECKING:
    from polybus.dialects.gsb.limits import GsbLimits
    from polybus.dialects.gsb.server.call_table import OpenCall
    from polybus.dialects.gsb.server.session import GsbSession

MIN_WINDOW = 2  # one PARTIAL is in flight while the service makes the next
MAX_WINDOW = 256
MAX_CREDIT = 1 << 16  # of a relayed call


class BackPressure:
    """Tracks full connections, halts and resumes their peers, and grants credit."""

    def __init__(
        self, limits: GsbLimits, max_outbox_bytes: int, clock: Callable[[], float]
    ) -> None:
        self.table = CallTable(
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
        # Over it, replies wait even if they are free or have credit: the outbox must not overflow.
        self._hard_limit_bytes = max_outbox_bytes // 2
        self.full: dict[GsbSession, None] = {}

    # --- called by outboxes

    def on_full(self, peer: GsbSession) -> None:
        peer.full = True
        self.full[peer] = None
        for call in peer.calls.values():
            self._halt_service(call)

    def on_room(self, peer: GsbSession) -> None:
        peer.full = False
        self.full.pop(peer, None)
        for call in peer.calls.values():
            self._resume_service(call)
        # Copied, because `grant` puts a call back if its caller is full again.
        waiting_calls = list(peer.awaiting_credit)
        peer.awaiting_credit.clear()
        for call in waiting_calls:
            self.grant(call)
        self.resume_waiters(peer)

    def resume_waiters(self, peer: GsbSession) -> None:
        """Let the connections that wait for this one try again."""
        waiters = list(peer.waiters)
        peer.waiters.clear()
        for waiter in waiters:
            waiter.waiting_for = None
            waiter.schedule_retry()

    def remove(self, peer: GsbSession) -> None:
        """Forget a closed connection and resume the connections that wait for it."""
        peer.full = False
        self.full.pop(peer, None)
        if peer.waiting_for is not None:
            peer.waiting_for.waiters.pop(peer, None)
            peer.waiting_for = None
        self.resume_waiters(peer)

    # --- called by the call router

    def on_call_open(self, call: OpenCall) -> None:
        if call.caller.full:
            self._halt_service(call)

    def on_call_end(self, call: OpenCall) -> None:
        call.caller.awaiting_credit.pop(call, None)
        if call.caller.full:
            self._resume_service(call)
        # It may be halted at a reply of this call, which is now dropped.
        if call.endpoint.halted:
            call.endpoint.schedule_retry()

    def wait(self, waiter: GsbSession, peer: GsbSession) -> None:
        """Halt `waiter` until `peer` has room or is closed."""
        peer.waiters[waiter] = None
        waiter.waiting_for = peer
        waiter.halt()

    # --- replies

    def has_room(self, peer: GsbSession) -> bool:
        """Return whether a connection takes packets that cannot wait."""
        return peer.outbox_bytes <= self._hard_limit_bytes

    def can_forward(self, call: OpenCall, *, partial: bool) -> bool:
        """Return True if a reply may go to its caller now.

        Replies of a draining service always may, since it cannot wait.
        """
        has_credit = call.free_left() > 0 or call.credit > 0
        if call.endpoint.draining:
            return True
        if partial and call.caller.is_link and not has_credit:
            return False
        if not call.caller.full:
            return True
        if partial and not (call.endpoint.credits and has_credit):
            return False
        return self.has_room(call.caller)

    def on_partial(self, call: OpenCall, size: int) -> None:
        """Count a forwarded PARTIAL and use a credit for it."""
        if not call.free_left():
            call.credit = max(0, call.credit - 1)
        call.partials += 1
        call.reply_bytes += size
        if call.caller.is_link:
            if not call.free_left() and not call.credit:
                call.stop_clock(self._clock())
        elif call.endpoint.credits:
            self.grant(call)

    def on_credit(self, call: OpenCall, replies: int) -> None:
        """Take the credit that the caller of a relayed call grants, and pass it on."""
        call.credit = min(call.credit + replies, MAX_CREDIT)
        call.resume_clock(self._clock())
        if call.endpoint.credits:
            _send_credit(call, replies)
        if call.endpoint.halted:
            call.endpoint.schedule_retry()

    def grant(self, call: OpenCall) -> None:
        """Refill a call's window of credits if at least half is used."""
        window = call.window(self.table)
        left = call.free_left() + call.credit
        if left > window // 2:
            return
        now_s = self._clock()
        if call.caller.full:
            call.caller.awaiting_credit[call] = None
            if not left:  # the service waits for its caller, so its deadline must not pass
                call.stop_clock(now_s)
            return
        call.resume_clock(now_s)
        call.credit += window - left
        _send_credit(call, window - left)

    def _halt_service(self, call: OpenCall) -> None:
        """Stop reading from a service without credits. One with credits stops by itself."""
        if not call.endpoint.credits:
            call.endpoint.full_calls += 1
            call.endpoint.halt()

    def _resume_service(self, call: OpenCall) -> None:
        if not call.endpoint.credits:
            call.endpoint.full_calls -= 1
            if not call.endpoint.full_calls and call.endpoint.halted:
                call.endpoint.schedule_retry()


def _send_credit(call: OpenCall, replies: int) -> None:
    credit = pb.Credit(request_id=call.id.decode(), replies=replies)
    call.endpoint.send_packet(pb.Packet(credit=credit))
