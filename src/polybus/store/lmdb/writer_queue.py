"""The queue of the writer: takes tasks one by one, returns them in groups.

Producers that wait for each result run in step with the writer: those whose futures just
resolved submit again, while those that missed the last transaction are already queued. If
the writer took the late ones at once, they would have a transaction of their own, and so on
forever: two half groups in turn, each with its own sync. So after it resolved many futures
the writer waits for as many new tasks, while they keep arriving. It does not wait for a
single producer, nor if a megabyte is queued: then bytes and not syncs take the disk's time,
and the producers can submit one half while the other is written.

A submitting thread wakes the writer only when the expected number is reached. A wake-up per
task would make the two threads alternate at every step.

The queue is bounded in number and bytes, so that a disk that hangs does not exhaust memory.
Beyond the limits, `put` raises `LimitReached`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import Lock
from typing import Final, Generic, TypeVar

from polybus.errors import LimitReached, StoreClosed

T = TypeVar("T")

# Dialects and the native port have their own, far lower limits. Small commits reach the first
# of these at some hundred megabytes, large batches reach the second.
MAX_WAITING: Final = 1 << 18
MAX_WAITING_BYTES: Final = 1 << 30

# The writer waits while tasks arrive within POLL_S, at most MAX_POLLS times.
POLL_S: Final = 0.0002
MAX_POLLS: Final = 10
ENOUGH_BYTES: Final = 1 << 20


class WriterQueue(Generic[T]):
    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._bytes = 0
        self._closed = False
        # Items at which a producer wakes the writer.
        self._enough = 1
        # Items that the writer waits for after the first one.
        self._expected = 1
        self._lock = Lock()
        self._wakeup = Lock()  # held until a producer releases it
        self._wakeup.acquire()

    def put(self, item: T, size: int = 0, *, urgent: bool = False) -> None:
        """Add an item. Raises `StoreClosed` after `put_last`, `LimitReached` if the queue is full.

        An `urgent` item wakes the writer and is exempt from the limits.
        """
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
        """Add all items or none, as `put` does."""
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
        """Add the last item and close the queue. Returns False if it was closed already."""
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
        """Note that `count` futures resolved, whose producers may submit again."""
        with self._lock:
            # Items that are queued already belong to other producers, so they come on top.
            self._expected = count + len(self._items)

    def wait(self, timeout_s: float | None) -> None:
        """Wait for an item, and then for most of the expected ones."""
        # A single producer is never waited for: it would add its own wait to each commit.
        if not self._wait_for(1, timeout_s) or self._expected <= 1:
            return
        seen = 0
        for _ in range(MAX_POLLS):
            # No item arrived within one poll: the rest may not come at all.
            if len(self._items) <= seen:
                return
            seen = len(self._items)
            if self._wait_for(self._expected, POLL_S):
                return

    def pop(self) -> T | None:
        """Return the first item or None. Its bytes count until `release_bytes`."""
        try:
            # Popping from a deque is atomic, so the writer needs no lock here.
            return self._items.popleft()
        except IndexError:
            return None

    def release_bytes(self, size: int) -> None:
        with self._lock:
            self._bytes -= size

    def _wait_for(self, enough: int, timeout_s: float | None) -> bool:
        """Wait until the queue has `enough` items or bytes. Returns whether it has."""
        with self._lock:
            if len(self._items) >= enough or self._bytes >= ENOUGH_BYTES:
                return True
            self._enough = enough
            self._wakeup.acquire(blocking=False)  # an earlier wake-up must not count
        was_woken = self._wakeup.acquire(timeout=-1 if timeout_s is None else timeout_s)
        return was_woken or len(self._items) >= enough or self._bytes >= ENOUGH_BYTES


def check_limits(waiting: int, size: int) -> None:
    """Raise `LimitReached` if the queue cannot take this many items or bytes."""
    if waiting > MAX_WAITING:
        raise LimitReached("MAX_WAITING", f"{MAX_WAITING} commits wait for the disk; retry later")
    if size > MAX_WAITING_BYTES:
        text = f"bytes that wait for the disk must be at most {MAX_WAITING_BYTES}, got {size}"
        raise LimitReached("MAX_WAITING_BYTES", text)
