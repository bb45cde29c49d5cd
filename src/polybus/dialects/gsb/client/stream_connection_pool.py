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
from polybus.dialects.gsb.client.gsb_connection import GsbConnection
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
        # Open streams per connection; 0 if it is idle.
        self._streams: Counter[GsbConnection] = Counter()
        self._dialling = 0
        self._closed = False
        self._room = asyncio.Event()

    @property
    def open_calls(self) -> int:
        return sum(len(connection.calls) for connection in self._streams)

    async def acquire(self) -> GsbConnection:
        """Return a connection for one more stream. The caller must `release` it."""
        while True:
            is_at_limit = len(self._streams) + self._dialling >= self._max_connections
            up = [connection for connection in self._streams if connection.is_up]
            least_used = min(up, key=self._streams.__getitem__, default=None)
            if least_used is not None and (not self._streams[least_used] or is_at_limit):
                self._streams[least_used] += 1
                return least_used
            if not is_at_limit:
                return await self._new()
            self._room.clear()  # all connections are being dialled
            await self._room.wait()

    def release(self, connection: GsbConnection) -> None:
        if connection not in self._streams:
            return
        self._streams[connection] -= 1
        idle = [other for other, count in self._streams.items() if not count]
        if connection in idle and len(idle) > MAX_IDLE:
            del self._streams[connection]
            connection.close()

    async def close(self) -> None:
        self._closed = True
        connections = list(self._streams)
        self._streams.clear()
        for connection in connections:
            connection.close()
        for connection in connections:
            await wait_closed(connection, CLOSE_TIMEOUT_S)

    async def _new(self) -> GsbConnection:
        self._dialling += 1
        try:
            connection = await self._dial(self._on_ended)
        except ConnectionLost as error:
            raise NotConnected(str(error)) from error
        finally:
            self._dialling -= 1
            self._room.set()
        if self._closed:  # while it was dialled: close() did not see it
            connection.abort()
            raise NotConnected("the client is closed")
        self._streams[connection] = 1
        return connection

    def _on_ended(self, connection: GsbConnection) -> None:
        self._streams.pop(connection, None)
        self._room.set()
