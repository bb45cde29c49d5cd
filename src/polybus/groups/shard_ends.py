"""Where the shards of topics with groups end, as far as news have told.

A fetch asks this each time it is woken, and an ack each time it is made; to ask the
store would cost either more than all else it does. It is never ahead of the store,
and behind it only until the news of a commit have come: whoever waits is woken after.
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
        """On the store's thread."""
        for topic, shard, end in news:
            known = self._ends.get(topic)
            if known is not None and shard < len(known) and known[shard] < end:
                known[shard] = end

    def get_ends(self, topic: int) -> Sequence[int]:
        """By shard, and up to date from now on."""
        return self._ends.get(topic) or self.refresh_ends(topic)

    def refresh_ends(self, topic: int) -> Sequence[int]:
        """The same, by asking the store."""
        shards = self._store.bounds(topic).shards
        known = self._ends.setdefault(topic, [])
        if len(known) < len(shards):  # of news that came before it was here nothing is known
            known += [0] * (len(shards) - len(known))
            shards = self._store.bounds(topic).shards
        for number, one in enumerate(shards):
            known[number] = max(known[number], one.end)
        return known

    def remove_topic(self, topic: int) -> None:
        self._ends.pop(topic, None)
