"""GSB: services that register and call each other, over nng's PAIR protocol.

    from polybus import gsb

    async with gsb.connect() as bus: ...          # asyncio
    with gsb.blocking.connect() as bus: ...       # plain code

The names below are loaded at first use, so that the server, which needs only
the codec, and `polybus --help` do not pay for the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.lazy import lazy

if TYPE_CHECKING:
    from polybus.dialects.gsb import blocking
    from polybus.dialects.gsb.calling import Stream
    from polybus.dialects.gsb.client import Client, connect
    from polybus.dialects.gsb.listening import Broadcast, Subscription
    from polybus.dialects.gsb.options import ClientOptions
    from polybus.dialects.gsb.serving import Call
    from polybus.errors import ServiceFailed

__all__ = [
    "Broadcast",
    "Call",
    "Client",
    "ClientOptions",
    "ServiceFailed",
    "Stream",
    "Subscription",
    "blocking",
    "connect",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Broadcast": ".listening",
        "Call": ".serving",
        "Client": ".client",
        "ClientOptions": ".options",
        "ServiceFailed": "polybus.errors",
        "Stream": ".calling",
        "Subscription": ".listening",
        "blocking": ".blocking",
        "connect": ".client",
    },
)
