"""The ends of the shards of topics with groups, kept current by store notifications.

Every fetch that wakes and every ack needs them, and asking the store would cost more than the
rest of the call. They are never ahead of the store. They are behind it only until the
notification of a commit arrives; waiting fetches are woken after that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polybus.store.contract import ShardEnd, Store


class ShardEnds:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._ends: dict[int, list[int]] = {}
        # Held while ends rise, not while the store is read: else a refresh could undo a rise.
        self._lock = Lock()

    def on_news(self, news: Sequence[ShardEnd]) -> None:
        """Apply the ends of a commit, on the thread of the store."""
        with self._lock:
            for topic, shard, end in news:
                known = self._ends.get(topic)
                if known is not None and shard < len(known) and known[shard] < end:
                    known[shard] = end

    def get_ends(self, topic: int, reached: Iterable[tuple[int, int]] = ()) -> Sequence[int]:
        """Return the ends by shard. The sequence stays current.

        `reached` has pairs of a shard and an offset that exists if its sender is right. The
        store is asked only if a known end is below one of them.
        """
        known = self._ends.get(topic)
        # Empty while another thread reads the ends for the first time.
        if not known or any(
            shard >= len(known) or known[shard] < offset for shard, offset in reached
        ):
            return self.refresh_ends(topic)
        return known

    def refresh_ends(self, topic: int) -> Sequence[int]:
        """Return the ends by shard after reading them from the store."""
        shards = self._store.bounds(topic).shards
        known = self._ends.setdefault(topic, [])
        if len(known) < len(shards):
            # Notifications before this were ignored, so read again now that they are not.
            with self._lock:
                known += [0] * (len(shards) - len(known))
            shards = self._store.bounds(topic).shards
        with self._lock:
            for number, bounds in enumerate(shards):
                known[number] = max(known[number], bounds.end)
        return known

    def remove_topic(self, topic: int) -> None:
        self._ends.pop(topic, None)
