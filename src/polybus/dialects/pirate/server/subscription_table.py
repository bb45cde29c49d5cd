"""All subscriptions by topic, and the writer of their positions.

Positions that move within one turn of the loop are stored in one commit. A GET is answered when
its LAST is on disk, so no answer depends on a position that a crash could take back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from polybus.dialects.pirate.server import subscriber_records
from polybus.dialects.pirate.server.subscriber_context import SubscriberContext, error_from_future
from polybus.dialects.pirate.server.subscriber_records import SubscriptionKey
from polybus.errors import LimitReached, PolybusError
from polybus.model.commit import Commit

if TYPE_CHECKING:
    from polybus.dialects.pirate.limits import PirateLimits
    from polybus.model.commit import CommitResult
    from polybus.store.contract import Store


class Subscription:
    """`last` is the position that the client sent, `saved` the position on disk."""

    __slots__ = ("account", "last", "place", "saved", "seen_s")

    def __init__(self, place: SubscriptionKey, account: str, last: int, seen_s: float) -> None:
        self.place = place
        self.account = account
        self.last = last
        self.saved = last
        self.seen_s = seen_s


class SubscriptionTable:
    """The subscriptions of a bus, and their limits."""

    def __init__(self, limits: PirateLimits) -> None:
        self._limits = limits
        self._topics: dict[int, dict[bytes, Subscription]] = {}
        self._accounts: Counter[str] = Counter()
        self.count = 0
        self.changed_topics: set[int] = set()  # topics with a moved or removed subscription

    def load(self, found: Iterable[tuple[SubscriptionKey, str, int]], now_s: float) -> None:
        for place, account, last in found:
            self._add(Subscription(place, account, last, now_s))
            self.changed_topics.add(place.topic)

    def find(self, topic: int, client: bytes) -> Subscription | None:
        subscribers = self._topics.get(topic)
        return subscribers.get(client) if subscribers else None

    def of(self, topic: int) -> list[Subscription]:
        return list(self._topics.get(topic, {}).values())

    def has(self, topic: int) -> bool:
        return topic in self._topics

    def __iter__(self) -> Iterator[Subscription]:
        for subscribers in list(self._topics.values()):
            yield from list(subscribers.values())

    def add(self, place: SubscriptionKey, account: str, last: int, now_s: float) -> Subscription:
        """Add a subscription. Raises `LimitReached`."""
        limits = self._limits
        if self.count >= limits.max_subscriptions:
            raise LimitReached(
                "max_subscriptions", "the bus has the maximum number of subscriptions"
            )
        if self._accounts[account] >= limits.max_user_subscriptions:
            raise LimitReached(
                "max_user_subscriptions", f"{account} has the maximum number of subscriptions"
            )
        found = Subscription(place, account, last, now_s)
        self._add(found)
        return found

    def remove(self, gone: Subscription) -> None:
        topic, client = gone.place
        subscribers = self._topics.get(topic, {})
        if subscribers.get(client) is not gone:
            return  # already removed with its topic
        del subscribers[client]
        if not subscribers:
            del self._topics[topic]
        self._forget(gone)
        self.changed_topics.add(topic)

    def drop(self, topic: int) -> bool:
        """Remove all subscriptions of a topic. Returns False if there were none."""
        gone = self._topics.pop(topic, {})
        for one in gone.values():
            self._forget(one)
        self.changed_topics.discard(topic)
        return bool(gone)

    def read_by_all(self, topic: int) -> int | None:
        """Return the lowest stored position of a topic, or None without subscribers."""
        subscribers = self._topics.get(topic)
        return min(one.saved for one in subscribers.values()) if subscribers else None

    def _add(self, new: Subscription) -> None:
        self._topics.setdefault(new.place.topic, {})[new.place.client] = new
        self._accounts[new.account] += 1
        self.count += 1

    def _forget(self, gone: Subscription) -> None:
        self.count -= 1
        self._accounts[gone.account] -= 1
        if not self._accounts[gone.account]:
            del self._accounts[gone.account]


def read_subscriptions(store: Store) -> Iterator[tuple[SubscriptionKey, str, int]]:
    """Yield key, account and LAST of all subscriptions in a store."""
    lasts = {
        subscriber_records.read_key(
            subscriber_records.LASTS, one.key
        ): subscriber_records.read_last(one.value)
        for one in subscriber_records.scan(store, subscriber_records.LASTS)
    }
    for one in subscriber_records.scan(store, subscriber_records.SUBSCRIPTIONS):
        place = subscriber_records.read_key(subscriber_records.SUBSCRIPTIONS, one.key)
        yield place, one.value.decode("utf-8", "replace"), lasts.get(place, 0)


OnSaved = Callable[[PolybusError | None], None]


class LastWriter:
    """Stores moved positions, many per commit."""

    def __init__(self, context: SubscriberContext, table: SubscriptionTable) -> None:
        self._context = context
        self._table = table
        self._unsaved: dict[Subscription, None] = {}
        self._waiting: list[OnSaved] = []

    def save(self, moved: Subscription, then: OnSaved) -> None:
        """Store a position with the next `flush`, at the end of the turn."""
        if len(self._unsaved) >= subscriber_records.MAX_CHANGES_PER_COMMIT:
            self.flush()
        if not self._unsaved:
            self._context.run_on_loop(self.flush)  # in case no on_turn_end comes first
        self._unsaved[moved] = None
        self._waiting.append(then)

    def flush(self) -> None:
        if not self._unsaved:
            return
        moved = [(one, one.last) for one in self._unsaved]
        waiting, self._waiting, self._unsaved = self._waiting, [], {}
        changes = tuple([subscriber_records.last_change(one.place, last) for one, last in moved])
        self._context.commit(
            Commit(changes=changes), lambda future: self._on_committed(moved, waiting, future)
        )

    def _on_committed(
        self,
        moved: list[tuple[Subscription, int]],
        waiting: list[OnSaved],
        future: Future[CommitResult],
    ) -> None:
        error = error_from_future(future)
        if error is None:
            for one, last in moved:
                one.saved = max(one.saved, last)
                self._table.changed_topics.add(one.place.topic)
        for then in waiting:
            then(error)
