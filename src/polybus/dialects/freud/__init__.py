"""Freud: ephemeral topics on a Unix socket, read at each subscriber's own pace.

    from polybus import freud

    async with freud.connect() as client: ...          # asyncio
    with freud.blocking.connect() as client: ...       # plain code

The names below are loaded at first use, so that the server, which needs only
the codec, and `polybus --help` do not pay for the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from polybus.dialects.freud.client import freud_blocking as blocking
    from polybus.dialects.freud.client.answer_batch import Record
    from polybus.dialects.freud.client.client import Client, ClientOptions, connect
    from polybus.dialects.freud.client.pull_subscription import Subscription
    from polybus.dialects.freud.codec import Code

__all__ = [
    "Client",
    "ClientOptions",
    "Code",
    "Record",
    "Subscription",
    "blocking",
    "connect",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Client": ".client.client",
        "ClientOptions": ".client.client",
        "Code": ".codec",
        "Record": "polybus.dialects.freud.client.answer_batch",
        "Subscription": ".client.pull_subscription",
        "connect": ".client.client",
    },
    modules={"blocking": ".client.freud_blocking"},
)
