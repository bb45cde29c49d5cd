"""Where received bytes land, without a buffer per connection.

A loop reads one connection at a time and hands the bytes on before it reads the
next, so all connections share one buffer, which stays warm in the cache. What a
session leaves over (half a frame, or everything behind a full reader) is kept
per connection and put in front of what comes next. Ten thousand idle
connections cost nothing.

A frame larger than the shared buffer gets a buffer of its own, which doubles as
its bytes really arrive: a header that merely promises a large frame costs
nothing either. The session refuses frames over its cap, which bounds this.
"""

from __future__ import annotations

from collections.abc import Callable

SHARED_BYTES = (
    256 * 1024
)  # measured: below 128 KiB throughput falls, above 256 KiB it does not rise

Receive = Callable[[bytearray | bytes, int, int], int]


class SharedBuffer:
    def __init__(self, size: int = SHARED_BYTES) -> None:
        self.data = bytearray(size)
        self.view = memoryview(self.data)
        self.size = size


class Inbox:
    __slots__ = ("_held", "_own", "_own_filled", "_shared")

    def __init__(self, shared: SharedBuffer) -> None:
        self._shared = shared
        self._held = b""
        self._own: bytearray | None = None
        self._own_filled = 0

    @property
    def held(self) -> int:
        """Bytes that were received and not consumed."""
        return len(self._held) if self._own is None else self._own_filled

    def space(self, sizehint: int = -1) -> memoryview:
        """Where the next bytes are to be written: as much as there is, whatever the hint."""
        if self._own is not None:
            return memoryview(self._own)[self._own_filled :]
        if not self._held:
            return self._shared.view
        self._shared.data[: len(self._held)] = self._held
        return self._shared.view[len(self._held) :]

    def filled(self, count: int, receive: Receive) -> None:
        """`count` bytes were written there: offer them with what was held."""
        if self._own is not None:
            self._own_filled += count
            self._offer_own(receive)
            return
        end = len(self._held) + count
        consumed = receive(self._shared.data, 0, end)
        if consumed == end:
            self._held = b""
        else:
            self._hold(self._shared.view[consumed:end])

    def offer_again(self, receive: Receive) -> None:
        """Offers what is held once more; nothing new has come."""
        if self._own is not None:
            self._offer_own(receive)
        elif self._held:
            consumed = receive(self._held, 0, len(self._held))
            self._held = self._held[consumed:]

    def _offer_own(self, receive: Receive) -> None:
        assert self._own is not None
        consumed = receive(self._own, 0, self._own_filled)
        if consumed or self._own_filled == len(self._own):
            own, self._own = self._own, None
            self._hold(memoryview(own)[consumed : self._own_filled])

    def _hold(self, rest: memoryview) -> None:
        if len(rest) <= self._shared.size // 2:
            self._held = bytes(rest)
            return
        self._held = b""
        self._own = bytearray(2 * len(rest))
        self._own[: len(rest)] = rest
        self._own_filled = len(rest)
