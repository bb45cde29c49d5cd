"""Waiting for news on shards: many callers, one listener at the store.

Each caller waits on its own thread, so their number is bounded for the whole
bus, and so are the shards that all of them together wait for. A wait ends with
news, when its time is up, when its client or its topic has gone, or when the bus
stops. Those who wait sleep: one thread looks after all of their clients, since a
thousand that wake each second would be busy with nothing but each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Self, TypeVar

from polybus.errors import LimitReached, StoreClosed

if TYPE_CHECKING:
    from polybus.model.topic import Topic
    from polybus.store.contract import Listener, ShardEnd, Store

T = TypeVar("T")
Place = tuple[int, int]  # topic number, shard
# How often it is looked whether clients are still there.
CALLER_CHECK_INTERVAL_S = 1.0
# Positions of one wait: four topics with the maximum number of shards.
MAX_WAIT_POSITIONS = 16_384
# Positions of all waits together, about 200 bytes each: at most about 200 MB.
MAX_TOTAL_POSITIONS = 1 << 20


class ShardWaiter:
    """One who waits: woken by news, or because there is nothing to wait for any more."""

    def __init__(self, is_gone: Callable[[], bool]) -> None:
        self.event = Event()
        self.is_gone = is_gone
        self.is_abandoned = False


class ShardWait:
    """News of some places, and how long it is waited for them."""

    def __init__(
        self,
        waits: ShardWaits,
        places: Collection[Place],
        timeout_s: float,
        is_gone: Callable[[], bool],
    ) -> None:
        self._waits = waits
        self._places = places
        self._timeout_s = timeout_s
        self._waiter = ShardWaiter(is_gone)

    def __enter__(self) -> Self:
        self._waits.enter(self._places, self._waiter)
        self._deadline_s = self._waits.clock() + self._timeout_s
        return self

    def __exit__(self, *_: object) -> None:
        self._waits.leave(self._places, self._waiter)

    def sleep(self) -> bool:
        """Until there are news since the last sleep; False if there is nothing to wait for."""
        left_s = self._deadline_s - self._waits.clock()
        if self._waits.is_closed or self._waiter.is_abandoned or left_s <= 0:
            return False
        self._waiter.event.wait(left_s)
        self._waiter.event.clear()
        return True


class ShardWaits:
    def __init__(
        self,
        store: Store,
        max_waits: int,
        clock: Callable[[], float],
        hear: Listener = lambda news: None,
    ) -> None:
        """`hear` is told of news before anybody is woken by them."""
        self._store = store
        self._max_waits = max_waits
        self.clock = clock
        self._on_commit = hear
        self._lock = Lock()
        self._waiting: dict[Place, set[ShardWaiter]] = {}
        self._waiters: set[ShardWaiter] = set()
        self._places = 0
        self._closed = Event()
        self._checker: Thread | None = None
        self._end_watch = store.watch(self._on_news)

    @property
    def count(self) -> int:
        return len(self._waiters)

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def check_room(self) -> None:
        """`LimitReached` if nobody more can wait, before anything was done for it."""
        if len(self._waiters) >= self._max_waits:
            text = f"{self._max_waits} are waiting already: try again later"
            raise LimitReached("max_waits", text)

    def wait(
        self,
        wanted: Mapping[Place, int],
        timeout_s: float,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> dict[Place, int]:
        """The ends of those shards that reach beyond the offset given; none if time is up."""
        return (
            self.wait_until(wanted, lambda: self._find_advanced(wanted), timeout_s, is_gone) or {}
        )

    def wait_until(
        self,
        places: Collection[Place],
        look: Callable[[], T | None],
        timeout_s: float,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> T | None:
        """What `look` finds, which is asked now and when there are news of the places.

        None, or the last that it found, if time is up.
        """
        with self.open_wait(places, timeout_s, is_gone) as waiting:
            while not (found := look()) and waiting.sleep():
                pass
            return found

    def open_wait(
        self,
        places: Collection[Place],
        timeout_s: float,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> ShardWait:
        """For one who looks again and again, for the length of a `with`."""
        return ShardWait(self, places, timeout_s, is_gone)

    def wake(self, topic: int, shard: int) -> None:
        """Whoever waits for the place looks again. It need be none that the store knows."""
        with self._lock:
            self._wake((topic, shard))

    def on_topic_dropped(self, topic: Topic) -> None:
        """The topic was dropped: whoever waits for it looks again, and learns of it."""
        with self._lock:
            for shard in topic.shards:
                self._wake((topic.number, shard))

    def close(self) -> None:
        self._end_watch()
        self._closed.set()
        with self._lock:
            for waiter in self._waiters:
                waiter.event.set()

    def enter(self, wanted: Collection[Place], waiter: ShardWaiter) -> None:
        with self._lock:
            if self._closed.is_set():
                raise StoreClosed("the bus is stopping")
            self.check_room()
            if self._places + len(wanted) > MAX_TOTAL_POSITIONS:
                text = f"all who wait do so for {self._places} shards already: try again later"
                raise LimitReached("max_waits", text)
            self._waiters.add(waiter)
            self._places += len(wanted)
            for place in wanted:
                self._waiting.setdefault(place, set()).add(waiter)
            if self._checker is None:
                self._checker = Thread(
                    target=self._run_caller_checks, name="polybus-waits", daemon=True
                )
                self._checker.start()

    def leave(self, wanted: Collection[Place], waiter: ShardWaiter) -> None:
        with self._lock:
            self._waiters.remove(waiter)
            self._places -= len(wanted)
            for place in wanted:
                waiters = self._waiting[place]
                waiters.discard(waiter)
                if not waiters:
                    del self._waiting[place]

    def check_callers(self) -> None:
        """Lets those go whose clients have gone."""
        with self._lock:
            waiters = list(self._waiters)
        for waiter in waiters:
            self._check_caller(waiter)

    def _run_caller_checks(self) -> None:
        """On a thread of its own."""
        while not self._closed.wait(CALLER_CHECK_INTERVAL_S):
            self.check_callers()

    def _check_caller(self, waiter: ShardWaiter) -> None:
        """Under the lock, for a call that has ended must not be asked any more."""
        with self._lock:
            if waiter in self._waiters and waiter.is_gone():
                waiter.is_abandoned = True
                waiter.event.set()

    def _wake(self, place: Place) -> None:
        for waiter in self._waiting.get(place, ()):
            if not waiter.event.is_set():
                waiter.event.set()

    def _find_advanced(self, wanted: Mapping[Place, int]) -> dict[Place, int]:
        numbers = {topic for topic, _ in wanted}
        bounds = {number: self._store.bounds(number) for number in numbers}
        ends = {place: bounds[place[0]].shards[place[1]].end for place in wanted}
        return {place: end for place, end in ends.items() if end > wanted[place]}

    def _on_news(self, news: Sequence[ShardEnd]) -> None:
        self._on_commit(news)
        with self._lock:
            for one in news:
                self._wake((one.topic, one.shard))
