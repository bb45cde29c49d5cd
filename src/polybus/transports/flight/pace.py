"""Clients that take nothing: gRPC waits for them for ever, we do not.

Whoever hands something to gRPC says so before and after. What has not come back
for the slow consumer's time is a client that does not read, or a slow link. The
kernel knows which: it counts the bytes that the other side has confirmed. Half the
time over, they are noted; a client that then takes less than the least rate is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Handing:
    """Something that gRPC has, and has not passed on yet."""

    peer: str
    since_s: float
    noted_s: float = 0.0
    taken: int | None = None


class Pace:
    def __init__(
        self,
        timeout_s: float,
        min_bytes_per_s: int,
        clock: Callable[[], float],
        taken: Callable[[str], int | None],
        cut: Callable[[str], None],
    ) -> None:
        """`taken`: how many bytes a peer has confirmed; None if it is not connected."""
        self._timeout_s = timeout_s
        self._min_bytes_per_s = min_bytes_per_s
        self._clock = clock
        self._taken = taken
        self._cut = cut
        self._under_way: dict[int, Handing] = {}

    @contextmanager
    def handing_over(self, peer: str) -> Iterator[None]:
        handing = Handing(peer, self._clock())
        self._under_way[id(handing)] = handing
        try:
            yield
        finally:
            self._under_way.pop(id(handing), None)

    def tick(self) -> None:
        """To be called a few times a second, by one thread."""
        now_s = self._clock()
        for key, handing in list(self._under_way.items()):
            waited_s = now_s - handing.since_s
            if handing.taken is None:
                if waited_s >= self._timeout_s / 2:
                    handing.noted_s, handing.taken = now_s, self._taken(handing.peer) or 0
            elif waited_s >= self._timeout_s:
                if self._is_moving(handing, now_s):
                    handing.since_s, handing.taken = now_s, None
                else:
                    self._under_way.pop(key, None)
                    self._cut(handing.peer)

    def _is_moving(self, handing: Handing, now_s: float) -> bool:
        moved = (self._taken(handing.peer) or 0) - (handing.taken or 0)
        return moved > 0 and moved >= self._min_bytes_per_s * (now_s - handing.noted_s)
