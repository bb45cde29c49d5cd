"""FDQ for asyncio. What would block runs on threads; the loop only waits for outcomes.

async with fdq.aio.Producer() as producer:
    await producer.produce("orders", "customer-7", b"…")
async for envelope in fdq.aio.replay(None, "orders"): ...
"""

from __future__ import annotations

import asyncio
from typing import Any

from polybus.dialects.fdq.client import group_admin
from polybus.dialects.fdq.client.aio_consumer import Consumer
from polybus.dialects.fdq.client.aio_producer import Producer
from polybus.dialects.fdq.client.aio_replay import Replay, replay

__all__ = ["Consumer", "Producer", "Replay", "replay", "reset", "stats"]


async def stats(url: str | None, topic: str, **settings: Any) -> dict[str, Any]:
    """As `fdq.stats`."""
    return await asyncio.to_thread(group_admin.stats, url, topic, **settings)


async def reset(
    url: str | None, topic: str, group: str = "default", **settings: Any
) -> dict[str, Any]:
    """As `fdq.reset`."""
    return await asyncio.to_thread(group_admin.reset, url, topic, group, **settings)
