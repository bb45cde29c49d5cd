"""Durable subscribers of a bus: the request handlers and the state they share, on the loop.

HELLO        client_table.py
SUB, UNSUB   subscribe_handler.py
PUT          put_fast_path.pyx for most, put_handler.py for all others
GET          get_handler.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polybus.dialects.pirate import codec
from polybus.dialects.pirate.codec import ClientRequest
from polybus.dialects.pirate.server.client_table import ClientTable
from polybus.dialects.pirate.server.get_handler import GetHandler, LastWriter, MessageCache
from polybus.dialects.pirate.server.put_handler import PutHandler
from polybus.dialects.pirate.server.read_retention import ReadRetention
from polybus.dialects.pirate.server.subscribe_handler import SubscribeHandler
from polybus.dialects.pirate.server.subscriber_context import OnResult, SubscriberContext
from polybus.dialects.pirate.server.subscription_table import StoredSubscribers, SubscriptionTable
from polybus.model.identity import Identity
from polybus.model.topic import Topic

Handler = Callable[[ClientRequest, Identity, OnResult], None]


class DurableSubscribers:
    """`handlers` executes the requests of clients, by op. `take_put` is the fast path of PUT."""

    def __init__(self, context: SubscriberContext, stored: StoredSubscribers) -> None:
        self._context = context
        self.clients = ClientTable(context, stored.clients)
        limits = context.limits
        shares = context.shares.new_table(
            "max_subscriptions",
            limits.max_subscriptions,
            context.count_refused,
            user_limit=("max_user_subscriptions", limits.max_user_subscriptions),
        )
        self.table = SubscriptionTable(shares, stored.subscriptions)
        self._lasts = LastWriter(context, self.table)
        self._cache = MessageCache(context)
        self._subscribe_handler = SubscribeHandler(context, self.clients, self.table, self._lasts)
        self._put_handler = PutHandler(
            context, self.clients, self._subscribe_handler.topics_in_removal
        )
        get_handler = GetHandler(context, self.clients, self.table, self._lasts, self._cache)
        self._retention = ReadRetention(context, self.table, self._subscribe_handler)
        self.handlers: dict[bytes, Handler] = {
            codec.HELLO: self.clients.hello,
            codec.SUB: self._subscribe_handler.subscribe,
            codec.UNSUB: self._subscribe_handler.unsubscribe,
            codec.PUT: self._put_handler.put,
            codec.GET: get_handler.get,
        }
        self.take_put = self._put_handler.fast_path.take
        self.drop = self._subscribe_handler.drop
        for number in stored.dropped_topics:
            self._subscribe_handler.remove_records(number)
        context.binding.on_removed.append(self._on_topic_dropped)

    def on_turn_end(self) -> None:
        """Submit the commits of this turn."""
        self._put_handler.flush()
        self._lasts.on_turn_end()

    def flush(self) -> None:
        """Submit the positions that are not stored yet. Called when the bus stops."""
        self._lasts.flush()

    def tick(self, now_s: float) -> None:
        self._retention.tick(now_s)
        ttl_s = self._context.limits.subscriber_ttl_s
        if not ttl_s:
            return
        expired = [one for one in self.table if one.seen_s < now_s - ttl_s]
        for subscription in expired:
            subscription.seen_s = self._context.clock()  # do not retry at the next tick
            self._context.counters.count("dropped", "subscriber_ttl_s")
            topic = self._context.durable.find_by_number(subscription.key.topic)
            self._context.log.warning(
                "subscription dropped",
                topic=topic.name if topic else "",
                client=subscription.key.client.hex(),
                reason="subscriber_ttl_s",
            )
        self.drop(expired, lambda errors: None)

    def stats(self) -> dict[str, Any]:
        return {
            "clients": self.clients.count,
            "subscriptions": self.table.count,
            "collected": self._retention.collected,
            "uncommitted_bytes": self._put_handler.fast_path.uncommitted_bytes,
            "shelf_bytes": self._cache.size,
        }

    def _on_topic_dropped(self, topic: Topic) -> None:
        self._cache.forget(topic.number)
        self._subscribe_handler.on_topic_dropped(topic)
