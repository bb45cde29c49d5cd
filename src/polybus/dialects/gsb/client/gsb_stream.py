"""The stream below a client's link: dialling, frames out, packets in, its end.

Frames of one turn of the loop go out together. It never comes back: when it has ended,
`error` says why, and whoever waited on it gets `lost()`.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod

from polybus.clients import client_connection
from polybus.clients.client_connection import WRITE_HIGH_WATER_BYTES
from polybus.dialects.gsb import sp
from polybus.dialects.gsb.client.gsb_options import ClientOptions
from polybus.dialects.gsb.client.packet_reader import Packet, PacketReader
from polybus.errors import AddressError, BadFrame, ConnectionLost
from polybus.model.address import Address
from polybus.model.limits import KIB, MIB

# What stands around the data of a packet, at most: tags, lengths, address, ids.
PACKET_OVERHEAD_BYTES = 1 * KIB
# What a connection may bring at once: calls and broadcasts come with more around them than
# the bus received, other dialects' messages may be longer, and so much it holds for one of us.
MAX_RECEIVED_BYTES = 64 * MIB
SCHEMES = ("tcp", "tls+tcp", "ipc", "unix")

CLOSED_BY_BUS = (
    "the bus closed the connection: it stopped, a limit was reached, or it was sent what it"
    " cannot accept (its log says which)"
)


class GsbStream(client_connection.ClientConnection):
    """See the top of the file."""

    closed_by_peer = CLOSED_BY_BUS

    def __init__(self, address: Address, options: ClientOptions) -> None:
        super().__init__(address)
        self.options = options
        self.is_ipc = address.is_unix
        self._loop = asyncio.get_running_loop()
        most = max(MAX_RECEIVED_BYTES, options.max_packet_bytes + PACKET_OVERHEAD_BYTES)
        self._intake = PacketReader(self.is_ipc, most)
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._writable = asyncio.Event()
        self._writable.set()

    @abstractmethod
    def on_packets(self, packets: list[Packet]) -> None:
        """What has come; `BadFrame` if it cannot be understood."""

    # --- writing

    def send(self, *frames: bytes) -> None:
        """Hand over frames; all of one turn go out together. `ConnectionLost` if it has ended."""
        if not self._out:
            if self._transport is None or self._transport.is_closing():
                raise self.make_loss_error()
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

    async def wait_room(self) -> None:
        """Wait until there is room for more; `ConnectionLost` if the link ends first."""
        await self._writable.wait()
        if not self.is_up:
            raise self.make_loss_error()

    # --- its end

    def close(self) -> None:
        """End it once everything written has gone out."""
        self._flush()
        super().close()

    # --- reading, or not

    def set_reading(self, wanted: bool) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    # --- what the event loop does with it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self._transport is not None
        self._transport.write(sp.GREETING)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._intake.free_space()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self.on_packets(self._intake.on_bytes(nbytes))
        except BadFrame as error:
            self.abort_with(error)
        except ConnectionLost:
            pass  # it is about to end, and all are told then

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        super().connection_lost(exc)


async def dial(one: GsbStream) -> None:
    """Connect it to its address. Failures are OSErrors."""
    if one.address.scheme not in SCHEMES:
        raise AddressError(f"GSB is reached by tcp://, tls+tcp:// or ipc://, not {one.address}")
    await client_connection.connect(one, one.options.tls)
