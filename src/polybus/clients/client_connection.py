"""The base of client connections over streams: connecting, closing, and the end.

A connection is never reopened. When it has ended, `error` is the reason, and waiting calls
raise `make_loss_error()`. Reading and writing are up to the dialect's subclass.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from abc import abstractmethod
from typing import ClassVar, cast

from polybus.errors import BadFrame, ConnectionLost, PolybusError
from polybus.model.address import Address
from polybus.model.limits import MIB

# Senders wait above this: enough to keep the socket busy while the next buffer is encoded.
WRITE_HIGH_WATER_BYTES = 1 * MIB
# A peer whose host has vanished is detected after about 30 + 3 × 10 s of silence.
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class ClientConnection(asyncio.BufferedProtocol):
    """Base of client connections. `error` is why it ended, None if the client closed it."""

    # Text for a connection that the peer closed: its possible causes.
    closed_by_peer: ClassVar[str]

    def __init__(self, address: Address) -> None:
        self.address = address
        self.ended = asyncio.Event()
        self.error: PolybusError | None = None
        self._transport: asyncio.Transport | None = None
        self._closing = False

    @abstractmethod
    def on_ended(self) -> None:
        """Fail the waiting calls. Called once, after `ended` is set."""

    @property
    def is_up(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Close the connection once all written bytes are sent."""
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    def abort_with(self, error: PolybusError) -> None:
        """Close the connection at once because of an error in received data."""
        # The first error is the cause; later frames of the same buffer may fail after it.
        self.error = self.error or error
        if self._transport is not None:
            self._transport.abort()

    def make_loss_error(self) -> PolybusError:
        """Return the error for calls that waited on the connection."""
        if isinstance(self.error, BadFrame):
            return self.error
        closed = f"the connection to {self.address} is closed"
        return ConnectionLost(str(self.error or (closed if self._closing else self._hung_up())))

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = stream = cast(asyncio.Transport, transport)
        stream.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        if not self.address.is_unix:
            for level, option, value in KEEPALIVE:
                stream.get_extra_info("socket").setsockopt(level, option, value)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.error is None and not self._closing:
            self.error = ConnectionLost(self._hung_up() + (f" ({exc})" if exc else ""))
        self.ended.set()
        self.on_ended()

    def _hung_up(self) -> str:
        return f"{self.address}: {self.closed_by_peer}"


async def connect(connection: ClientConnection, tls: ssl.SSLContext | None) -> None:
    """Connect to the connection's address. Raises OSError."""
    address, loop = connection.address, asyncio.get_running_loop()
    if address.is_unix:
        await loop.create_unix_connection(lambda: connection, address.path)
        return
    secure = (tls or ssl.create_default_context()) if address.is_encrypted else None
    await loop.create_connection(lambda: connection, address.host, address.port, ssl=secure)
