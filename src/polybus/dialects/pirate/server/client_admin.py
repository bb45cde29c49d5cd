"""Admin actions for pirate's clients: list them, and remove one.

A client is a record, not a connection: it exists from its first HELLO until it is removed
here, and counts against `max_clients` all the time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from polybus.bus.admin_verb import AdminError, AdminVerb, Request
from polybus.bus.dialect import ServerContext
from polybus.dialects.pirate.client_id import MAX_ID_BYTES
from polybus.dialects.pirate.server import subscriber_records
from polybus.dialects.pirate.server.durable_subscribers import DurableSubscribers
from polybus.dialects.pirate.server.subscriber_records import COUNTERS, HelloHistory
from polybus.durable.durable_bus import durable_bus
from polybus.errors import DoesNotExist, PolybusError
from polybus.model.identity import Identity
from polybus.store.contract import Store

PAGE_CLIENTS: Final = 500  # of one answer; reading them takes a few milliseconds

Answer = dict[str, Any]


class ClientAdmin:
    """The verbs. `context.attached` has the subscribers once the store is open."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def verbs(self) -> Mapping[str, AdminVerb]:
        return {
            "pirate_clients": AdminVerb(self._list, keys=frozenset({"after"})),
            "pirate_client_rm": AdminVerb(self._remove, keys=frozenset({"client"})),
        }

    async def _list(self, request: Request, _caller: Identity) -> Answer:
        """Return a page of clients, and the id after which the next page begins."""
        subscribers, store = self._require_durable()
        after = _parse_id(request["after"]) if request.get("after") else b""
        subscriptions = Counter(one.key.client for one in subscribers.table)
        rows = await asyncio.to_thread(_read_page, store, after)
        for row in rows:
            row["subscriptions"] = subscriptions[bytes.fromhex(row["client"])]
        return {"clients": rows, "next": rows[-1]["client"] if len(rows) == PAGE_CLIENTS else None}

    async def _remove(self, request: Request, caller: Identity) -> Answer:
        """Remove a client and its subscriptions. A client that runs is fenced by this."""
        subscribers, _ = self._require_durable()
        client = _parse_id(request.get("client"))
        chosen = [one for one in subscribers.table if one.key.client == client]
        loop = asyncio.get_running_loop()
        dropped: asyncio.Future[list[PolybusError]] = loop.create_future()
        subscribers.drop(chosen, dropped.set_result)
        removed: asyncio.Future[str | PolybusError] = loop.create_future()
        for error in await dropped:
            raise AdminError(error.code, str(error))
        subscribers.clients.remove(client, removed.set_result)
        account = await removed
        if isinstance(account, DoesNotExist):
            raise AdminError("not_found", str(account))
        if isinstance(account, PolybusError):
            raise AdminError(account.code, str(account))
        self._context.log.info("client removed", client=client.hex(), by=caller.name)
        return {"user": account, "subscriptions": len(chosen)}

    def _require_durable(self) -> tuple[DurableSubscribers, Store]:
        durable = durable_bus(self._context.broker)
        if self._context.attached is None or durable is None:
            raise AdminError("not_supported", "the bus has no durable topics")
        return self._context.attached, durable.topics.store


def _parse_id(text: object) -> bytes:
    try:
        client = bytes.fromhex(str(text))  # in hex, because an id may be any bytes
    except ValueError:
        client = b""
    if not 1 <= len(client) <= MAX_ID_BYTES:
        raise AdminError("bad_request", "the client id must be in hex")
    return client


def _read_page(store: Store, after: bytes) -> list[Answer]:
    """Read up to PAGE_CLIENTS clients after an id, in the order of their ids. Blocks."""
    rows = []
    start = COUNTERS + after if after else b""
    for record in store.scan(COUNTERS, start, PAGE_CLIENTS):
        client = record.key[len(COUNTERS) :]
        producer = store.look_up_producer(subscriber_records.producer_name(client))
        rows.append(
            {
                "client": client.hex(),
                "user": subscriber_records.read_account(store, client),
                "epoch": HelloHistory.decode(record.value).newest,
                "counter": producer.last_counter if producer else 0,
            }
        )
    return rows
