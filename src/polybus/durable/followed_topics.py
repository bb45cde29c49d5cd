"""The topics whose commits the event loop follows.

The store's thread asks after each commit whether a reader on the loop needs it, because waking
the loop costs a quarter of a lone commit. A reader that begins to follow a topic learns whether
a commit was left out before, since its start may lie before that commit: the registry's next id
is updated after the commit is visible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from threading import Lock


class FollowedTopics:
    def __init__(self, exists: Callable[[int], bool]) -> None:
        """`exists` returns whether a topic number is registered. Any thread calls it."""
        self._exists = exists
        self._followers: Counter[int] = Counter()
        self._left_out: set[int] = set()  # topics with commits that no follower was notified of
        self._lock = Lock()

    def follow(self, number: int) -> bool:
        """Add a follower. Returns True if it must read once, because a commit was left out."""
        with self._lock:
            self._followers[number] += 1
            if number not in self._left_out:
                return False
            self._left_out.discard(number)
            return True

    def unfollow(self, number: int) -> None:
        with self._lock:
            self._followers[number] -= 1
            if not self._followers[number]:
                del self._followers[number]

    def forget(self, number: int) -> None:
        """Handle the removal of a topic, which is not registered any longer."""
        with self._lock:
            self._left_out.discard(number)

    def select(self, numbers: Iterable[int]) -> set[int]:
        """Return the topics of a commit that have followers. Runs on the store's thread."""
        with self._lock:
            followed = set()
            for number in numbers:
                if number in self._followers:
                    followed.add(number)
                elif self._exists(number):
                    self._left_out.add(number)
            return followed
