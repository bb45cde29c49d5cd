"""Pirate: durable topics on ZeroMQ; subscribers get everything they missed, once, in order.

    from polybus import pirate

    async with pirate.connect() as client: ...          # asyncio
    with pirate.blocking.connect() as client: ...       # plain code

The names below are loaded at first use, so that the server, which needs only
the codec, and `polybus --help` do not pay for the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.lazy import lazy

if TYPE_CHECKING:
    from polybus.dialects.pirate import blocking
    from polybus.dialects.pirate.asking import Fate
    from polybus.dialects.pirate.client import Client, connect
    from polybus.dialects.pirate.options import ClientOptions, Order
    from polybus.dialects.pirate.reading import Message
    from polybus.dialects.pirate.state import Outcome, Pending

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

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Client": ".client",
        "ClientOptions": ".options",
        "Fate": ".asking",
        "Message": ".reading",
        "Order": ".options",
        "Outcome": ".state",
        "Pending": ".state",
        "blocking": ".blocking",
        "connect": ".client",
    },
)
