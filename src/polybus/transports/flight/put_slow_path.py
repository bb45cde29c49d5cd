"""Batches whose way must be found first, taken by a thread of their own.

Whether a caller may write to a topic is known once its stream is open, and the topic is
there. Only after rules have changed, or a topic was dropped, that has to be asked again,
or the topic made again, and others wait for the answer: the loop, a commit. The one thread
that takes the batches of all streams must not.

Batches of a stream keep their order: while one of them is here, the next ones come here.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class PutSlowPath(Generic[T]):
    def __init__(self, take: Callable[[T], None]) -> None:
        """`take` is called on the thread, with one after the other."""
        self._take = take
        self._queue: SimpleQueue[tuple[int, T] | None] = SimpleQueue()
        self._held: dict[int, int] = {}  # how many of each stream are here
        self._lock = Lock()
        self._thread: Thread | None = None  # most ports never need it

    def has_batches(self, stream: int) -> bool:
        """Whether batches of a stream are here, or on their way from here."""
        return bool(self._held) and stream in self._held

    def add(self, stream: int, one: T) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._run, name="polybus-aside", daemon=True)
            self._thread.start()
        with self._lock:
            self._held[stream] = self._held.get(stream, 0) + 1
        self._queue.put((stream, one))

    def close(self, timeout_s: float) -> None:
        """Takes what is here, if that does not take too long."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (found := self._queue.get()) is not None:
            stream, one = found
            try:
                self._take(one)
            finally:
                self._finish(stream)

    def _finish(self, stream: int) -> None:
        with self._lock:
            left = self._held[stream] - 1
            if left:
                self._held[stream] = left
            else:
                del self._held[stream]
