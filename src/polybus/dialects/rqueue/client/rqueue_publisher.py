"""The half of a client that publishes, and knows which of its writes the server has taken.

Writes are counted. An echo confirms those before it; a link that ends takes with it the
hope for the others, and the next `flush` says so.
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

# Frames are encoded in buffers of about this size: few writes, and early ones.
RUN_BYTES = 256 * KIB
# How many contents of an iterator are looked at together.
GROUP_MESSAGES = 4096


class Publisher:
    def __init__(self, lifeline: RqueueReconnector, options: ClientOptions) -> None:
        self._lifeline = lifeline
        self._options = options
        self._published = 0  # writes handed to a link
        self._confirmed = 0  # how many of them are known to have taken effect
        self._loss: str | None = None  # of the others, with a link
        self._lost_up_to = 0  # how many had been published when the last link ended

    async def publish_run(self, topic: bytes, group: Sequence[Buffer], place: int) -> int:
        """Publish some of the group, from this place on; up to which."""
        cap = self._options.max_payload
        data, after = encode_run(topic, group, place, cap, RUN_BYTES)
        if after == place:  # too large for one frame
            await self._in_parts(topic, group[place])
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
            await self.echo(await self._lifeline.wait_connected())
        except ConnectionLost:
            self._raise_loss()
            raise

    async def echo(self, link: RqueueConnection) -> None:
        published = self._published
        await link.echo(self._options.echo_timeout_s)
        self._confirmed = max(self._confirmed, published)

    def on_connection_end(self, link: RqueueConnection, *, tell: bool) -> None:
        if tell and self._published > self._confirmed:
            self._loss = str(link.make_loss_error())
        self._confirmed = self._lost_up_to = self._published

    def discard_logged_loss(self) -> None:
        """One after which more was published: it was logged then."""
        if self._published > self._lost_up_to:
            self._loss = None

    async def _in_parts(self, topic: bytes, content: Buffer) -> None:
        message_id = os.urandom(codec.MESSAGE_ID_BYTES)
        buffers = codec.publish_in_parts(topic, content, message_id, self._options.max_payload)
        link = await self._send(next(buffers))
        await link.drain()
        for data in buffers:
            # All on one link: on another the first parts would be missing.
            if not link.write(data):
                raise link.make_loss_error()
            self._published += 1
            await link.drain()

    async def _send(self, data: bytes) -> RqueueConnection:
        """Hand a buffer to the link that is up; which one it was."""
        while not (link := await self._lifeline.wait_connected()).write(data):
            await link.ended.wait()
        self._published += 1
        return link

    def _raise_loss(self) -> None:
        loss, self._loss = self._loss, None
        if loss is not None:
            raise ConnectionLost(f"publishes may be lost: {loss}")


def _groups(contents: Iterable[Buffer]) -> Iterator[Sequence[Buffer]]:
    """A list or tuple as it is; of anything else a few thousand at a time."""
    if isinstance(contents, list | tuple):
        yield contents
        return
    if isinstance(contents, bytes | bytearray | memoryview | str):
        raise TypeError("publish_many takes many contents; for one there is publish")
    items = iter(contents)
    while group := list(itertools.islice(items, GROUP_MESSAGES)):
        yield group
