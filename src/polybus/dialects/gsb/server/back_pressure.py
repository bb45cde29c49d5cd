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

if TYPE_CHECKING:
    from polybus.dialects.gsb.server.call_table import OpenCall
    from polybus.dialects.gsb.server.session import GsbSession

MIN_WINDOW = 2  # one PARTIAL is in flight while the service makes the next
MAX_WINDOW = 256
MAX_CREDIT = 1 << 16  # of a relayed call


class BackPressure:
    """Tracks full connections, halts and resumes their peers, and grants credit."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.full: dict[GsbSession, None] = {}

    # --- called by outboxes

    def on_full(self, peer: GsbSession) -> None:
        peer.full = True
        self.full[peer] = None
        for call in peer.calls.values():
            self.halt_service(call)

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

    # --- called by the call table

    def halt_service(self, call: OpenCall) -> None:
        """Stop reading from a service without credits. One with credits stops by itself."""
        if not call.endpoint.credits:
            call.endpoint.full_calls += 1
            call.endpoint.halt()

    def on_call_end(self, call: OpenCall) -> None:
        """Resume the service of an ended call whose caller is full, or at which it is halted."""
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
        missing = call.missing_credit()
        if not missing:
            return
        now_s = self._clock()
        if call.caller.full:
            call.caller.awaiting_credit[call] = None
            # The service waits for its caller, so its deadline must not pass.
            if not call.free_left() and not call.credit:
                call.stop_clock(now_s)
            return
        call.resume_clock(now_s)
        call.credit += missing
        _send_credit(call, missing)

    def _resume_service(self, call: OpenCall) -> None:
        if not call.endpoint.credits:
            call.endpoint.full_calls -= 1
            if not call.endpoint.full_calls and call.endpoint.halted:
                call.endpoint.schedule_retry()


def _send_credit(call: OpenCall, replies: int) -> None:
    credit = pb.Credit(request_id=call.id.decode(), replies=replies)
    call.endpoint.send_packet(pb.Packet(credit=credit))
