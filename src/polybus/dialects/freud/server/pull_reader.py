"""One subscription to an ephemeral topic: what it has not read, and who waits for more.

What is unread, and how it is taken in two steps, is in dialects/freud/server/unread_queue.pyx.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from polybus.dialects.freud.server.unread_queue import Unread

if TYPE_CHECKING:
    from polybus.dialects.freud.server.incarnation import Incarnation
    from polybus.model.identity import Identity


class PullReader(Unread):
    """`id` is the subscriber id; it works only for the uid that got it."""

    def __init__(
        self, reader_id: bytes, identity: Identity, incarnation: Incarnation | None
    ) -> None:
        self.id = reader_id
        self.identity = identity
        self.incarnation = incarnation
        self.used_s = 0.0  # when it was last used; of interest once it is not owned
        self._waking = False

    @property
    def is_behind(self) -> bool:
        """Is there more for it than it was given? Only for those that read a log (pulling.py)."""
        return False

    @property
    def topic_name(self) -> bytes:
        assert self.incarnation is not None
        return self.incarnation.name

    @property
    def has_waiters(self) -> bool:
        return bool(self.waiters)

    def wait(self, wake: Callable[[], None], *, polls: bool = False) -> None:
        """`wake` is called, once, when there is something to take or the reader is gone.

        One that only polls is called also when it has turned out that there is nothing.
        """
        self.waiters[wake] = polls

    def stop_waiting(self, wake: Callable[[], None]) -> None:
        self.waiters.pop(wake, None)

    def wake(self) -> None:
        """Lets those who wait try, first come first served, while there is something to take."""
        if self._waking:
            return  # one of them could not take it, or ended this: the rest have their turn below
        self._waking = True
        try:
            while self.waiters and (self.ranges or self.gone):
                first = next(iter(self.waiters))
                del self.waiters[first]
                first()
        finally:
            self._waking = False

    def wake_polls(self) -> None:
        """There is nothing to take for those who only asked."""
        for one in [one for one, polls in self.waiters.items() if polls]:
            if self.waiters.pop(one, False):
                one()
