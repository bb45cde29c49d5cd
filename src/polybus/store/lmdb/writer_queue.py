"""The queue in front of the writer: what waits is taken in groups worth a transaction.

Producers that wait for their answer come in step with the writer: those who were
answered just now hand over their next while those who came too late for the last
transaction are already here. Taken at once, the late ones would go alone, and so
for ever: two half groups in turn, each with a sync of its own. So after an answer
to many the writer waits for as many to come again, as long as they keep coming; a
lone producer is never waited for. Nor is anybody once a megabyte is here: what takes
the disk's time then is bytes, not syncs, and while one half is written the other can
be brought.

Whoever hands over wakes the writer only when it has what it waits for: a wake for
each would have the two threads take turns at every step.

What waits is bounded, in number and in bytes: a disk that stands still must not have
the process run out of memory. Who comes then is told so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import Lock
from typing import Final, Generic, TypeVar

from polybus.errors import LimitReached, StoreClosed

T = TypeVar("T")

# So much may wait for the disk. Dialects and the native port have limits of their own, far
# below; some hundred megabytes of small commits come to the one, large batches to the other.
MAX_WAITING: Final = 1 << 18
MAX_WAITING_BYTES: Final = 1 << 30

# While more come within a look, the writer goes on waiting, but for so many looks at most.
POLL_S: Final = 0.0002
MAX_POLLS: Final = 10
ENOUGH_BYTES: Final = 1 << 20


class WriterQueue(Generic[T]):
    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._bytes = 0
        self._closed = False
        self._enough = 1
        self._expected = 1
        self._lock = Lock()
        self._wakeup = Lock()  # held while nobody has rung
        self._wakeup.acquire()

    def put(self, item: T, size: int = 0, *, urgent: bool = False) -> None:
        """`StoreClosed` behind the last one, `LimitReached` while too much waits."""
        with self._lock:
            if self._closed:
                raise StoreClosed("the store was closed")
            waiting = len(self._items) + 1
            size += self._bytes
            if (waiting > MAX_WAITING or size > MAX_WAITING_BYTES) and not urgent:
                check_limits(waiting, size)
            self._items.append(item)
            self._bytes = size
            is_enough = urgent or waiting >= self._enough or size >= ENOUGH_BYTES
            if is_enough and self._wakeup.locked():
                self._wakeup.release()

    def put_all(self, items: Sequence[T], size: int) -> None:
        """Many at once, or none: as `put`."""
        with self._lock:
            if self._closed:
                raise StoreClosed("the store was closed")
            waiting = len(self._items) + len(items)
            size += self._bytes
            if waiting > MAX_WAITING or size > MAX_WAITING_BYTES:
                check_limits(waiting, size)
            self._items.extend(items)
            self._bytes = size
            is_enough = waiting >= self._enough or size >= ENOUGH_BYTES
            if is_enough and self._wakeup.locked():
                self._wakeup.release()

    def put_last(self, item: T) -> bool:
        """Nothing can be handed over behind it. False if there was a last one already."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            self._items.append(item)
            if self._wakeup.locked():
                self._wakeup.release()
            return True

    @property
    def closed(self) -> bool:
        return self._closed

    def expect(self, count: int) -> None:
        """So many were answered, and may come again; those who wait already are not among them."""
        with self._lock:
            self._expected = count + len(self._items)

    def wait(self, timeout_s: float | None) -> None:
        """Until there is something, and then until most of those expected are here."""
        if not self._wait_for(1, timeout_s) or self._expected <= 1:
            return
        seen = 0
        for _ in range(MAX_POLLS):
            if len(self._items) <= seen:
                return
            seen = len(self._items)
            if self._wait_for(self._expected, POLL_S):
                return

    def pop(self) -> T | None:
        """The first that waits, if any does. Its bytes count until they are `taken`."""
        try:
            return self._items.popleft()
        except IndexError:
            return None

    def release_bytes(self, size: int) -> None:
        with self._lock:
            self._bytes -= size

    def _wait_for(self, enough: int, timeout_s: float | None) -> bool:
        """Waits until so many are here; whether they are."""
        with self._lock:
            if self._has(enough):
                return True
            self._enough = enough
            self._wakeup.acquire(blocking=False)  # an old ring says nothing
        heard = self._wakeup.acquire(timeout=-1 if timeout_s is None else timeout_s)
        return heard or self._has(enough)

    def _has(self, enough: int) -> bool:
        return len(self._items) >= enough or self._bytes >= ENOUGH_BYTES


def check_limits(waiting: int, size: int) -> None:
    """`LimitReached` if so many, with so many bytes in all, are too many."""
    if waiting > MAX_WAITING:
        raise LimitReached("MAX_WAITING", f"{MAX_WAITING} commits wait for the disk already")
    if size > MAX_WAITING_BYTES:
        text = f"{size} bytes would wait for the disk: at most {MAX_WAITING_BYTES} may"
        raise LimitReached("MAX_WAITING_BYTES", text)
