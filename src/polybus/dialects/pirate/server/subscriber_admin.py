"""Admin actions for pirate's subscribers: list and drop subscriptions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from polybus.bus.admin_verb import AdminError, AdminVerb, Request
from polybus.bus.dialect import ServerContext
from polybus.dialects.pirate.server.durable_subscribers import DurableSubscribers
from polybus.dialects.pirate.server.subscription_table import Subscription
from polybus.durable.durable_bus import durable_bus
from polybus.durable.topic_registry import DurableTopics
from polybus.errors import PolybusError
from polybus.model.identity import Identity

Answer = dict[str, Any]


class SubscriberAdmin:
    """The verbs. `context.attached` has the subscribers once the store is open."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def verbs(self) -> Mapping[str, AdminVerb]:
        return {
            "pirate_subs": AdminVerb(self._list, keys=frozenset({"topic", "client"})),
            "pirate_drop": AdminVerb(self._drop, keys=frozenset({"topic", "client"})),
        }

    def _list(self, request: Request, _caller: Identity) -> list[Answer]:
        subscribers, topics = self._require_durable()
        return [_describe(one, topics) for one in _select(request, subscribers, topics)]

    async def _drop(self, request: Request, _caller: Identity) -> Answer:
        if "client" not in request:
            raise AdminError("bad_request", "pirate_drop needs a client")
        subscribers, topics = self._require_durable()
        chosen = _select(request, subscribers, topics)
        if not chosen:
            raise AdminError("not_found", "this client has no such subscription")
        done: asyncio.Future[list[PolybusError]] = asyncio.get_running_loop().create_future()
        subscribers.drop(chosen, done.set_result)
        errors = await done
        if errors:
            raise AdminError(errors[0].code, str(errors[0]))
        return {"dropped": len(chosen)}

    def _require_durable(self) -> tuple[DurableSubscribers, DurableTopics]:
        durable = durable_bus(self._context.broker)
        if self._context.attached is None or durable is None:
            raise AdminError("not_supported", "the bus has no durable topics")
        return self._context.attached, durable.topics


def _select(
    request: Request, subscribers: DurableSubscribers, topics: DurableTopics
) -> list[Subscription]:
    """Return the subscriptions of the requested client and topic; of all if it names none."""
    text, name = request.get("client"), request.get("topic")
    client: bytes | None = None
    number: int | None = None
    if text is not None:
        try:
            client = bytes.fromhex(str(text))  # in hex, because an id may be any bytes
        except ValueError:
            raise AdminError("bad_request", "the client id must be in hex") from None
    if name is not None:
        topic = topics.find(str(name))
        if topic is None:
            raise AdminError("not_found", f"no durable topic {str(name)[:255]!r}")
        number = topic.number
    return [
        one
        for one in subscribers.table
        if (client is None or one.key.client == client)
        and (number is None or one.key.topic == number)
    ]


def _describe(subscription: Subscription, topics: DurableTopics) -> Answer:
    topic = topics.find_by_number(subscription.key.topic)
    newest = topics.next_id(topic) - 1 if topic else subscription.last
    return {
        "topic": topic.name if topic else "",
        "client": subscription.key.client.hex(),
        "last": subscription.last,
        "behind": max(0, newest - subscription.last),
        "seen_s": round(time.monotonic() - subscription.seen_s, 1),
        "user": subscription.account,
    }
