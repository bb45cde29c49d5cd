"""The stream below a client's link: dialling, frames out, packets in, its end.

Frames of one turn of the loop go out together. It never comes back: when it has ended,
`error` says why, and whoever waited on it gets `lost()`.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from abc import abstractmethod
from typing import cast

from polybus.dialects.gsb import sp
from polybus.dialects.gsb.intake import Intake, Packet
from polybus.dialects.gsb.options import ClientOptions
from polybus.errors import AddressError, BadFrame, ConnectionLost, PolybusError
from polybus.model.address import Address
from polybus.model.limits import KIB, MIB

# Over this, senders wait: enough to keep the socket busy while the next is encoded.
WRITE_HIGH_WATER_BYTES = 1 * MIB
# What stands around the data of a packet, at most: tags, lengths, address, ids.
AROUND_DATA_BYTES = 1 * KIB
# What a connection may bring at once: calls and broadcasts come with more around them than
# the bus received, other dialects' messages may be longer, and so much it holds for one of us.
MAX_RECEIVED_BYTES = 64 * MIB
# A peer whose host vanished is noticed after about 30 + 3 × 10 s of silence.
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
SCHEMES = ("tcp", "tls+tcp", "ipc", "unix")

CLOSED_BY_BUS = (
    "the bus closed the connection: it stopped, a limit was reached, or it was sent what it"
    " cannot accept (its log says which)"
)


class Wire(asyncio.BufferedProtocol):
    """See the top of the file. `error` is why it ended, None if we closed it ourselves."""

    def __init__(self, address: Address, options: ClientOptions) -> None:
        self.address = address
        self.options = options
        self.is_ipc = address.is_unix
        self.ended = asyncio.Event()
        self.error: PolybusError | None = None
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        most = max(MAX_RECEIVED_BYTES, options.max_packet_bytes + AROUND_DATA_BYTES)
        self._intake = Intake(self.is_ipc, most)
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._closing = False

    @abstractmethod
    def take(self, packets: list[Packet]) -> None:
        """What has come; `BadFrame` if it cannot be understood."""

    @abstractmethod
    def over(self) -> None:
        """It has ended."""

    @property
    def is_up(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    # --- writing

    def send(self, *frames: bytes) -> None:
        """Hand over frames; all of one turn go out together. `ConnectionLost` if it has ended."""
        if not self._out:
            if self._transport is None or self._transport.is_closing():
                raise self.lost()
            self._loop.call_soon(self._flush)
        self._out += frames
        self._out_bytes += len(frames[0]) if len(frames) == 1 else sum(map(len, frames))
        if self._out_bytes > WRITE_HIGH_WATER_BYTES:
            self._flush()

    def _flush(self) -> None:
        out, self._out, self._out_bytes = self._out, [], 0
        if out and self.is_up:
            assert self._transport is not None
            if len(out) == 1:
                self._transport.write(out[0])
            else:
                self._transport.writelines(out)

    @property
    def is_full(self) -> bool:
        return not self._writable.is_set()

    async def room(self) -> None:
        """Wait until there is room for more; `ConnectionLost` if the link ends first."""
        await self._writable.wait()
        if not self.is_up:
            raise self.lost()

    # --- its end

    def close(self) -> None:
        """End it once everything written has gone out."""
        self._flush()
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End it at once."""
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    def lost(self) -> PolybusError:
        """The error for whoever waited on this link."""
        if isinstance(self.error, BadFrame):
            return self.error
        return ConnectionLost(str(self.error or f"the connection to {self.address} is closed"))

    # --- reading, or not

    def read_on(self, wanted: bool) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    # --- what the event loop does with it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = stream = cast(asyncio.Transport, transport)
        stream.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        if not self.address.is_unix:
            for level, option, value in KEEPALIVE:
                stream.get_extra_info("socket").setsockopt(level, option, value)
        stream.write(sp.GREETING)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._intake.room()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self.take(self._intake.added(nbytes))
        except BadFrame as error:
            self.error = self.error or error
            if self._transport is not None:
                self._transport.abort()
        except ConnectionLost:
            pass  # it is about to end, and all are told then

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.error is None and not self._closing:
            reason = f" ({exc})" if exc else ""
            self.error = ConnectionLost(f"{self.address}: {CLOSED_BY_BUS}{reason}")
        self.ended.set()
        self._writable.set()
        self.over()


async def dial(wire: Wire) -> None:
    """Connect it to its address. Failures are OSErrors."""
    address, loop = wire.address, asyncio.get_running_loop()
    if address.scheme not in SCHEMES:
        raise AddressError(f"GSB is reached by tcp://, tls+tcp:// or ipc://, not {address}")
    if address.is_unix:
        await loop.create_unix_connection(lambda: wire, address.path)
        return
    tls = (wire.options.tls or ssl.create_default_context()) if address.is_encrypted else None
    await loop.create_connection(lambda: wire, address.host, address.port, ssl=tls)
