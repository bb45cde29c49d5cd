"""All subscriptions of a bus, by topic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from polybus.dialects.pirate.limits import PirateLimits
from polybus.dialects.pirate.server import subscriber_records
from polybus.dialects.pirate.server.subscriber_context import SubscriberContext
from polybus.dialects.pirate.server.subscriber_records import LASTS, SUBSCRIPTIONS, SubscriptionKey
from polybus.errors import Damaged, LimitReached
from polybus.model.commit import StoredRecord


class Subscription:
    """`last` is the position that the client sent, `saved` the position on disk."""

    __slots__ = ("account", "key", "last", "saved", "seen_s")

    def __init__(self, key: SubscriptionKey, account: str, last: int, seen_s: float) -> None:
        self.key = key
        self.account = account
        self.last = last
        self.saved = last
        self.seen_s = seen_s


class StoredSubscribers:
    """The subscriptions and the number of clients in a store. Reading them blocks."""

    def __init__(self, context: SubscriberContext) -> None:
        store, find_topic = context.durable.store, context.durable.find_by_number
        lasts: dict[SubscriptionKey, int] = {}
        for record in subscriber_records.scan(store, LASTS):
            try:
                key = subscriber_records.read_key(LASTS, record.key)
                lasts[key] = subscriber_records.read_last(record.value)
            except Damaged as error:
                # Without a position the subscription starts at 0, and holds back retention.
                _report_damage(context, record, error)
        self.subscriptions: list[Subscription] = []
        self.dropped_topics: set[int] = set()
        for record in subscriber_records.scan(store, SUBSCRIPTIONS):
            try:
                key = subscriber_records.read_key(SUBSCRIPTIONS, record.key)
            except Damaged as error:
                _report_damage(context, record, error)
                continue
            if find_topic(key.topic) is None:
                self.dropped_topics.add(key.topic)
                continue
            account = record.value.decode("utf-8", "replace")
            last = lasts.get(key, 0)
            # The time of the last request is not stored, so subscriber_ttl_s starts again.
            self.subscriptions.append(Subscription(key, account, last, context.clock()))
        self.clients = sum(1 for _ in subscriber_records.scan(store, subscriber_records.COUNTERS))


def _report_damage(context: SubscriberContext, record: StoredRecord, error: Damaged) -> None:
    context.counters.count("faults", "record_damaged")
    context.log.warning("damaged record", key=record.key.hex(), reason=str(error))


class SubscriptionTable:
    """The subscriptions of a bus, and their limits."""

    def __init__(self, limits: PirateLimits, stored: list[Subscription]) -> None:
        self._limits = limits
        self._topics: dict[int, dict[bytes, Subscription]] = {}
        self._accounts: Counter[str] = Counter()
        self.count = 0
        self.changed_topics: set[int] = set()  # topics with a moved or removed subscription
        for subscription in stored:
            self._add(subscription)
            self.changed_topics.add(subscription.key.topic)

    def find(self, topic: int, client: bytes) -> Subscription | None:
        subscribers = self._topics.get(topic)
        return subscribers.get(client) if subscribers else None

    def has(self, topic: int) -> bool:
        return topic in self._topics

    def __iter__(self) -> Iterator[Subscription]:
        for subscribers in list(self._topics.values()):
            yield from list(subscribers.values())

    def add(self, key: SubscriptionKey, account: str, last: int, now_s: float) -> Subscription:
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
        subscription = Subscription(key, account, last, now_s)
        self._add(subscription)
        return subscription

    def remove(self, subscription: Subscription) -> None:
        topic, client = subscription.key
        subscribers = self._topics.get(topic, {})
        if subscribers.get(client) is not subscription:
            return  # already removed with its topic
        del subscribers[client]
        if not subscribers:
            del self._topics[topic]
        self._uncount(subscription)
        self.changed_topics.add(topic)

    def drop(self, topic: int) -> bool:
        """Remove all subscriptions of a topic. Returns False if there were none."""
        subscribers = self._topics.pop(topic, {})
        for subscription in subscribers.values():
            self._uncount(subscription)
        self.changed_topics.discard(topic)
        return bool(subscribers)

    def read_by_all(self, topic: int) -> int | None:
        """Return the lowest stored position of a topic, or None without subscribers."""
        subscribers = self._topics.get(topic)
        if not subscribers:
            return None
        return min(subscription.saved for subscription in subscribers.values())

    def _add(self, subscription: Subscription) -> None:
        topic, client = subscription.key
        self._topics.setdefault(topic, {})[client] = subscription
        self._accounts[subscription.account] += 1
        self.count += 1

    def _uncount(self, subscription: Subscription) -> None:
        self.count -= 1
        self._accounts[subscription.account] -= 1
        if not self._accounts[subscription.account]:
            del self._accounts[subscription.account]
