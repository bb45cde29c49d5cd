"""FDQ: sharded, replayable queues over durable topics, with consumer groups.

    from polybus import fdq

    with fdq.Producer() as producer:
        producer.produce("orders", "customer-7", b"…")

    consumer = fdq.Consumer()
    consumer.consume("orders", "billing-1", handle)     # returns at once
    consumer.wait()

A URL is `polybus://HOST:PORT` (a running bus), `lmdb:PATH` or `memory:` (a bus inside
this process, shared by all of its clients with the same URL). The async clients are in
`fdq.aio`. The names below are imported at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from polybus.dialects.fdq import aio
    from polybus.dialects.fdq.client.consumer import Consumer
    from polybus.dialects.fdq.client.envelope import Envelope, MessageRequest
    from polybus.dialects.fdq.client.group_admin import reset, reshard, stats
    from polybus.dialects.fdq.client.producer import Producer
    from polybus.dialects.fdq.client.topic_replay import replay
    from polybus.dialects.fdq.client.transaction import Transaction

__all__ = [
    "Consumer",
    "Envelope",
    "MessageRequest",
    "Producer",
    "Transaction",
    "aio",
    "replay",
    "reset",
    "reshard",
    "stats",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Consumer": ".client.consumer",
        "Envelope": ".client.envelope",
        "MessageRequest": ".client.envelope",
        "Producer": ".client.producer",
        "Transaction": ".client.transaction",
        "replay": ".client.topic_replay",
        "reset": ".client.group_admin",
        "reshard": ".client.group_admin",
        "stats": ".client.group_admin",
    },
    modules={"aio": ".aio"},
)
