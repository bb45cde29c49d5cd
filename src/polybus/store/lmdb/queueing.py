"""The queue in front of the writer: what waits is taken in groups worth a transaction.

Producers that wait for their answer come in step with the writer: those who were
answered just now hand over their next while those who came too late for the last
transaction are already here. Taken at once, the late ones would go alone, and so
for ever: two half groups in turn, each with a sync of its own. So after an answer
to many the writer waits for as many to come again, as long as they keep coming; a
lone producer is never waited for.

Whoever hands over wakes the writer only when it has what it waits for: a wake for
each would have the two threads take turns at every step.
"""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import Final, Generic, TypeVar

T = TypeVar("T")

# While more come within a look, the writer goes on waiting, but for so many looks at most.
LOOK_S: Final = 0.0002
LOOKS: Final = 10


class Queue(Generic[T]):
    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._enough = 1
        self._expected = 1
        self._lock = Lock()
        self._bell = Lock()  # held while nobody has rung
        self._bell.acquire()

    def put(self, item: T, *, urgent: bool = False) -> None:
        with self._lock:
            self._items.append(item)
            if (urgent or len(self._items) >= self._enough) and self._bell.locked():
                self._bell.release()

    def answered(self, count: int) -> None:
        """So many were answered, and may come again; those who wait already are not among them."""
        with self._lock:
            self._expected = count + len(self._items)

    def wait(self, timeout_s: float | None) -> None:
        """Until there is something, and then until most of those expected are here."""
        if not self._hear(1, timeout_s) or self._expected <= 1:
            return
        seen = 0
        for _ in range(LOOKS):
            if len(self._items) <= seen:
                return
            seen = len(self._items)
            if self._hear(self._expected, LOOK_S):
                return

    def pop(self) -> T | None:
        try:
            return self._items.popleft()
        except IndexError:
            return None

    def _hear(self, enough: int, timeout_s: float | None) -> bool:
        """Waits until so many are here; whether they are."""
        with self._lock:
            if len(self._items) >= enough:
                return True
            self._enough = enough
            self._bell.acquire(blocking=False)  # an old ring says nothing
        heard = self._bell.acquire(timeout=-1 if timeout_s is None else timeout_s)
        return heard or len(self._items) >= enough
