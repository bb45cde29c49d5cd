"""One connection of a client to a GSB bus: dialling, frames, packets, and their receivers.

A connection gives replies to the calls that wait for them, requests to the services, and
everything else to the caller that asked for it. When it ends, every waiting caller gets an
error with the reason, and the client dials a new one: a connection never comes back.

Bytes that the program has not read are bounded by `ReceiveBudget`. Frames that are sent within
one turn of the loop are written together.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

from polybus.clients import client_connection
from polybus.clients.client_connection import WRITE_HIGH_WATER_BYTES
from polybus.dialects.gsb import codec, sp
from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.client.gsb_options import ClientOptions
from polybus.dialects.gsb.client.packet_scanner import (
    REPLY,
    REQUEST,
    encode_call,
    encode_reply,
    read_packet,
    scan,
)
from polybus.errors import (
    AddressError,
    BadFrame,
    ConnectionLost,
    LimitReached,
    NotConnected,
    PolybusError,
    TooLarge,
)
from polybus.model.address import Address
from polybus.model.limits import KIB, MIB

if TYPE_CHECKING:
    from typing_extensions import Buffer


class BudgetHolder(Protocol):
    """A call that holds received and unread bytes, and can be ended with an error."""

    held_bytes: int

    def fail(self, error: PolybusError) -> None: ...


class ReceiveBudget:
    """The received bytes of a connection that its program has not read.

    Over `max_unread_bytes` the connection is not read, so that back-pressure reaches the bus and
    the service. Exception: if something else is awaited on the connection, the program may read
    only after it has that, so not reading would be a deadlock. Then the connection is read, and
    over `cut_unread_bytes` the call with the most unread bytes is cut.

    `set_reading` starts and stops reading. `cut` cancels a call.
    """

    def __init__(
        self,
        max_bytes: int,
        cut_bytes: int,
        is_awaited: Callable[[], bool],
        set_reading: Callable[[bool], None],
        cut: Callable[[BudgetHolder], None],
    ) -> None:
        self._max_bytes = max_bytes
        self._cut_bytes = cut_bytes
        self._is_awaited = is_awaited
        self._set_reading = set_reading
        self._cut = cut
        self._held_bytes = 0
        self._holders: set[BudgetHolder] = set()
        self._reading = True

    @property
    def is_over(self) -> bool:
        return self._held_bytes > self._max_bytes

    def charge(self, holder: BudgetHolder, nbytes: int) -> None:
        holder.held_bytes += nbytes
        self._held_bytes += nbytes
        self._holders.add(holder)

    def release(self, holder: BudgetHolder) -> None:
        """Release all bytes of a holder: they were read or dropped."""
        self._held_bytes -= holder.held_bytes
        holder.held_bytes = 0
        self._holders.discard(holder)
        self.on_wait()

    def on_wait(self) -> None:
        """Resume reading if a caller now waits for a packet that may be in the socket."""
        if not self._reading:
            self.update_reading()

    def update_reading(self) -> None:
        wanted = not self.is_over or self._is_awaited()
        if wanted and self._held_bytes > self._cut_bytes:
            self._cut_fullest()
        if wanted != self._reading:
            self._reading = wanted
            self._set_reading(wanted)

    def _cut_fullest(self) -> None:
        fullest = max(self._holders, key=lambda holder: holder.held_bytes)
        fullest.fail(LimitReached("cut_unread_bytes", "too many received bytes were not read"))
        self._cut(fullest)
        self.release(fullest)


# The size of one read. More gains nothing, less costs system calls.
READ_BUFFER_BYTES = 256 * KIB

# A packet as packet_scanner.pyx returns it: a tuple that begins with the kind.
Packet = tuple[Any, ...]


class PacketReader:
    """Splits received bytes into packets.

    Bytes are written to `free_space`; `on_bytes` returns the packets that are complete. One
    buffer is read into and scanned again and again. A packet larger than that gets a buffer of
    its own, which the rest of it is received into, so that its data is not copied.

    `on_bytes` raises `BadFrame` if the stream is invalid.
    """

    def __init__(self, is_ipc: bool, max_packet_bytes: int) -> None:
        self._is_ipc = is_ipc
        self._max_packet_bytes = max_packet_bytes
        self._greeted = False
        self._main = bytearray(READ_BUFFER_BYTES)
        self._view = memoryview(self._main)
        self._is_large = False  # the buffer is that of one large packet
        self._filled = 0

    def free_space(self) -> memoryview:
        return self._view[self._filled :]

    def on_bytes(self, nbytes: int) -> list[Packet]:
        self._filled += nbytes
        if self._is_large:
            return self._large_packet()
        return self._packets() if self._greeted or self._check_greeting() else []

    def _check_greeting(self) -> bool:
        size = len(sp.GREETING)
        sp.check_greeting(bytes(self._main[: min(self._filled, size)]))
        if self._filled < size:
            return False
        self._compact(size)
        self._greeted = True
        return self._filled > 0

    def _packets(self) -> list[Packet]:
        try:
            consumed, packets, wanted = scan(
                self._main, 0, self._filled, self._is_ipc, self._max_packet_bytes
            )
        except ValueError as error:
            raise BadFrame(str(error)) from None
        if consumed:
            self._compact(consumed)
        if wanted > READ_BUFFER_BYTES:
            self._grow(wanted)
        return packets

    def _compact(self, consumed: int) -> None:
        """Remove the first `consumed` bytes."""
        rest = self._filled - consumed
        if rest:
            self._view[:rest] = self._view[consumed : self._filled]
        self._filled = rest

    def _grow(self, size: int) -> None:
        frame = bytearray(size)
        frame[: self._filled] = self._view[: self._filled]
        self._view = memoryview(frame)
        self._is_large = True

    def _large_packet(self) -> list[Packet]:
        if self._filled < len(self._view):
            return []
        frame = cast("bytearray", self._view.obj)
        self._view, self._is_large, self._filled = memoryview(self._main), False, 0
        return [read_packet(frame, self._is_ipc)]


# The most that a packet has besides its data: tags, lengths, address, ids.
PACKET_OVERHEAD_BYTES = 1 * KIB
# The largest packet that the bus may send. It can be larger than max_packet_bytes: a call gets
# a caller's name, and messages of other dialects may be longer.
MAX_RECEIVED_BYTES = 64 * MIB
SCHEMES = ("tcp", "tls+tcp", "ipc", "unix")

CLOSED_BY_BUS = (
    "the bus closed the connection: it stopped, a limit was reached, or a packet was invalid;"
    " see the log of the bus"
)


class GsbStream(client_connection.ClientConnection):
    """The transport part of a connection: frames out, packets in, its end."""

    closed_by_peer = CLOSED_BY_BUS

    def __init__(self, address: Address, options: ClientOptions) -> None:
        super().__init__(address)
        self.options = options
        self.is_ipc = address.is_unix
        self._loop = asyncio.get_running_loop()
        limit = max(MAX_RECEIVED_BYTES, options.max_packet_bytes + PACKET_OVERHEAD_BYTES)
        self._reader = PacketReader(self.is_ipc, limit)
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._writable = asyncio.Event()
        self._writable.set()

    @abstractmethod
    def on_packets(self, packets: list[Packet]) -> None:
        """Handle received packets. Raises `BadFrame` if one is invalid."""

    # --- writing

    def send(self, *frames: bytes) -> None:
        """Queue frames for the end of the turn. Raises `ConnectionLost` if the connection ended."""
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
        """Wait until there is room. Raises `ConnectionLost` if the connection ends first."""
        await self._writable.wait()
        if not self.is_up:
            raise self.make_loss_error()

    # --- closing

    def close(self) -> None:
        """Close the connection after all queued frames are written."""
        self._flush()
        super().close()

    # --- reading

    def set_reading(self, wanted: bool) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self._transport is not None
        self._transport.write(sp.GREETING)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.free_space()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self.on_packets(self._reader.on_bytes(nbytes))
        except BadFrame as error:
            self.abort_with(error)
        except ConnectionLost:
            pass  # connection_lost follows and notifies all waiting callers

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        super().connection_lost(exc)


async def dial(stream: GsbStream) -> None:
    """Connect a stream to its address. Raises OSError if that fails."""
    if stream.address.scheme not in SCHEMES:
        raise AddressError(
            f"a GSB address must be tcp://, tls+tcp:// or ipc://, got {stream.address}"
        )
    await client_connection.connect(stream, stream.options.tls)


# Data of this size is written as it is, not copied into one buffer with its head.
LARGE_BYTES = 64 * KIB


class ReplyReceiver(BudgetHolder, Protocol):
    """Receives the replies of one call, including the last."""

    @property
    def is_awaited(self) -> bool: ...

    def on_reply(self, code: int, kind: int, data: Buffer) -> bool:
        """Take one reply. Returns True if it was the last."""


class CallReceiver(Protocol):
    """Receives calls to the services of this client."""

    def __len__(self) -> int: ...
    def on_request(self, request: Packet) -> None: ...
    def run_queued(self) -> None: ...
    def credit(self, request_id: bytes, replies: int) -> None: ...
    def cancel(self, request_id: bytes) -> None: ...


class GsbConnection(GsbStream):
    """A connection with its open calls and pending requests."""

    def __init__(
        self,
        address: Address,
        options: ClientOptions,
        services: CallReceiver,
        on_broadcast: Callable[[pb.BroadcastRequest], None],
        on_end: Callable[[GsbConnection], None],
    ) -> None:
        super().__init__(address, options)
        self.unread = ReceiveBudget(
            options.max_unread_bytes,
            options.cut_unread_bytes,
            self._is_awaited,
            self.set_reading,
            self._cancel_holder,
        )
        self.calls: dict[bytes, ReplyReceiver] = {}
        self._services = services
        self._on_broadcast = on_broadcast
        self._on_end = on_end
        self._ids = itertools.count(1)
        self._pending_replies: dict[str, deque[asyncio.Future[tuple[int, str]]]] = {}
        self._pings: dict[bytes, asyncio.Future[None]] = {}

    # --- calls

    def call(self, address: bytes, data: bytes, receiver: ReplyReceiver) -> bytes:
        """Send a call. Returns its id. `receiver` gets the replies, or the error that ends it."""
        request_id = b"%x" % next(self._ids)
        self._check_size(data)
        self.calls[request_id] = receiver
        if len(data) < LARGE_BYTES:
            self.send(encode_call(self.is_ipc, address, request_id, data))
        else:
            self.send(encode_call(self.is_ipc, address, request_id, len(data)), data)
        self.unread.on_wait()
        return request_id

    def cancel(self, request_id: bytes) -> None:
        """End an open call here and at the bus. Later replies are dropped."""
        receiver = self.calls.pop(request_id, None)
        if receiver is None:
            return
        self.unread.release(receiver)
        packet = pb.Packet()
        packet.cancel.request_id = request_id.decode()
        self.send_packet(packet)

    def reply(self, request_id: bytes, code: int, partial: bool, data: bytes) -> None:
        self._check_size(data)
        if len(data) < LARGE_BYTES:
            self.send(encode_reply(self.is_ipc, request_id, code, partial, data))
        else:
            self.send(encode_reply(self.is_ipc, request_id, code, partial, len(data)), data)

    def _check_size(self, data: bytes) -> None:
        limit = self.options.max_packet_bytes - PACKET_OVERHEAD_BYTES
        if len(data) > limit:
            raise TooLarge(
                f"data must have at most {limit} bytes (max_packet_bytes), got {len(data)}"
            )

    # --- other requests

    async def ask(self, packet: pb.Packet) -> tuple[int, str]:
        """Send a request without an id, such as register. Returns code and message."""
        answer = self.send_request(packet)
        return await self.wait_reply(answer)

    def send_request(self, packet: pb.Packet) -> asyncio.Future[tuple[int, str]]:
        kind = str(packet.WhichOneof("kind")).removesuffix("_request")
        answer: asyncio.Future[tuple[int, str]] = self._loop.create_future()
        self._pending_replies.setdefault(kind, deque()).append(answer)
        self.send_packet(packet)
        self.unread.on_wait()
        return answer

    async def wait_reply(self, answer: asyncio.Future[tuple[int, str]]) -> tuple[int, str]:
        timeout_s = self.options.answer_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise NotConnected(f"no answer from {self.address} within {timeout_s:g} s") from None

    async def ping(self) -> None:
        """Return when the bus has answered. It has then read everything sent before."""
        token = b"%x" % next(self._ids)
        pong: asyncio.Future[None] = self._loop.create_future()
        self._pings[token] = pong
        packet = pb.Packet()
        packet.ping.token = token
        self.send_packet(packet)
        self.unread.on_wait()
        try:
            await pong
        finally:
            del self._pings[token]

    def send_packet(self, packet: pb.Packet) -> None:
        self.send(sp.frame(packet.SerializeToString(), sp.Form(int(self.is_ipc))))

    # --- receiving

    def on_packets(self, packets: list[Packet]) -> None:
        self._dispatch(packets)
        if self.unread.is_over:
            self.unread.update_reading()

    def on_ended(self) -> None:
        calls, self.calls = self.calls, {}
        for receiver in calls.values():
            receiver.fail(self.make_loss_error())
        for answers in self._pending_replies.values():
            for answer in answers:
                _fail(answer, self.make_loss_error())
        for pong in self._pings.values():
            _fail(pong, self.make_loss_error())
        self._on_end(self)

    def _dispatch(self, packets: list[Packet]) -> None:
        calls, requested = self.calls, False
        for packet in packets:
            kind = packet[0]
            if kind == REPLY:
                receiver = calls.get(packet[1])
                if receiver is not None and receiver.on_reply(packet[2], packet[3], packet[4]):
                    calls.pop(packet[1], None)
            elif kind == REQUEST:
                self._services.on_request(packet)
                requested = True
            else:
                self._handle_other(packet[1])
        if requested:
            self._services.run_queued()

    def _handle_other(self, payload: bytes) -> None:
        packet = codec.decode_packet(payload)
        kind = str(packet.WhichOneof("kind"))
        answers = self._pending_replies.get(kind.removesuffix("_reply"))
        if kind == "broadcast_request":
            self._on_broadcast(packet.broadcast_request)
        elif kind == "credit":
            self._services.credit(packet.credit.request_id.encode(), packet.credit.replies)
        elif kind == "cancel":
            self._services.cancel(packet.cancel.request_id.encode())
        elif kind == "ping":
            self._send_pong(packet.ping.token)
        elif kind == "pong":
            self._on_pong(packet.pong.token)
        elif kind in ("call_reply", "call_request"):
            self._dispatch([_packet_tuple(packet)])
        elif kind.endswith("_reply") and answers:
            reply = getattr(packet, kind)
            _fulfil(answers.popleft(), (reply.code, reply.message))
        else:
            raise BadFrame(codec.WRONG_DIRECTION)

    def _send_pong(self, token: bytes) -> None:
        packet = pb.Packet()
        packet.pong.token = token
        self.send_packet(packet)

    def _on_pong(self, token: bytes) -> None:
        pong = self._pings.get(token)
        if pong is not None and not pong.done():
            pong.set_result(None)

    # --- unread bytes

    def _is_awaited(self) -> bool:
        return (
            bool(self._pings)
            or len(self._services) > 0
            or any(self._pending_replies.values())
            or any(receiver.is_awaited for receiver in self.calls.values())
        )

    def _cancel_holder(self, fullest: BudgetHolder) -> None:
        for request_id in [key for key, holder in self.calls.items() if holder is fullest]:
            self.cancel(request_id)


def _packet_tuple(packet: pb.Packet) -> Packet:
    """Return a call or reply that protobuf decoded as packet_scanner.pyx would return it."""
    if packet.WhichOneof("kind") == "call_reply":
        reply = packet.call_reply
        return (REPLY, reply.request_id.encode(), reply.code, reply.type, reply.data)
    call = packet.call_request
    return (REQUEST, call.request_id.encode(), call.data, call.caller, call.address)


def _fulfil(waiter: asyncio.Future[tuple[int, str]], result: tuple[int, str]) -> None:
    if not waiter.done():
        waiter.set_result(result)


def _fail(
    waiter: asyncio.Future[tuple[int, str]] | asyncio.Future[None], error: PolybusError
) -> None:
    if not waiter.done():
        waiter.set_exception(error)
        waiter.exception()  # marks it as retrieved: the caller may be gone
