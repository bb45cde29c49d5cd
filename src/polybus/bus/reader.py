"""One subscription to an ephemeral topic: what it has not read, and who waits for more.

Messages are taken in two steps. `take` hands out a range; `confirm` says that it
is in the reader's socket, and only then it is consumed. A connection that ends
in between gives its range back, to its old place: whoever asks next gets it.

What is not consumed is charged to the reader's uid (`held_bytes`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from polybus.bus.chunks import Range

if TYPE_CHECKING:
    from polybus.bus.incarnation import Incarnation
    from polybus.model.identity import Identity


class Reader:
    """`id` is the subscriber id; it works only for the uid that got it."""

    def __init__(self, reader_id: bytes, identity: Identity, incarnation: Incarnation) -> None:
        self.id = reader_id
        self.identity = identity
        self.incarnation = incarnation
        self.held_bytes = 0
        self.held_messages = 0
        self.is_owned = True  # the connection that subscribed is open
        self.used_s = 0.0  # when it was last used; of interest once it is not owned
        self.gone = False
        self._ranges: deque[Range] = deque()
        self._waiters: dict[Callable[[], None], None] = {}

    @property
    def has_waiters(self) -> bool:
        return bool(self._waiters)

    def put(self, found: Range) -> None:
        self._book(found, 1)
        if not self._ranges or not self._ranges[-1].extend(found):
            self._ranges.append(Range(found.chunk, found.start, found.end))

    def take(self, count: int, max_bytes: int) -> Range | None:
        """At most `count` messages of one chunk, at least one if there is any."""
        if not self._ranges:
            return None
        first = self._ranges[0]
        end = min(first.end, first.start + count)
        while end > first.start + 1 and first.chunk.body_bytes(first.start, end) > max_bytes:
            end = first.start + max(1, (end - first.start) // 2)
        taken = Range(first.chunk, first.start, end)
        first.start = end
        if first:
            first.shrink()
        else:
            self._ranges.popleft()
        return taken

    def give_back(self, taken: Range) -> None:
        """What was taken did not reach the reader: it is unread again, in its old place.

        That is the front, unless another connection has given back what came before it.
        """
        place = 0
        while place < len(self._ranges) and self._ranges[place].first_id < taken.first_id:
            place += 1
        self._ranges.insert(place, taken)

    def confirm(self, taken: Range) -> None:
        self._book(taken, -1)

    def wait(self, wake: Callable[[], None]) -> None:
        """`wake` is called, once, when there is something to take or the reader is gone."""
        self._waiters[wake] = None

    def stop_waiting(self, wake: Callable[[], None]) -> None:
        self._waiters.pop(wake, None)

    def wake(self) -> None:
        """Lets those who wait try, first come first served, while there is something to take."""
        while self._waiters and (self._ranges or self.gone):
            first = next(iter(self._waiters))
            del self._waiters[first]
            first()

    def end(self) -> int:
        """Forgets what is unread; how many messages that were, notices not counted."""
        unread = sum(len(one) for one in self._ranges if not one.chunk.notice)
        self._ranges.clear()
        self.gone = True
        return unread

    def _book(self, found: Range, sign: int) -> None:
        if not found.chunk.notice:
            self.held_messages += sign * len(found)
            self.held_bytes += sign * found.size
