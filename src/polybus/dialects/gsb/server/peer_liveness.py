"""Peers that have fallen silent, and peers that keep others waiting.

Only those who asked for pings get them: nng's own sockets know nothing of them. Whatever
a peer sends is a sign of life; while the bus does not read from it, its clock stands.

A full peer is no trouble by itself: its streams wait. But if others wait with it, callers
of a service that takes nothing or services without credits, it must take something: one
that takes next to nothing for `stuck_timeout_s` is cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.dialects.gsb.server.back_pressure import BackPressure
    from polybus.dialects.gsb.server.call_peer import CallPeer
    from polybus.model.limits import GsbLimits

MIN_BYTES_PER_S = 1024  # less than that is next to nothing
WARN_AFTER_S = 5.0


class PingMonitor:
    def __init__(self, broker: Broker, limits: GsbLimits) -> None:
        self._broker = broker
        self._limits = limits
        self.peers: dict[CallPeer, None] = {}

    def tick(self, now_s: float) -> None:
        for peer in list(self.peers):
            if peer.halted:
                peer.heard_s = now_s
            silent_s = now_s - peer.heard_s
            if silent_s >= self._limits.ping_timeout_s:
                self._broker.cut(peer.party, "ping_timeout")
            elif silent_s >= self._limits.ping_idle_s and not peer.pinged:
                peer.pinged = True
                peer.send_ping()


class StuckWindow(NamedTuple):
    """Since when a full peer takes next to nothing, and since when others wait because of it."""

    start_s: float
    taken_bytes: int
    held_s: float
    is_logged: bool = False


class StuckPeerMonitor:
    def __init__(self, pressure: BackPressure, broker: Broker, limits: GsbLimits) -> None:
        self._pressure = pressure
        self._broker = broker
        self._timeout_s = limits.stuck_timeout_s
        self._windows: dict[CallPeer, StuckWindow] = {}

    def tick(self, now_s: float) -> None:
        if not self._windows and not self._pressure.full:
            return
        before, self._windows = self._windows, {}
        for peer in list(self._pressure.full):
            self._windows[peer] = self._check_peer(peer, before.get(peer), now_s)

    def _check_peer(self, peer: CallPeer, window: StuckWindow | None, now_s: float) -> StuckWindow:
        taken = peer.party.outbox.taken()
        waited_s = now_s - window.start_s if window is not None else 0.0
        if window is None or taken - window.taken_bytes >= MIN_BYTES_PER_S * max(waited_s, 1.0):
            return StuckWindow(now_s, taken, now_s)
        if not blocks_other_peers(peer):
            window = window._replace(held_s=now_s)
        if now_s - window.held_s >= self._timeout_s:
            self._broker.cut(peer.party, "stuck")
        elif waited_s >= WARN_AFTER_S and not window.is_logged:
            window = window._replace(is_logged=True)
            self._broker.log.warning(
                "peer takes nothing",
                dialect="gsb",
                peer=peer.party.pipe.peer,
                owed_bytes=peer.outbox_bytes,
            )
        return window


def blocks_other_peers(peer: CallPeer) -> bool:
    """Does anybody but its own streams wait because this one takes nothing?"""
    held = {call.end for call in peer.calls.values() if call.end.halted}
    if any(waiter is not peer and waiter not in held for waiter in peer.waiters):
        return True
    return any(call.caller is not peer for end in held for call in end.serving.values())
