"""rqueue: push publish/subscribe over TCP, fast.

    from polybus import rqueue

    async with rqueue.connect() as client: ...          # asyncio
    with rqueue.blocking.connect() as client: ...       # plain code

The names below are loaded at first use, so that the server, which needs only
the codec, and `polybus --help` do not pay for the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.lazy import lazy

if TYPE_CHECKING:
    from polybus.dialects.rqueue import blocking
    from polybus.dialects.rqueue.client import Client, connect
    from polybus.dialects.rqueue.options import ClientOptions
    from polybus.dialects.rqueue.parts import PartLimits
    from polybus.kernel.notifications import Message, NotificationBatch

__all__ = [
    "Client",
    "ClientOptions",
    "Message",
    "NotificationBatch",
    "PartLimits",
    "blocking",
    "connect",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Client": ".client",
        "ClientOptions": ".options",
        "Message": "polybus.kernel.notifications",
        "NotificationBatch": "polybus.kernel.notifications",
        "PartLimits": ".parts",
        "blocking": ".blocking",
        "connect": ".client",
    },
)
