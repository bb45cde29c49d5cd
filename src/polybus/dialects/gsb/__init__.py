"""GSB: services that register and call each other, over nng's PAIR protocol.

    from polybus import gsb

    async with gsb.connect() as bus: ...          # asyncio
    with gsb.blocking.connect() as bus: ...       # plain code

The names below are imported on first use, because the server and `polybus --help` do not need
the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from polybus.dialects.gsb.client import gsb_blocking as blocking
    from polybus.dialects.gsb.client.broadcast_subscription import Broadcast, Subscription
    from polybus.dialects.gsb.client.client import Client, connect
    from polybus.dialects.gsb.client.gsb_options import ClientOptions
    from polybus.dialects.gsb.client.outgoing_call import Stream
    from polybus.dialects.gsb.client.service_host import Call
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

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Broadcast": ".client.broadcast_subscription",
        "Call": ".client.service_host",
        "Client": ".client.client",
        "ClientOptions": ".client.gsb_options",
        "ServiceFailed": "polybus.errors",
        "Stream": ".client.outgoing_call",
        "Subscription": ".client.broadcast_subscription",
        "connect": ".client.client",
    },
    modules={"blocking": ".client.gsb_blocking"},
)
