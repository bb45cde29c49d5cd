"""Pirate: durable topics on ZeroMQ; subscribers get each message once, in order.

    from polybus import pirate

    async with pirate.connect() as client: ...          # asyncio
    with pirate.blocking.connect() as client: ...       # plain code

The names below are imported on first use, because the server and `polybus --help` do not need
the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from polybus.dialects.pirate.client import pirate_blocking as blocking
    from polybus.dialects.pirate.client.client import Client, connect
    from polybus.dialects.pirate.client.journal_state import Outcome, Pending
    from polybus.dialects.pirate.client.pirate_options import ClientOptions, Order
    from polybus.dialects.pirate.client.requester import Fate, Message

__all__ = [
    "Client",
    "ClientOptions",
    "Fate",
    "Message",
    "Order",
    "Outcome",
    "Pending",
    "blocking",
    "connect",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Client": ".client.client",
        "ClientOptions": ".client.pirate_options",
        "Fate": ".client.requester",
        "Message": ".client.requester",
        "Order": ".client.pirate_options",
        "Outcome": ".client.journal_state",
        "Pending": ".client.journal_state",
        "connect": ".client.client",
    },
    modules={"blocking": ".client.pirate_blocking"},
)
