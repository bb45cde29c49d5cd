"""What the connections of all stream clients have in common: dialling, and their end.

A connection never comes back: when it has ended, `error` says why, and whoever waited on it
gets `lost()`. What is written and read on it is the dialect's, in a class below.
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

# Over this, senders wait: enough to keep the socket busy while the next buffer is encoded.
WRITE_HIGH_WATER_BYTES = 1 * MIB
# A peer whose host vanished is noticed after about 30 + 3 × 10 s of silence.
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class ClientConnection(asyncio.BufferedProtocol):
    """See the top of the file. `error` is why it ended, None if we closed it ourselves."""

    # What it may mean if the other end hangs up.
    closed_by_peer: ClassVar[str]

    def __init__(self, address: Address) -> None:
        self.address = address
        self.ended = asyncio.Event()
        self.error: PolybusError | None = None
        self._transport: asyncio.Transport | None = None
        self._closing = False

    @abstractmethod
    def on_ended(self) -> None:
        """It has ended, and `ended` is set: tell all who wait."""

    @property
    def is_up(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """End it once everything written has gone out."""
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End it at once."""
        self._closing = True
        self._drop()

    def abort_with(self, error: PolybusError) -> None:
        """End it at once, because of what has come."""
        self.error = self.error or error
        self._drop()

    def make_loss_error(self) -> PolybusError:
        """The error for whoever waited on it."""
        if isinstance(self.error, BadFrame):
            return self.error
        ours = f"the connection to {self.address} is closed"
        return ConnectionLost(str(self.error or (ours if self._closing else self._hung_up())))

    # --- what the event loop does with it

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

    # --- inside

    def _hung_up(self) -> str:
        return f"{self.address}: {self.closed_by_peer}"

    def _drop(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def connect(wire: ClientConnection, tls: ssl.SSLContext | None) -> None:
    """Connect it to its address. Failures are OSErrors."""
    address, loop = wire.address, asyncio.get_running_loop()
    if address.is_unix:
        await loop.create_unix_connection(lambda: wire, address.path)
        return
    secure = (tls or ssl.create_default_context()) if address.is_encrypted else None
    await loop.create_connection(lambda: wire, address.host, address.port, ssl=secure)
