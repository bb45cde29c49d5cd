"""Admin actions for pirate's subscribers: list and drop subscriptions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polybus.bus.admin_verb import AdminError, AdminVerb, Request
from polybus.durable.durable_bus import durable_bus
from polybus.errors import PolybusError

if TYPE_CHECKING:
    from polybus.bus.dialect import ServerContext
    from polybus.dialects.pirate.server.durable_subscribers import DurableSubscribers
    from polybus.dialects.pirate.server.subscription_table import Subscription
    from polybus.durable.topic_registry import DurableTopics
    from polybus.model.identity import Identity

Answer = dict[str, Any]


class SubscriberAdmin:
    """The verbs. `context.attached` has the subscribers once the store is open."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def verbs(self) -> Mapping[str, AdminVerb]:
        return {
            "pirate_subs": AdminVerb(self._subs, keys=frozenset({"topic", "client"})),
            "pirate_drop": AdminVerb(self._drop, keys=frozenset({"topic", "client"})),
        }

    def _subs(self, request: Request, _caller: Identity) -> list[Answer]:
        return [self._describe(one) for one in self._select(request)]

    async def _drop(self, request: Request, _caller: Identity) -> Answer:
        if "client" not in request:
            raise AdminError("bad_request", "pirate_drop needs a client")
        chosen = self._select(request)
        if not chosen:
            raise AdminError("not_found", "this client has no such subscription")
        done: asyncio.Future[list[PolybusError]] = asyncio.get_running_loop().create_future()
        self._require_durable()[0].drop(chosen, done.set_result)
        errors = await done
        if errors:
            raise AdminError(errors[0].code, str(errors[0]))
        return {"dropped": len(chosen)}

    def _require_durable(self) -> tuple[DurableSubscribers, DurableTopics]:
        durable = durable_bus(self._context.broker)
        if self._context.attached is None or durable is None:
            raise AdminError("not_supported", "the bus has no durable topics")
        return self._context.attached, durable.topics

    def _select(self, request: Request) -> list[Subscription]:
        subscribers, durable = self._require_durable()
        client, topic = _client_id(request), request.get("topic")
        number: int | None = None
        if topic is not None:
            found = durable.find(str(topic))
            if found is None:
                raise AdminError("not_found", f"no durable topic {str(topic)[:255]!r}")
            number = found.number
        return [
            one
            for one in subscribers.subscriptions()
            if (client is None or one.place.client == client)
            and (number is None or one.place.topic == number)
        ]

    def _describe(self, one: Subscription) -> Answer:
        _, durable = self._require_durable()
        topic = durable.find_by_number(one.place.topic)
        newest = durable.next_id(topic) - 1 if topic else one.last
        return {
            "topic": topic.name if topic else "",
            "client": one.place.client.hex(),
            "last": one.last,
            "behind": max(0, newest - one.last),
            "seen_s": round(time.monotonic() - one.seen_s, 1),
            "user": one.account,
        }


def _client_id(request: Request) -> bytes | None:
    """Return the client id of a request, which is in hex because it may be any bytes."""
    text = request.get("client")
    if text is None:
        return None
    try:
        return bytes.fromhex(str(text))
    except ValueError:
        raise AdminError("bad_request", "the client id must be in hex") from None
