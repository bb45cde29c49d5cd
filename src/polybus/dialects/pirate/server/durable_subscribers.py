"""The verbs of durable subscribers, as sessions call them. All on the loop."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from polybus.dialects.pirate.server import subscriber_records, subscription_table
from polybus.dialects.pirate.server.client_table import Clients
from polybus.dialects.pirate.server.get_handler import Getting
from polybus.dialects.pirate.server.last_writer import Lasts
from polybus.dialects.pirate.server.message_cache import Shelf
from polybus.dialects.pirate.server.put_handler import LARGE_BYTES, Putting
from polybus.dialects.pirate.server.read_retention import Collecting
from polybus.dialects.pirate.server.subscribe_handler import Subscribing
from polybus.dialects.pirate.server.subscription_table import Subscription, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polybus.dialects.pirate.server.client_table import Client
    from polybus.dialects.pirate.server.subscriber_context import Means, Request, Then
    from polybus.model.identity import Identity
    from polybus.model.topic import Topic


class Recovered:
    """What a store knows of subscribers; reading it blocks."""

    def __init__(self, means: Means) -> None:
        store = means.durable.store
        found = list(subscription_table.stored(store))
        there = means.durable.numbered
        self.subscriptions = [one for one in found if there(one[0].topic)]
        self.gone = {place.topic for place, _, _ in found if not there(place.topic)}
        self.clients = sum(1 for _ in subscriber_records.scan(store, subscriber_records.COUNTERS))


class Subscribers:
    def __init__(self, means: Means, recovered: Recovered) -> None:
        self._means = means
        self.clients = Clients(means, recovered.clients)
        self.table = Table(means.limits)
        self._lasts = Lasts(means, self.table)
        self._shelf = Shelf(means)
        self._subscribing = Subscribing(means, self.clients, self.table, self._lasts)
        self._putting = Putting(means, self.clients, self._subscribing)
        self._getting = Getting(means, self.table, self._lasts, self._shelf)
        self._collecting = Collecting(means, self.table, self._subscribing)
        # For sessions: a put with nothing in its way, from its frames (`put_fast_path`).
        self.take_put = self._putting.short.take
        self.table.load(recovered.subscriptions, means.clock())
        for number in recovered.gone:
            self._subscribing.sweep_number(number)
        self._collecting.begin_anew()
        means.binding.on_gone.append(self._gone)

    # --- what clients ask for

    def hello(self, request: Request, then: Then) -> None:
        number = request.counter

        def greet(client: Client) -> None:
            self.clients.greet(client, number, then)

        self.clients.queue(request.client, greet, then, alone=True)

    def put(self, request: Request, caller: Identity, then: Then) -> None:
        body = request.body
        large = (len(body[0]) if len(body) == 1 else sum(map(len, body))) > LARGE_BYTES
        client = None if large else self.clients.ready(request.client)
        if client is not None:
            self._putting.put(client, request, caller, then)
            return
        held = self._putting.hold(request, then)
        if held is None:
            return
        verb = self._putting.put_large if large else self._putting.put_held
        put = partial(verb, request=request, caller=caller, held=held)
        self.clients.queue(request.client, put, held.tell, alone=large)

    def get(self, request: Request, caller: Identity, then: Then) -> None:
        client = self.clients.ready(request.client)
        if client is not None:
            self._getting.get(client, request, caller, then)
            return
        get = partial(self._getting.get, request=request, caller=caller, then=then)
        self.clients.queue(request.client, get, then)

    def subscribe(self, request: Request, caller: Identity, then: Then) -> None:
        verb = partial(self._subscribing.subscribe, request=request, caller=caller, then=then)
        self.clients.queue(request.client, verb, then, alone=True)

    def unsubscribe(self, request: Request, then: Then) -> None:
        verb = partial(self._subscribing.unsubscribe, request=request, then=then)
        self.clients.queue(request.client, verb, then, alone=True)

    def turn_over(self) -> None:
        """All that came at once has been asked for."""
        self._putting.flush()
        self._lasts.flush()

    # --- what others ask for

    def subscriptions(self) -> list[Subscription]:
        return list(self.table)

    def drop(self, gone: Sequence[Subscription], then: Then) -> None:
        """Ends subscriptions of clients that will not come again; then tells of the errors."""
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
            drop = partial(self._subscribing.drop, gone=ones, then=dropped)
            self.clients.queue(client, drop, dropped, alone=True)

    def tick(self, now_s: float) -> None:
        self._collecting.tick(now_s)
        ttl_s = self._means.limits.subscriber_ttl_s
        if ttl_s:
            self._expire(now_s - ttl_s)

    def stats(self) -> dict[str, Any]:
        return {
            "clients": self.clients.count,
            "subscriptions": self.table.count,
            "collected": self._collecting.collected,
            "uncommitted_bytes": self._putting.uncommitted_bytes,
            "shelf_bytes": self._shelf.size,
        }

    def _expire(self, before_s: float) -> None:
        dead = [one for one in self.table if one.seen_s < before_s]
        for one in dead:
            one.seen_s = self._means.clock()  # so that it is not tried again at once
            self._means.counters.count("dropped", "subscriber_ttl_s")
            topic = self._means.durable.numbered(one.place.topic)
            self._means.log.warning(
                "subscription dropped",
                topic=topic.name if topic else "",
                client=one.place.client.hex(),
                reason="subscriber_ttl_s",
            )
        self.drop(dead, lambda errors: None)

    def _gone(self, topic: Topic) -> None:
        self._shelf.forget(topic.number)
        self._subscribing.gone(topic)
