"""Clients that take nothing: gRPC waits for them for ever, we do not.

Whoever hands something to gRPC says so before and after. What has not come back
for the slow consumer's time is a client that does not read: it is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Pace:
    def __init__(
        self, timeout_s: float, clock: Callable[[], float], cut: Callable[[str], None]
    ) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._cut = cut
        self._since: dict[object, tuple[float, str]] = {}

    @contextmanager
    def handing_over(self, peer: str) -> Iterator[None]:
        mark = object()
        self._since[mark] = (self._clock(), peer)
        try:
            yield
        finally:
            self._since.pop(mark, None)

    def tick(self) -> None:
        """To be called a few times a second, by one thread."""
        now_s = self._clock()
        for mark, (since_s, peer) in list(self._since.items()):
            if now_s - since_s >= self._timeout_s:
                self._since.pop(mark, None)
                self._cut(peer)
