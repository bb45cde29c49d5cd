"""What stands between the fan-out and a GSB connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polybus.bus.counters import Counters
    from polybus.dialects.gsb.server.call_peer import CallPeer


class BroadcastOutbox:
    """Takes broadcasts for one connection. It never makes anybody wait: a full one loses them."""

    def __init__(self, peer: CallPeer, counters: Counters, max_bytes: int) -> None:
        self._peer = peer
        self._counters = counters
        self._max_bytes = max_bytes

    def push(self, data: bytes) -> None:
        party = self._peer.party
        if self._peer.full or self._peer.outbox_bytes + len(data) > self._max_bytes:
            lost = party.encoding.count(data, 0)
            self._counters.count("dropped", "subscriber_full", lost)
        else:
            party.outbox.push(data)
