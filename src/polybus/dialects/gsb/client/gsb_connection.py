"""One connection of a client to a GSB bus: what is asked, and who gets what comes.

A link deals out what its wire brings: replies to the calls that wait, requests to the
services, all else to whoever asked for it. When it has ended, everybody who waited for
something is told why, and the client makes another.

It reads as long as what it has read is wanted (unread.py).
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from polybus.dialects.gsb import codec, sp
from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.client.gsb_options import ClientOptions
from polybus.dialects.gsb.client.gsb_stream import PACKET_OVERHEAD_BYTES, GsbStream
from polybus.dialects.gsb.client.packet_reader import Packet
from polybus.dialects.gsb.client.packet_scanner import REPLY, REQUEST, encode_call, encode_reply
from polybus.dialects.gsb.client.receive_budget import BudgetHolder, ReceiveBudget
from polybus.errors import BadFrame, NotConnected, PolybusError, TooLarge
from polybus.model.address import Address
from polybus.model.limits import KIB

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Data of this size is handed to the system as it is, not copied behind its head first.
LARGE_BYTES = 64 * KIB


class ReplyReceiver(BudgetHolder, Protocol):
    """Who gets the replies of one call, and with them its end."""

    @property
    def is_awaited(self) -> bool: ...

    def on_request(self, code: int, kind: int, data: Buffer) -> bool:
        """One reply; was it the last?"""


class CallReceiver(Protocol):
    """Who gets the calls of others."""

    def __len__(self) -> int: ...
    def on_request(self, request: Packet) -> None: ...
    def run_queued(self) -> None: ...
    def credit(self, request_id: bytes, replies: int) -> None: ...
    def cancel(self, request_id: bytes) -> None: ...


class GsbConnection(GsbStream):
    """See the top of the file."""

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

    def call(self, address: bytes, data: bytes, arriving: ReplyReceiver) -> bytes:
        """Send a call; its id. `arriving` gets what comes back, or is told that nothing will."""
        request_id = b"%x" % next(self._ids)
        self._check_size(data)
        self.calls[request_id] = arriving
        if len(data) < LARGE_BYTES:
            self.send(encode_call(self.is_ipc, address, request_id, data))
        else:
            self.send(encode_call(self.is_ipc, address, request_id, len(data)), data)
        self.unread.on_wait()
        return request_id

    def cancel(self, request_id: bytes) -> None:
        """End a call that is open, here and at the bus; what still comes of it is thrown away."""
        arriving = self.calls.pop(request_id, None)
        if arriving is None:
            return
        self.unread.release(arriving)
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
        most = self.options.max_packet_bytes - PACKET_OVERHEAD_BYTES
        if len(data) > most:
            raise TooLarge(
                f"{len(data)} bytes of data, and max_packet_bytes leaves room for {most}"
            )

    # --- everything else that is asked

    async def ask(self, packet: pb.Packet) -> tuple[int, str]:
        """Send register, subscribe and the like; code and message of the answer."""
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
        """Return when the bus has answered, and so has read all that was sent before."""
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

    # --- what has come

    def on_packets(self, packets: list[Packet]) -> None:
        self._dispatch(packets)
        if self.unread.is_over:
            self.unread.update_reading()

    def on_ended(self) -> None:
        calls, self.calls = self.calls, {}
        for arriving in calls.values():
            arriving.fail(self.make_loss_error())
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
                arriving = calls.get(packet[1])
                if arriving is not None and arriving.on_request(packet[2], packet[3], packet[4]):
                    calls.pop(packet[1], None)
            elif kind == REQUEST:
                self._services.on_request(packet)
                requested = True
            else:
                self._take_other(packet[1])
        if requested:
            self._services.run_queued()

    def _take_other(self, payload: bytes) -> None:
        packet = codec.packet(payload)
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

    # --- what is received and not read

    def _is_awaited(self) -> bool:
        return (
            bool(self._pings)
            or len(self._services) > 0
            or any(self._pending_replies.values())
            or any(arriving.is_awaited for arriving in self.calls.values())
        )

    def _cancel_holder(self, fullest: BudgetHolder) -> None:
        for request_id in [one for one, by in self.calls.items() if by is fullest]:
            self.cancel(request_id)


def _packet_tuple(packet: pb.Packet) -> Packet:
    """A call or a reply that the protobuf library had to read, as the kernel gives others."""
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
        waiter.exception()  # who has given up need not be told that nobody looked
