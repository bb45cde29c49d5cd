"""One connection of a client to a GSB bus: frames and packets, and the calls that wait for them.

A connection gives replies to the calls that wait for them, requests to the services, and
everything else to the caller that asked for it. When it ends, every waiting caller gets an
error with the reason, and the client dials a new one: a connection never comes back.

Bytes that the program has not read are bounded by `ReceiveBudget`. Frames that are sent within
one turn of the loop are written together.
"""

from __future__ import annotations

import asyncio
import itertools
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

    from polybus.dialects.gsb.client.service_host import ServiceHost

# The size of one read. More gains nothing, less costs system calls.
READ_BUFFER_BYTES = 256 * KIB
# Data of this size is written as it is, not copied into one buffer with its head.
LARGE_BYTES = 64 * KIB
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

# A packet as packet_scanner.pyx returns it: a tuple that begins with the kind.
Packet = tuple[Any, ...]
# The reply to a request without an id: code and message.
Answer = asyncio.Future[tuple[int, str]]


class ReplyReceiver(Protocol):
    """An open call: takes its replies, or the error that ends it."""

    request_id: bytes
    held_bytes: int  # received, and not read by the program

    @property
    def is_awaited(self) -> bool: ...

    def on_reply(self, code: int, kind: int, data: Buffer) -> bool:
        """Take one reply. Returns True if it was the last."""

    def fail(self, error: PolybusError) -> None: ...


class ReceiveBudget:
    """The received bytes of a connection that its program has not read.

    Over `max_unread_bytes` the connection is not read, so that back-pressure reaches the bus and
    the service. Exception: if something else is awaited on the connection, the program may read
    only after it has that, so not reading would be a deadlock. Then the connection is read, and
    over `cut_unread_bytes` the call with the most unread bytes is cut.
    """

    def __init__(self, connection: GsbConnection) -> None:
        self._connection = connection
        self._max_bytes = connection.options.max_unread_bytes
        self._cut_bytes = connection.options.cut_unread_bytes
        self._held_bytes = 0
        self._holders: set[ReplyReceiver] = set()
        self._reading = True

    @property
    def is_over(self) -> bool:
        return self._held_bytes > self._max_bytes

    def charge(self, holder: ReplyReceiver, nbytes: int) -> None:
        holder.held_bytes += nbytes
        self._held_bytes += nbytes
        self._holders.add(holder)

    def release(self, holder: ReplyReceiver) -> None:
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
        wanted = not self.is_over or self._connection.is_awaited()
        if wanted and self._held_bytes > self._cut_bytes:
            fullest = max(self._holders, key=lambda holder: holder.held_bytes)
            fullest.fail(LimitReached("cut_unread_bytes", "too many received bytes were not read"))
            self._connection.cancel(fullest.request_id)
            self.release(fullest)  # also if its call had already ended
        if wanted != self._reading:
            self._reading = wanted
            self._connection.set_reading(wanted)


