"""Durable subscribers: the operations that sessions and the admin socket call, on the loop."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from polybus.dialects.pirate.server import subscriber_records, subscription_table
from polybus.dialects.pirate.server.client_table import ClientTable
from polybus.dialects.pirate.server.get_handler import GetHandler, MessageCache
from polybus.dialects.pirate.server.put_handler import LARGE_BYTES, PutHandler
from polybus.dialects.pirate.server.read_retention import ReadRetention
from polybus.dialects.pirate.server.subscribe_handler import SubscribeHandler
from polybus.dialects.pirate.server.subscription_table import (
    LastWriter,
    Subscription,
    SubscriptionTable,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polybus.dialects.pirate.server.client_table import ClientEntry
    from polybus.dialects.pirate.server.subscriber_context import (
        OnResult,
        Request,
        SubscriberContext,
    )
    from polybus.model.identity import Identity
    from polybus.model.topic import Topic


class StoredSubscribers:
    """The subscriptions and the number of clients in a store. Reading them blocks."""

    def __init__(self, context: SubscriberContext) -> None:
        store = context.durable.store
        found = list(subscription_table.read_subscriptions(store))
        there = context.durable.find_by_number
        self.subscriptions = [one for one in found if there(one[0].topic)]
        self.dropped_topics = {place.topic for place, _, _ in found if not there(place.topic)}
        self.clients = sum(1 for _ in subscriber_records.scan(store, subscriber_records.COUNTERS))


class DurableSubscribers:
    """Executes the requests of pirate clients."""

    def __init__(self, context: SubscriberContext, recovered: StoredSubscribers) -> None:
        self._context = context
        self.clients = ClientTable(context, recovered.clients)
        self.table = SubscriptionTable(context.limits)
        self._lasts = LastWriter(context, self.table)
        self._cache = MessageCache(context)
        self._subscribe_handler = SubscribeHandler(context, self.clients, self.table, self._lasts)
        self._put_handler = PutHandler(context, self.clients, self._subscribe_handler)
        self._get_handler = GetHandler(context, self.table, self._lasts, self._cache)
        self._retention = ReadRetention(context, self.table, self._subscribe_handler)
        # The fast path: takes a plain PUT from its frames (`put_fast_path`).
        self.take_put = self._put_handler.fast_path.take
        self.table.load(recovered.subscriptions, context.clock())
        for number in recovered.dropped_topics:
            self._subscribe_handler.remove_records_of(number)
        self._retention.enqueue_unused_topics()
        context.binding.on_removed.append(self._on_topic_dropped)

    # --- requests of clients

    def hello(self, request: Request, then: OnResult) -> None:
        number = request.counter

        def greet(client: ClientEntry) -> None:
            self.clients.open_epoch(client, number, then)

        self.clients.queue(request.client, greet, then, alone=True)

    def put(self, request: Request, caller: Identity, then: OnResult) -> None:
        body = request.body
        large = (len(body[0]) if len(body) == 1 else sum(map(len, body))) > LARGE_BYTES
        client = None if large else self.clients.find_ready(request.client)
        if client is not None:
            self._put_handler.put(client, request, caller, then)
            return
        held = self._put_handler.reserve(request, then)
        if held is None:
            return
        verb = self._put_handler.put_large if large else self._put_handler.put_held
        put = partial(verb, request=request, caller=caller, held=held)
        self.clients.queue(request.client, put, held.finish, alone=large)

    def get(self, request: Request, caller: Identity, then: OnResult) -> None:
        client = self.clients.find_ready(request.client)
        if client is not None:
            self._get_handler.get(client, request, caller, then)
            return
        get = partial(self._get_handler.get, request=request, caller=caller, then=then)
        self.clients.queue(request.client, get, then)

    def subscribe(self, request: Request, caller: Identity, then: OnResult) -> None:
        verb = partial(self._subscribe_handler.subscribe, request=request, caller=caller, then=then)
        self.clients.queue(request.client, verb, then, alone=True)

    def unsubscribe(self, request: Request, then: OnResult) -> None:
        verb = partial(self._subscribe_handler.unsubscribe, request=request, then=then)
        self.clients.queue(request.client, verb, then, alone=True)

    def on_turn_end(self) -> None:
        """Submit the commits of this turn."""
        self._put_handler.flush()
        self._lasts.flush()

    # --- administration

    def subscriptions(self) -> list[Subscription]:
        return list(self.table)

    def drop(self, gone: Sequence[Subscription], then: OnResult) -> None:
        """Drop subscriptions without their clients. Calls `then` with the list of errors."""
        of_client: dict[bytes, list[Subscription]] = {}
        for one in gone:
            of_client.setdefault(one.place.client, []).append(one)
        left = [len(of_client)]
        errors: list[Any] = []

        def dropped(error: Any) -> None:
            left[0] -= 1
            if error is not None:
                errors.append(error)
            if not left[0]:
                then(errors)

        if not gone:
            then(errors)
        for client, ones in of_client.items():
            drop = partial(self._subscribe_handler.drop, gone=ones, then=dropped)
            self.clients.queue(client, drop, dropped, alone=True)

    def tick(self, now_s: float) -> None:
        self._retention.tick(now_s)
        ttl_s = self._context.limits.subscriber_ttl_s
        if ttl_s:
            self._expire(now_s - ttl_s)

    def stats(self) -> dict[str, Any]:
        return {
            "clients": self.clients.count,
            "subscriptions": self.table.count,
            "collected": self._retention.collected,
            "uncommitted_bytes": self._put_handler.uncommitted_bytes,
            "shelf_bytes": self._cache.size,
        }

    def _expire(self, before_s: float) -> None:
        dead = [one for one in self.table if one.seen_s < before_s]
        for one in dead:
            one.seen_s = self._context.clock()  # do not retry at the next tick
            self._context.counters.count("dropped", "subscriber_ttl_s")
            topic = self._context.durable.find_by_number(one.place.topic)
            self._context.log.warning(
                "subscription dropped",
                topic=topic.name if topic else "",
                client=one.place.client.hex(),
                reason="subscriber_ttl_s",
            )
        self.drop(dead, lambda errors: None)

    def _on_topic_dropped(self, topic: Topic) -> None:
        self._cache.forget(topic.number)
        self._subscribe_handler.on_topic_dropped(topic)
