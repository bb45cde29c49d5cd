"""The ends of the shards of topics with groups, kept current by store notifications.

Every fetch that wakes and every ack needs them, and asking the store would cost more than the
rest of the call. They are never ahead of the store. They are behind it only until the
notification of a commit arrives; waiting fetches are woken after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polybus.store.contract import ShardEnd, Store


class ShardEnds:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._ends: dict[int, list[int]] = {}

    def on_news(self, news: Sequence[ShardEnd]) -> None:
        """Apply the ends of a commit, on the thread of the store."""
        for topic, shard, end in news:
            known = self._ends.get(topic)
            if known is not None and shard < len(known) and known[shard] < end:
                known[shard] = end

    def get_ends(self, topic: int) -> Sequence[int]:
        """Return the ends by shard. The sequence stays current."""
        return self._ends.get(topic) or self.refresh_ends(topic)

    def get_end(self, topic: int, shard: int, at_least: int) -> int:
        """Return the end of a shard. Asks the store only if the known end is below `at_least`."""
        known = self._ends.get(topic)
        if known is None or known[shard] < at_least:
            return self.refresh_ends(topic)[shard]
        return known[shard]

    def refresh_ends(self, topic: int) -> Sequence[int]:
        """Return the ends by shard after reading them from the store."""
        shards = self._store.bounds(topic).shards
        known = self._ends.setdefault(topic, [])
        if len(known) < len(shards):
            # Notifications before this were ignored, so read again now that they are not.
            known += [0] * (len(shards) - len(known))
            shards = self._store.bounds(topic).shards
        for number, bounds in enumerate(shards):
            known[number] = max(known[number], bounds.end)
        return known

    def remove_topic(self, topic: int) -> None:
        self._ends.pop(topic, None)
