"""All subscriptions of a bus, by topic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from polybus.bus.shares import ShareTable
from polybus.dialects.pirate.server import subscriber_records
from polybus.dialects.pirate.server.subscriber_context import SubscriberContext
from polybus.dialects.pirate.server.subscriber_records import (
    ACCOUNTS,
    COUNTERS,
    LASTS,
    SUBSCRIPTIONS,
    SubscriptionKey,
)
from polybus.errors import Damaged
from polybus.model.commit import StoredRecord
from polybus.model.identity import Identity


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
    """The subscriptions in a store, and its clients by account. Reading them blocks."""

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
        accounts = {
            record.key[len(ACCOUNTS) :]: record.value.decode("utf-8", "replace")
            for record in subscriber_records.scan(store, ACCOUNTS)
        }
        self.clients = Counter(
            accounts.get(record.key[len(COUNTERS) :], "")
            for record in subscriber_records.scan(store, COUNTERS)
        )


def _report_damage(context: SubscriberContext, record: StoredRecord, error: Damaged) -> None:
    context.counters.count("faults", "record_damaged")
    context.log.warning("damaged record", key=record.key.hex(), reason=str(error))


class SubscriptionTable:
    """The subscriptions of a bus; `shares` counts them by account."""

    def __init__(self, shares: ShareTable, stored: list[Subscription]) -> None:
        self._shares = shares
        self._topics: dict[int, dict[bytes, Subscription]] = {}
        self.changed_topics: set[int] = set()  # topics with a moved or removed subscription
        for subscription in stored:
            self._shares.restore(subscription.account)
            self._add(subscription)
            self.changed_topics.add(subscription.key.topic)

    @property
    def count(self) -> int:
        return self._shares.used

    def find(self, topic: int, client: bytes) -> Subscription | None:
        subscribers = self._topics.get(topic)
        return subscribers.get(client) if subscribers else None

    def has(self, topic: int) -> bool:
        return topic in self._topics

    def __iter__(self) -> Iterator[Subscription]:
        for subscribers in list(self._topics.values()):
            yield from list(subscribers.values())

    def add(self, key: SubscriptionKey, caller: Identity, last: int, now_s: float) -> Subscription:
        """Add a subscription. Raises `LimitReached`."""
        self._shares.take(caller)
        subscription = Subscription(key, caller.account_name, last, now_s)
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
        self._shares.release(subscription.account)
        self.changed_topics.add(topic)

    def drop(self, topic: int) -> bool:
        """Remove all subscriptions of a topic. Returns False if there were none."""
        subscribers = self._topics.pop(topic, {})
        for subscription in subscribers.values():
            self._shares.release(subscription.account)
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
