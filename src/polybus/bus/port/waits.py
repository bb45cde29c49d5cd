"""Waiting for news on shards: many callers, one listener at the store.

Each caller waits on its own thread, so their number is bounded for the whole
bus, and so are the shards that all of them together wait for. A wait ends with
news, when its time is up, when its client or its topic has gone, or when the bus
stops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Event, Lock
from typing import TYPE_CHECKING

from polybus.errors import LimitReached, StoreClosed

if TYPE_CHECKING:
    from polybus.model.topic import Topic
    from polybus.store.contract import News, Store

Place = tuple[int, int]  # topic number, shard
# How often a waiting thread looks whether its client is still there.
LOOK_S = 1.0
# Of all waits together: some 200 bytes each, so they take about 200 MB at most.
MAX_PLACES = 1 << 20


class Waits:
    def __init__(self, store: Store, max_waits: int, clock: Callable[[], float]) -> None:
        self._store = store
        self._max_waits = max_waits
        self._clock = clock
        self._lock = Lock()
        self._waiting: dict[Place, set[Event]] = {}
        self._count = 0
        self._places = 0
        self._closed = False
        self._end_watch = store.watch(self._news)

    @property
    def count(self) -> int:
        return self._count

    def wait(
        self,
        wanted: Mapping[Place, int],
        timeout_s: float,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> dict[Place, int]:
        """The ends of those shards that reach beyond the offset given; none if time is up."""
        event = Event()
        self._enter(wanted, event)
        try:
            deadline_s = self._clock() + timeout_s
            while not (found := self._moved(wanted)):
                if not self._sleep(event, deadline_s, is_gone):
                    break
            return found
        finally:
            self._leave(wanted, event)

    def gone(self, topic: Topic) -> None:
        """The topic was dropped: whoever waits for it looks again, and learns of it."""
        with self._lock:
            for shard in topic.shards:
                for event in self._waiting.get((topic.number, shard), ()):
                    event.set()

    def close(self) -> None:
        self._end_watch()
        with self._lock:
            self._closed = True
            for events in self._waiting.values():
                for event in events:
                    event.set()

    def _sleep(self, event: Event, deadline_s: float, is_gone: Callable[[], bool]) -> bool:
        """Until something may have come; False if there is nothing more to wait for."""
        woken = False
        while not woken:
            left_s = deadline_s - self._clock()
            if self._closed or left_s <= 0 or is_gone():
                return False
            woken = event.wait(min(left_s, LOOK_S))
        event.clear()
        return True

    def _enter(self, wanted: Mapping[Place, int], event: Event) -> None:
        with self._lock:
            if self._closed:
                raise StoreClosed("the bus is stopping")
            if self._count >= self._max_waits:
                text = f"{self._max_waits} are waiting already: try again later"
                raise LimitReached("max_waits", text)
            if self._places + len(wanted) > MAX_PLACES:
                text = f"all who wait do so for {self._places} shards already: try again later"
                raise LimitReached("max_waits", text)
            self._count += 1
            self._places += len(wanted)
            for place in wanted:
                self._waiting.setdefault(place, set()).add(event)

    def _leave(self, wanted: Mapping[Place, int], event: Event) -> None:
        with self._lock:
            self._count -= 1
            self._places -= len(wanted)
            for place in wanted:
                events = self._waiting[place]
                events.discard(event)
                if not events:
                    del self._waiting[place]

    def _moved(self, wanted: Mapping[Place, int]) -> dict[Place, int]:
        numbers = {topic for topic, _ in wanted}
        bounds = {number: self._store.bounds(number) for number in numbers}
        ends = {place: bounds[place[0]].shards[place[1]].end for place in wanted}
        return {place: end for place, end in ends.items() if end > wanted[place]}

    def _news(self, news: Sequence[News]) -> None:
        with self._lock:
            for one in news:
                for event in self._waiting.get((one.topic, one.shard), ()):
                    event.set()
