"""Connections for streams: each stream has one to itself, as long as there are enough.

What a connection brings comes in one order. A stream that its reader does not take
must stop somewhere, and what stops is the connection: a call whose answer lies behind
would wait for the reader of the stream, who may be waiting for the call. So streams do
not share a connection with calls, nor with each other, up to `stream_connections` of
them; beyond that they share, and one that is not read while others wait is cut when it
holds too much (unread.py).

A lane is dialled when a stream needs it, used again by the next, and closed when a few
others are idle as well. It never comes back when it is lost: its streams are told.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from polybus.clients.reconnector import CLOSE_TIMEOUT_S, wait_closed
from polybus.dialects.gsb.client.gsb_connection import GsbConnection
from polybus.dialects.gsb.client.packet_reader import Packet
from polybus.errors import ConnectionLost, NotConnected

# Kept open for the next streams; dialling one anew takes about a millisecond.
MAX_IDLE = 2


class StreamConnectionPool:
    """See the top of the file. `dial` makes a link that was introduced to the bus."""

    def __init__(
        self, dial: Callable[[Callable[[GsbConnection], None]], Awaitable[GsbConnection]], most: int
    ) -> None:
        self._dial = dial
        self._most = most
        self._streams: Counter[GsbConnection] = Counter()  # of each link; 0: it is idle
        self._dialling = 0
        self._closed = False
        self._room = asyncio.Event()

    @property
    def open_calls(self) -> int:
        return sum(len(link.calls) for link in self._streams)

    async def acquire(self) -> GsbConnection:
        """A link for one more stream; `give_back` it."""
        while True:
            link = self._least_used()
            if link is not None and (not self._streams[link] or self._is_at_limit()):
                self._streams[link] += 1
                return link
            if not self._is_at_limit():
                return await self._new()
            self._room.clear()  # all of them are being dialled
            await self._room.wait()

    def release(self, link: GsbConnection) -> None:
        if link not in self._streams:
            return
        self._streams[link] -= 1
        idle = [one for one, streams in self._streams.items() if not streams]
        if link in idle and len(idle) > MAX_IDLE:
            del self._streams[link]
            link.close()

    async def close(self) -> None:
        self._closed = True
        links = list(self._streams)
        self._streams.clear()
        for link in links:
            link.close()
        for link in links:
            await wait_closed(link, CLOSE_TIMEOUT_S)

    async def _new(self) -> GsbConnection:
        self._dialling += 1
        try:
            link = await self._dial(self._ended)
        except ConnectionLost as error:
            raise NotConnected(str(error)) from error
        finally:
            self._dialling -= 1
            self._room.set()
        if self._closed:  # meanwhile: nobody else would end it
            link.abort()
            raise NotConnected("the client is closed")
        self._streams[link] = 1
        return link

    def _least_used(self) -> GsbConnection | None:
        up = [link for link in self._streams if link.is_up]
        return min(up, key=self._streams.__getitem__, default=None)

    def _is_at_limit(self) -> bool:
        return len(self._streams) + self._dialling >= self._most

    def _ended(self, link: GsbConnection) -> None:
        self._streams.pop(link, None)
        self._room.set()


class NoServices:
    """On a lane nobody is called: that is an error of the bus, and does no harm."""

    def __len__(self) -> int:
        return 0

    def on_request(self, request: Packet) -> None: ...
    def run_queued(self) -> None: ...
    def credit(self, request_id: bytes, replies: int) -> None: ...
    def cancel(self, request_id: bytes) -> None: ...
