"""A pool of connections for streams: one per stream, up to `stream_connections`.

Packets of a connection arrive in one order. A stream whose reader is slow stops its connection,
and with it every call whose reply comes later; a reader that waits for such a call would wait
forever. So streams share a connection neither with calls nor with each other. Beyond
`stream_connections` they share, and a stream that is not read while others wait is cut when it
holds too many bytes (`ReceiveBudget`).

A connection is dialled when a stream needs it, used again by the next stream, and closed if
more than MAX_IDLE are idle. A lost connection is not dialled again: its streams fail.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from polybus.clients.reconnector import CLOSE_TIMEOUT_S, wait_closed
from polybus.dialects.gsb.client.gsb_connection import GsbConnection, Packet
from polybus.errors import ConnectionLost, NotConnected

# Kept open for the next streams; dialling takes about a millisecond.
MAX_IDLE = 2


class StreamConnectionPool:
    """`dial` must return a connection whose handshake is complete."""

    def __init__(
        self,
        dial: Callable[[Callable[[GsbConnection], None]], Awaitable[GsbConnection]],
        max_connections: int,
    ) -> None:
        self._dial = dial
        self._max_connections = max_connections
        self._streams: Counter[GsbConnection] = (
            Counter()
        )  # open streams per connection; 0 if it is idle
        self._dialling = 0
        self._closed = False
        self._room = asyncio.Event()

    @property
    def open_calls(self) -> int:
        return sum(len(link.calls) for link in self._streams)

    async def acquire(self) -> GsbConnection:
        """Return a connection for one more stream. The caller must `release` it."""
        while True:
            link = self._least_used()
            if link is not None and (not self._streams[link] or self._is_at_limit()):
                self._streams[link] += 1
                return link
            if not self._is_at_limit():
                return await self._new()
            self._room.clear()  # all connections are being dialled
            await self._room.wait()

    def release(self, link: GsbConnection) -> None:
        if link not in self._streams:
            return
        self._streams[link] -= 1
        idle = [connection for connection, count in self._streams.items() if not count]
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
        if self._closed:  # while it was dialled: close() did not see it
            link.abort()
            raise NotConnected("the client is closed")
        self._streams[link] = 1
        return link

    def _least_used(self) -> GsbConnection | None:
        up = [link for link in self._streams if link.is_up]
        return min(up, key=self._streams.__getitem__, default=None)

    def _is_at_limit(self) -> bool:
        return len(self._streams) + self._dialling >= self._max_connections

    def _ended(self, link: GsbConnection) -> None:
        self._streams.pop(link, None)
        self._room.set()


class NoServices:
    """Ignores calls: a stream connection has no services."""

    def __len__(self) -> int:
        return 0

    def on_request(self, request: Packet) -> None: ...
    def run_queued(self) -> None: ...
    def credit(self, request_id: bytes, replies: int) -> None: ...
    def cancel(self, request_id: bytes) -> None: ...
