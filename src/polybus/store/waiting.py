"""To wait for messages: on any engine, with nothing but `watch` and `bounds`.

A listener is put up first and the bounds are looked at after that, so that what comes
in between is seen by the one or the other. A topic that is dropped meanwhile is not
noticed here: whoever waits reads again after a while anyway, and is told then.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from polybus.errors import UsageError
from polybus.store.contract import ShardEnd, Store

Place = tuple[int, int]  # a topic's number, and a shard


@dataclass(slots=True)
class _Waiting:
    """The ends of those shards that have come past where they are waited for."""

    offsets: Mapping[Place, int]
    ends: dict[Place, int] = field(default_factory=dict)
    arrived: threading.Event = field(default_factory=threading.Event)

    def hear(self, news: Sequence[ShardEnd]) -> None:
        for topic, shard, end in news:
            self.note((topic, shard), end)

    def note(self, place: Place, end: int) -> None:
        if place in self.offsets and end > self.offsets[place]:
            self.ends[place] = max(end, self.ends.get(place, 0))
            self.arrived.set()


def wait(store: Store, offsets: Mapping[Place, int], timeout_s: float) -> list[ShardEnd]:
    """The shards that have messages at or behind these offsets, as soon as one has.

    Nothing if none has within the time. `DoesNotExist` if a topic is not there, and
    `UsageError` if it has no such shard.
    """
    waiting = _Waiting(dict(offsets))
    stop = store.watch(waiting.hear)
    try:
        _look(store, waiting)
        waiting.arrived.wait(timeout_s)
    finally:
        stop()
    ends = sorted(waiting.ends.copy().items())
    return [ShardEnd(topic, shard, end) for (topic, shard), end in ends]


def _look(store: Store, waiting: _Waiting) -> None:
    bounds = {topic: store.bounds(topic).shards for topic, _ in waiting.offsets}
    for topic, shard in waiting.offsets:
        if shard not in range(len(bounds[topic])):
            raise UsageError(f"topic number {topic} has no shard {shard}")
        waiting.note((topic, shard), bounds[topic][shard].end)
