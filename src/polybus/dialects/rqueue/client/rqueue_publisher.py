"""The publishing side of an rqueue client, with the confirmation of its writes.

Writes are counted. An echo confirms the writes before it. Unconfirmed writes of a
connection that ends may be lost, and the next `flush` raises.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from polybus.dialects.rqueue import codec
from polybus.dialects.rqueue.client.notification_batch import encode_run
from polybus.errors import ConnectionLost
from polybus.model.limits import KIB

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.dialects.rqueue.client.client import ClientOptions
    from polybus.dialects.rqueue.client.rqueue_connection import RqueueConnection, RqueueReconnector

# Frames are encoded in buffers of about this size: few writes, and the first one early.
RUN_BYTES = 256 * KIB
# Contents taken from an iterator at once.
GROUP_MESSAGES = 4096


class Publisher:
    def __init__(self, reconnector: RqueueReconnector, options: ClientOptions) -> None:
        self._reconnector = reconnector
        self._options = options
        self._published = 0  # writes to any connection
        self._confirmed = 0  # how many of them took effect, or are lost
        self._loss: str | None = None  # why unconfirmed writes may be lost
        self._lost_up_to = 0  # value of _published when the last connection ended

    async def publish_run(self, topic: bytes, group: Sequence[Buffer], place: int) -> int:
        """Publish some messages of the group. Returns the place after the last one."""
        cap = self._options.max_payload
        data, after = encode_run(topic, group, place, cap, RUN_BYTES)
        if after == place:  # too large for one frame
            await self._publish_in_parts(topic, group[place])
            return place + 1
        await (await self._send(data)).drain()
        return after

    async def publish_many(self, topic: bytes, contents: Iterable[Buffer]) -> None:
        for group in _groups(contents):
            place = 0
            while place < len(group):
                place = await self.publish_run(topic, group, place)

    async def flush(self) -> None:
        self._raise_loss()
        if self._published == self._confirmed:
            return
        try:
            await self.echo(await self._reconnector.wait_connected())
        except ConnectionLost:
            self._raise_loss()
            raise

    async def echo(self, connection: RqueueConnection) -> None:
        published = self._published
        await connection.echo(self._options.echo_timeout_s)
        self._confirmed = max(self._confirmed, published)

    def on_connection_end(self, connection: RqueueConnection, *, report: bool) -> None:
        if report and self._published > self._confirmed:
            self._loss = str(connection.make_loss_error())
        self._confirmed = self._lost_up_to = self._published

    def discard_logged_loss(self) -> None:
        """Forget a loss after which more was published: it was logged at its time."""
        if self._published > self._lost_up_to:
            self._loss = None

    async def _publish_in_parts(self, topic: bytes, content: Buffer) -> None:
        message_id = os.urandom(codec.MESSAGE_ID_BYTES)
        buffers = codec.publish_in_parts(topic, content, message_id, self._options.max_payload)
        connection = await self._send(next(buffers))
        await connection.drain()
        for data in buffers:
            # All parts on one connection: a new one would lack the first parts.
            if not connection.write(data):
                raise connection.make_loss_error()
            self._published += 1
            await connection.drain()

    async def _send(self, data: bytes) -> RqueueConnection:
        """Write a buffer to the connection that is up. Returns that connection."""
        while not (connection := await self._reconnector.wait_connected()).write(data):
            await connection.ended.wait()
        self._published += 1
        return connection

    def _raise_loss(self) -> None:
        loss, self._loss = self._loss, None
        if loss is not None:
            raise ConnectionLost(f"publishes may be lost: {loss}")


def _groups(contents: Iterable[Buffer]) -> Iterator[Sequence[Buffer]]:
    """Yield a list or tuple as it is, and other iterables in groups."""
    if isinstance(contents, list | tuple):
        yield contents
        return
    if isinstance(contents, bytes | bytearray | memoryview | str):
        raise TypeError("contents must be an iterable of contents; use publish for a single one")
    items = iter(contents)
    while group := list(itertools.islice(items, GROUP_MESSAGES)):
        yield group