class PacketReader:
    """Splits received bytes into packets.

    Bytes are written to `free_space`; `on_bytes` returns the packets that are complete. One
    buffer is read into and scanned again and again. A packet larger than that gets a buffer of
    its own, which the rest of it is received into, so that its data is not copied.
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
        """Return the complete packets. Raises `BadFrame` if the stream is invalid."""
        self._filled += nbytes
        if self._is_large:
            if self._filled < len(self._view):
                return []
            frame = cast("bytearray", self._view.obj)
            self._view, self._is_large, self._filled = memoryview(self._main), False, 0
            return [read_packet(frame, self._is_ipc)]
        if not self._greeted:
            size = len(sp.GREETING)
            sp.check_greeting(bytes(self._main[: min(self._filled, size)]))
            if self._filled < size:
                return []
            self._compact(size)
            self._greeted = True
        try:
            consumed, packets, wanted = scan(
                self._main, 0, self._filled, self._is_ipc, self._max_packet_bytes
            )
        except ValueError as error:
            raise BadFrame(str(error)) from None
        if consumed:
            self._compact(consumed)
        if wanted > READ_BUFFER_BYTES:
            frame = bytearray(wanted)
            frame[: self._filled] = self._view[: self._filled]
            self._view = memoryview(frame)
            self._is_large = True
        return packets

    def _compact(self, consumed: int) -> None:
        """Remove the first `consumed` bytes."""
        rest = self._filled - consumed
        if rest:
            self._view[:rest] = self._view[consumed : self._filled]
        self._filled = rest


class GsbConnection(client_connection.ClientConnection):
    """A connection with its open calls and pending requests."""

    closed_by_peer = CLOSED_BY_BUS

    def __init__(
        self,
        address: Address,
        options: ClientOptions,
        services: ServiceHost,
        on_broadcast: Callable[[pb.BroadcastRequest], None],
        on_end: Callable[[GsbConnection], None],
    ) -> None:
        super().__init__(address)
        self.options = options
        self.is_ipc = address.is_unix
        self.unread = ReceiveBudget(self)
        self.calls: dict[bytes, ReplyReceiver] = {}
        self._services = services
        self._on_broadcast = on_broadcast
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        limit = max(MAX_RECEIVED_BYTES, options.max_packet_bytes + PACKET_OVERHEAD_BYTES)
        self._reader = PacketReader(self.is_ipc, limit)
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._ids = itertools.count(1)
        self._pending_replies: dict[str, deque[Answer]] = {}
        self._pings: dict[bytes, asyncio.Future[None]] = {}

    # --- calls

    def call(self, address: bytes, data: bytes, receiver: ReplyReceiver) -> None:
        """Send a call. `receiver` gets its id, and the replies or the error that ends it."""
        request_id = b"%x" % next(self._ids)
        self._check_size(data)
        receiver.request_id = request_id
        self.calls[request_id] = receiver
        if len(data) < LARGE_BYTES:
            self.send(encode_call(self.is_ipc, address, request_id, data))
        else:
            self.send(encode_call(self.is_ipc, address, request_id, len(data)), data)
        self.unread.on_wait()

    def cancel(self, request_id: bytes) -> None:
        """End an open call here and at the bus. Later replies are dropped."""
        receiver = self.calls.pop(request_id, None)
        if receiver is not None:
            self.unread.release(receiver)
            self.send_packet(pb.Packet(cancel=pb.Cancel(request_id=request_id.decode())))

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

    # --- requests without an id, which the bus answers in their order

    async def ask(self, packet: pb.Packet) -> tuple[int, str]:
        """Send a request, such as register. Returns code and message."""
        return await self.wait_reply(self.send_request(packet))

    def send_request(self, packet: pb.Packet) -> Answer:
        kind = str(packet.WhichOneof("kind")).removesuffix("_request")
        answer: Answer = self._loop.create_future()
        self._pending_replies.setdefault(kind, deque()).append(answer)
        self.send_packet(packet)
        self.unread.on_wait()
        return answer

    async def wait_reply(self, answer: Answer) -> tuple[int, str]:
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
        self.send_packet(pb.Packet(ping=pb.Ping(token=token)))
        self.unread.on_wait()
        try:
            await pong
        finally:
            del self._pings[token]

    # --- writing

    def send_packet(self, packet: pb.Packet) -> None:
        self.send(sp.frame(packet.SerializeToString(), sp.Form(int(self.is_ipc))))

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

    def is_awaited(self) -> bool:
        """Return True if a caller or a service waits for a packet of this connection."""
        return (
            bool(self._pings)
            or len(self._services) > 0
            or any(self._pending_replies.values())
            or any(receiver.is_awaited for receiver in self.calls.values())
        )

    def on_packets(self, packets: list[Packet]) -> None:
        """Handle received packets. Raises `BadFrame` if one is invalid."""
        calls, has_requests = self.calls, False
        for packet in packets:
            kind = packet[0]
            if kind == REPLY:
                receiver = calls.get(packet[1])
                if receiver is not None and receiver.on_reply(packet[2], packet[3], packet[4]):
                    calls.pop(packet[1], None)
            elif kind == REQUEST:
                self._services.on_request(packet)
                has_requests = True
            else:
                self._decode_and_handle(packet[1])
        if has_requests:
            self._services.run_queued()
        if self.unread.is_over:
            self.unread.update_reading()

    def _decode_and_handle(self, payload: bytes) -> None:
        packet = codec.decode_packet(payload)
        match packet.WhichOneof("kind"):
            case "broadcast_request":
                self._on_broadcast(packet.broadcast_request)
            case "credit":
                self._services.credit(packet.credit.request_id.encode(), packet.credit.replies)
            case "cancel":
                self._services.cancel(packet.cancel.request_id.encode())
            case "ping":
                self.send_packet(pb.Packet(pong=pb.Pong(token=packet.ping.token)))
            case "pong":
                pong = self._pings.get(packet.pong.token)
                if pong is not None and not pong.done():
                    pong.set_result(None)
            # A call or reply in a form that the scanner leaves to protobuf.
            case "call_reply":
                reply = packet.call_reply
                reply_id = reply.request_id.encode()
                self.on_packets([(REPLY, reply_id, reply.code, reply.type, reply.data)])
            case "call_request":
                call = packet.call_request
                call_id = call.request_id.encode()
                self.on_packets([(REQUEST, call_id, call.data, call.caller, call.address)])
            case kind:
                self._on_answer(str(kind), packet)

    def _on_answer(self, kind: str, packet: pb.Packet) -> None:
        """Give a reply without an id to the oldest request of its kind."""
        answers = self._pending_replies.get(kind.removesuffix("_reply"))
        if not kind.endswith("_reply") or not answers:
            raise BadFrame(codec.WRONG_DIRECTION)
        reply, answer = getattr(packet, kind), answers.popleft()
        if not answer.done():
            answer.set_result((reply.code, reply.message))

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

    def on_ended(self) -> None:
        calls, self.calls = self.calls, {}
        for receiver in calls.values():
            receiver.fail(self.make_loss_error())
        waiting: list[asyncio.Future[Any]] = [*self._pings.values()]
        for answers in self._pending_replies.values():
            waiting += answers
        for future in waiting:
            if not future.done():
                future.set_exception(self.make_loss_error())
                future.exception()  # marks it as retrieved: the caller may be gone
        self._on_end(self)


async def dial(connection: GsbConnection) -> None:
    """Connect to the connection's address. Raises OSError if that fails."""
    address = connection.address
    if address.scheme not in SCHEMES:
        raise AddressError(f"a GSB address must be tcp://, tls+tcp:// or ipc://, got {address}")
    await client_connection.connect(connection, connection.options.tls)
