"""Waiting for a condition, never for a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from polybus.dialects.rqueue.client.client import Client
from polybus.dialects.rqueue.client.notification_batch import Message

PATIENCE_S = 20.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - conditions of the client, which has no events
            await asyncio.sleep(0.005)


async def receive(client: Client, count: int) -> list[Message]:
    """The next `count` messages."""
    got: list[Message] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(got) < count:
            got.append(await anext(client))
    return got


async def contents(client: Client, count: int) -> list[bytes]:
    return [message.content for message in await receive(client, count)]
