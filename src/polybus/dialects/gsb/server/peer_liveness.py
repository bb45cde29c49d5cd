"""Detects silent peers by pings, and full peers that block others.

The bus pings only peers that asked for it in their hello: nng's own sockets do not know pings.
Any packet of a peer is a sign of life. While the bus does not read from a peer, its clock is
stopped.

A full peer that blocks only its own streams is left alone. If it blocks others (callers of a
service that takes nothing, or services without credits), it is closed after it has taken less
than MIN_BYTES_PER_S for `stuck_timeout_s`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.dialects.gsb.limits import GsbLimits
    from polybus.dialects.gsb.server.back_pressure import BackPressure
    from polybus.dialects.gsb.server.session import GsbSession

MIN_BYTES_PER_S = 1024  # a peer that takes less is stuck
WARN_AFTER_S = 5.0


class PingMonitor:
    """Pings idle peers and closes those that do not answer."""

    def __init__(self, broker: Broker, limits: GsbLimits) -> None:
        self._broker = broker
        self._limits = limits
        self.peers: dict[GsbSession, None] = {}

    def tick(self, now_s: float) -> None:
        for peer in list(self.peers):
            if peer.halted:  # its packets are unread, so its silence proves nothing
                peer.heard_s = now_s
            silent_s = now_s - peer.heard_s
            if silent_s >= self._limits.ping_timeout_s:
                self._broker.cut(peer.connection, "ping_timeout")
            elif silent_s >= self._limits.ping_idle_s and not peer.pinged:
                peer.pinged = True
                peer.send_ping()


class StuckWindow(NamedTuple):
    """Since when a full peer is stuck, and since when it blocks others (`held_s`)."""

    start_s: float
    taken_bytes: int
    held_s: float
    is_logged: bool = False


class StuckPeerMonitor:
    """Closes full peers that block others for too long."""

    def __init__(self, pressure: BackPressure, broker: Broker, limits: GsbLimits) -> None:
        self._pressure = pressure
        self._broker = broker
        self._timeout_s = limits.stuck_timeout_s
        self._windows: dict[GsbSession, StuckWindow] = {}

    def tick(self, now_s: float) -> None:
        before, self._windows = self._windows, {}
        for peer in list(self._pressure.full):
            window = before.get(peer)
            taken = peer.connection.outbox.taken()
            waited_s = now_s - window.start_s if window is not None else 0.0
            # Progress starts a new window. The first second counts as a whole one.
            if window is None or taken - window.taken_bytes >= MIN_BYTES_PER_S * max(waited_s, 1.0):
                self._windows[peer] = StuckWindow(now_s, taken, now_s)
                continue
            if not blocks_other_peers(peer):
                window = window._replace(held_s=now_s)
            if now_s - window.held_s >= self._timeout_s:
                self._broker.cut(peer.connection, "stuck")
            elif waited_s >= WARN_AFTER_S and not window.is_logged:
                window = window._replace(is_logged=True)
                self._broker.log.warning(
                    "peer takes nothing",
                    dialect="gsb",
                    peer=peer.connection.pipe.peer,
                    owed_bytes=peer.outbox_bytes,
                )
            self._windows[peer] = window


def blocks_other_peers(peer: GsbSession) -> bool:
    """Return True if a connection other than the peer's own services waits for it."""
    held = {call.endpoint for call in peer.calls.values() if call.endpoint.halted}
    if any(waiter is not peer and waiter not in held for waiter in peer.waiters):
        return True
    return any(call.caller is not peer for end in held for call in end.serving.values())
