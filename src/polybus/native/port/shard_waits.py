"""Waits for new messages: many callers, one listener at the store.

Each caller waits on its own thread, so the number of waits is limited for the whole bus, and
so is the number of positions in all waits. A wait ends with news, at its timeout, when its
client disconnects, when its topic is dropped, or when the bus stops. One thread checks all
clients, because a thousand waiting threads that wake every second would keep a core busy.
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
# Interval of the check for disconnected clients.
CALLER_CHECK_INTERVAL_S = 1.0
# Positions of one wait: four topics with the maximum number of shards.
MAX_WAIT_POSITIONS = 16_384
# Positions of all waits together, about 200 bytes each: at most about 200 MB.
MAX_TOTAL_POSITIONS = 1 << 20


class ShardWaiter:
    """The event of one wait, set by news, or when the wait must end."""

    def __init__(self, is_gone: Callable[[], bool]) -> None:
        self.event = Event()
        self.is_gone = is_gone
        self.is_abandoned = False


class ShardWait:
    """A wait for news of some shards, with a deadline."""

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
        """Sleep until news since the last sleep. Returns False if the wait must end."""
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
        """`hear` is called with news before they wake a wait."""
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
        """Raise `LimitReached` if there are `max_waits` waits, before any work is done."""
        if len(self._waiters) >= self._max_waits:
            text = f"{self._max_waits} calls are waiting; retry later"
            raise LimitReached("max_waits", text)

    def wait(
        self,
        wanted: Mapping[Place, int],
        timeout_s: float,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> dict[Place, int]:
        """Return the ends of shards that are beyond their offset; {} after the timeout."""
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
        """Call `look` now and after news of the places until it returns a true value.

        Returns its last value after the timeout.
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
        """Return a wait for repeated sleeps, for the length of a `with`."""
        return ShardWait(self, places, timeout_s, is_gone)

    def wake(self, topic: int, shard: int) -> None:
        """Wake the waits for a shard, which may be a pseudo shard."""
        with self._lock:
            self._wake((topic, shard))

    def on_topic_dropped(self, topic: Topic) -> None:
        """Wake the waits for a dropped topic, which then see its error."""
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
                text = f"all waits together are for {self._places} shards; retry later"
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
        """End the waits of disconnected clients."""
        with self._lock:
            waiters = list(self._waiters)
        for waiter in waiters:
            self._check_caller(waiter)

    def _run_caller_checks(self) -> None:
        """Check callers periodically, on a thread of its own."""
        while not self._closed.wait(CALLER_CHECK_INTERVAL_S):
            self.check_callers()

    def _check_caller(self, waiter: ShardWaiter) -> None:
        """Check one caller under the lock, because a call that has ended must not be used."""
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
