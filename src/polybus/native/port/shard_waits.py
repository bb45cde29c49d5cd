"""Waits for new messages: many callers, one listener at the store.

Each caller waits on its own thread, so the number of waits is limited for the whole bus, and
so is the number of positions in all waits; a caller gets a share of both.

A wait ends with news, at its timeout, when its client disconnects or may no longer read, when
its topic is dropped, or when the bus stops. One thread checks all clients, because a thousand
waiting threads that wake every second would keep a core busy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Self

from polybus.errors import StoreClosed
from polybus.model.identity import ANONYMOUS

if TYPE_CHECKING:
    from polybus.bus.shares import ShareTable
    from polybus.groups.shard_ends import ShardEnds
    from polybus.model.identity import Identity
    from polybus.model.topic import Topic
    from polybus.store.contract import ShardEnd, Store

Place = tuple[int, int]  # topic number, shard
# Interval of the check for disconnected clients and lost tokens, which must end within a second.
CALLER_CHECK_INTERVAL_S = 0.5
# Positions of one wait: four topics with the maximum number of shards.
MAX_WAIT_POSITIONS = 16_384
ANY_SHARD = -2  # pseudo shard of a topic: news of every shard, also of later ones, wake it


class ShardWait:
    """A wait for news of some shards, with a deadline; entered and left by `with`."""

    def __init__(
        self,
        waits: ShardWaits,
        places: Collection[Place],
        timeout_s: float,
        is_gone: Callable[[], bool],
        identity: Identity,
    ) -> None:
        self.places = places
        self.identity = identity
        self.is_gone = is_gone
        self.is_abandoned = False
        self.event = Event()  # set by news, or when the wait must end
        # Places with news since the last check; None: every place must be checked.
        self.news: set[Place] | None = None
        self._waits = waits
        self._timeout_s = timeout_s

    def __enter__(self) -> Self:
        self._waits.enter(self)
        self._deadline_s = self._waits.clock() + self._timeout_s
        return self

    def __exit__(self, *_: object) -> None:
        self._waits.leave(self)

    def take_news(self) -> Collection[Place]:
        """Return the places to check: all the first time, later those with news since then."""
        news = self._waits.take_news(self)
        return self.places if news is None else news

    def sleep(self) -> bool:
        """Sleep until news since the last sleep. Returns False if the wait must end."""
        left_s = self._deadline_s - self._waits.clock()
        if self._waits.is_closed or self.is_abandoned or left_s <= 0:
            return False
        self.event.wait(left_s)
        self.event.clear()
        return True


class ShardWaits:
    def __init__(
        self,
        store: Store,
        waits: ShareTable,
        positions: ShareTable,
        clock: Callable[[], float],
        ends: ShardEnds,
    ) -> None:
        """`ends` gets the news before they wake a wait."""
        self._ends = ends
        self._wait_shares = waits
        self._position_shares = positions
        self.clock = clock
        self._lock = Lock()
        self._waits: set[ShardWait] = set()
        self._waits_by_place: dict[Place, set[ShardWait]] = {}
        self._closed = Event()
        self._checker: Thread | None = None
        self._end_watch = store.watch(self._on_commit)

    @property
    def count(self) -> int:
        return len(self._waits)

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def check_room(self, identity: Identity) -> None:
        """Raise `LimitReached` if the caller may not wait, before any work is done."""
        self._wait_shares.check_room(identity)

    def wait(
        self,
        wanted: Mapping[Place, int],
        timeout_s: float,
        is_gone: Callable[[], bool] = lambda: False,
        identity: Identity = ANONYMOUS,
        check_access: Callable[[], object] = lambda: None,
    ) -> dict[Place, int]:
        """Return the ends of shards that are beyond their offset; {} after the timeout.

        `check_access` is called after each wake-up and raises `Denied` to end the wait.
        """
        with self.open_wait(wanted, timeout_s, is_gone, identity) as waiting:
            while True:
                # Also before the first sleep: a change before `enter` did not wake this wait.
                check_access()
                advanced = self._find_advanced({at: wanted[at] for at in waiting.take_news()})
                if advanced or not waiting.sleep():
                    return advanced

    def _find_advanced(self, wanted: Mapping[Place, int]) -> dict[Place, int]:
        """Return the ends of shards that are beyond their offset."""
        reached: dict[int, list[tuple[int, int]]] = {}
        for (topic, shard), offset in wanted.items():
            reached.setdefault(topic, []).append((shard, offset))
        ends = {topic: self._ends.get_ends(topic, at) for topic, at in reached.items()}
        return {
            (topic, shard): ends[topic][shard]
            for (topic, shard), offset in wanted.items()
            if ends[topic][shard] > offset
        }

    def open_wait(
        self,
        places: Collection[Place],
        timeout_s: float,
        is_gone: Callable[[], bool] = lambda: False,
        identity: Identity = ANONYMOUS,
    ) -> ShardWait:
        """Return a wait for repeated sleeps, for the length of a `with`."""
        return ShardWait(self, places, timeout_s, is_gone, identity)

    def wake(self, topic: int, shard: int) -> None:
        """Wake the waits for a shard, which may be a pseudo shard."""
        with self._lock:
            self._wake((topic, shard))

    def wake_all(self) -> None:
        """Wake all waits, which then check their access again."""
        with self._lock:
            for wait in self._waits:
                wait.news = None
                wait.event.set()

    def on_topic_dropped(self, topic: Topic) -> None:
        """Wake the waits for a dropped topic, which then see its error."""
        with self._lock:
            for shard in (ANY_SHARD, *topic.shards):
                self._wake((topic.number, shard))

    def close(self) -> None:
        self._end_watch()
        self._closed.set()
        self.wake_all()

    def enter(self, wait: ShardWait) -> None:
        """Begin a wait. Raises `LimitReached` if its caller has no room for it."""
        self._wait_shares.take(wait.identity)
        try:
            self._position_shares.take(wait.identity, len(wait.places))
        except BaseException:
            self._wait_shares.release(wait.identity.account_name)
            raise
        with self._lock:
            if self._closed.is_set():
                self._release_shares(wait)
                raise StoreClosed("the bus is stopping")
            self._waits.add(wait)
            for place in wait.places:
                self._waits_by_place.setdefault(place, set()).add(wait)
            if self._checker is None:
                self._checker = Thread(
                    target=self._run_caller_checks, name="polybus-waits", daemon=True
                )
                self._checker.start()

    def take_news(self, wait: ShardWait) -> set[Place] | None:
        with self._lock:
            news, wait.news = wait.news, set()
            return news

    def leave(self, wait: ShardWait) -> None:
        with self._lock:
            self._waits.remove(wait)
            self._release_shares(wait)
            for place in wait.places:
                waits = self._waits_by_place[place]
                waits.discard(wait)
                if not waits:
                    del self._waits_by_place[place]

    def _release_shares(self, wait: ShardWait) -> None:
        self._wait_shares.release(wait.identity.account_name)
        self._position_shares.release(wait.identity.account_name, len(wait.places))

    def check_callers(self) -> None:
        """End the waits of disconnected clients."""
        with self._lock:
            waits = list(self._waits)
        for wait in waits:
            # Under the lock, because a call that has ended must not be used. The lock is
            # released between the checks, because commits need it to wake waits.
            with self._lock:
                if wait in self._waits and wait.is_gone():
                    wait.is_abandoned = True
                    wait.event.set()

    def _run_caller_checks(self) -> None:
        """Check callers periodically, on a thread of its own."""
        while not self._closed.wait(CALLER_CHECK_INTERVAL_S):
            self.check_callers()

    def _wake(self, place: Place) -> None:
        for wait in self._waits_by_place.get(place, ()):
            if wait.news is not None:
                wait.news.add(place)
            if not wait.event.is_set():
                wait.event.set()

    def _on_commit(self, news: Sequence[ShardEnd]) -> None:
        self._ends.on_news(news)
        with self._lock:
            for end in news:
                self._wake((end.topic, end.shard))
                self._wake((end.topic, ANY_SHARD))
