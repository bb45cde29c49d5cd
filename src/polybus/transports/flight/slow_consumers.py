"""Disconnection of clients that do not read, for which gRPC would wait forever.

The compiled port lists sends that gRPC has accepted and not completed. A send that is pending
for the slow-consumer timeout belongs to a client that does not read or to a slow link. The
kernel can tell: it counts the bytes that the peer has acknowledged. The count is noted after
half of the timeout; a client below the minimum rate since then is disconnected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class PendingSend:
    """A send in progress, and the acknowledged bytes of its peer when noted."""

    peer: str
    since_s: float
    noted_s: float = 0.0
    taken: int | None = None
    is_cut: bool = False


class SlowConsumerMonitor:
    def __init__(
        self,
        timeout_s: float,
        min_bytes_per_s: int,
        clock: Callable[[], float],
        under_way: Callable[[], Sequence[tuple[int, str, float]]],
        taken: Callable[[str], int | None],
        cut: Callable[[str], None],
    ) -> None:
        """`under_way` lists sends as (number, peer, start time).

        `taken` returns the acknowledged bytes of a peer, None if it is not connected.
        """
        self._timeout_s = timeout_s
        self._min_bytes_per_s = min_bytes_per_s
        self._clock = clock
        self._list_pending_sends = under_way
        self._taken = taken
        self._cut = cut
        self._known: dict[tuple[int, float], PendingSend] = {}

    def tick(self) -> None:
        """Check all pending sends. One thread must call this a few times per second."""
        now_s = self._clock()
        before, self._known = self._known, {}
        for number, peer, since_s in self._list_pending_sends():
            key = number, since_s
            send = self._known[key] = before.get(key) or PendingSend(peer, since_s)
            waited_s = now_s - send.since_s
            if send.is_cut or waited_s < self._timeout_s / 2:
                continue
            if send.taken is None:
                send.noted_s, send.taken = now_s, self._taken(send.peer) or 0
            elif waited_s >= self._timeout_s:
                moved = (self._taken(send.peer) or 0) - send.taken
                if moved > 0 and moved >= self._min_bytes_per_s * (now_s - send.noted_s):
                    send.since_s, send.taken = now_s, None  # a slow link; judge it again
                else:
                    send.is_cut = True
                    self._cut(send.peer)
