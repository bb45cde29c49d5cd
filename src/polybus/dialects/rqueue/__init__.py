"""rqueue: push publish/subscribe over TCP, fast.

    from polybus import rqueue

    async with rqueue.connect() as client: ...          # asyncio
    with rqueue.blocking.connect() as client: ...       # plain code

The names below are loaded at first use, so that the server, which needs only
the codec, and `polybus --help` do not pay for the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from polybus.dialects.rqueue.client import rqueue_blocking as blocking
    from polybus.dialects.rqueue.client.client import Client, ClientOptions, connect
    from polybus.dialects.rqueue.client.notification_batch import Message, NotificationBatch
    from polybus.dialects.rqueue.parts import PartLimits

__all__ = [
    "Client",
    "ClientOptions",
    "Message",
    "NotificationBatch",
    "PartLimits",
    "blocking",
    "connect",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Client": ".client.client",
        "ClientOptions": ".client.client",
        "Message": "polybus.dialects.rqueue.client.notification_batch",
        "NotificationBatch": "polybus.dialects.rqueue.client.notification_batch",
        "PartLimits": ".parts",
        "connect": ".client.client",
    },
    modules={"blocking": ".client.rqueue_blocking"},
)
