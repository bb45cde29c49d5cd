"""Freud: ephemeral topics on a Unix socket, read at each subscriber's own pace.

    from polybus import freud

    async with freud.connect() as client: ...          # asyncio
    with freud.blocking.connect() as client: ...       # plain code

The names below are loaded at first use, so that the server, which needs only
the codec, and `polybus --help` do not pay for the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.lazy import lazy

if TYPE_CHECKING:
    from polybus.dialects.freud import blocking
    from polybus.dialects.freud.client import Client, connect
    from polybus.dialects.freud.codec import Code
    from polybus.dialects.freud.options import ClientOptions
    from polybus.dialects.freud.subscription import Subscription
    from polybus.kernel.freud_client import Record

__all__ = [
    "Client",
    "ClientOptions",
    "Code",
    "Record",
    "Subscription",
    "blocking",
    "connect",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Client": ".client",
        "ClientOptions": ".options",
        "Code": ".codec",
        "Record": "polybus.kernel.freud_client",
        "Subscription": ".subscription",
        "blocking": ".blocking",
        "connect": ".client",
    },
)
