"""What a GSB connection sends, one frame at a time: the long way of packets.

The short path (call_table.pyx) has `receive`, and calls `receive_slow_path` for what it
leaves over, and `packet_slow_path` for a large packet that it has put together.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from polybus.dialects.gsb import codec, sp
from polybus.dialects.gsb.server.call_peer import CallPeer
from polybus.dialects.gsb.server.gsb_packets import read
from polybus.dialects.gsb.server.oversized_packet import SERVICE_CALL, OversizedPacket
from polybus.dialects.gsb.server.service_registry import ServiceStatus
from polybus.dialects.gsb.service_address import StatusCode
from polybus.errors import BadFrame

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.bus.broker import Broker
    from polybus.dialects.gsb.server.call_router import CallRouter

LENGTH = struct.Struct(">Q")
REPLY_TYPES = (0, 1)


class PacketReceiver(CallPeer):
    """`others` are the requests without an id, by their kind; False: it has to wait."""

    broker: Broker
    _calls: CallRouter

    def init_receiver(
        self, max_packet_bytes: int, others: Mapping[str, Callable[[Any], bool]]
    ) -> None:
        self._max_packet_bytes = max_packet_bytes
        self._head = sp.head_size(sp.Form(self.ipc))
        self._greeted = False
        self._skipping: OversizedPacket | None = None
        self._table: dict[str, Callable[[Any], bool]] = {
            **others,
            "hello": self._hello,
            "service_call_request": self._call,
            "call_reply": self._reply,
            "cancel": self._cancel,
            "ping": self._ping,
            "pong": lambda pong: True,
        }

    def receive_slow_path(self, buffer: Buffer, start: int, end: int) -> int:
        """The greeting, a frame, or some of what is skipped: its size; 0: nothing is whole."""
        if self.party.is_closed:
            return end - start
        try:
            if not self._greeted:
                return self._greet(buffer, start, end)
            return self._take_frame(buffer, start, end)
        except BadFrame as error:
            self._close(error.reason)
            return end - start

    def packet_slow_path(self, payload: bytes, start: int, end: int) -> bool:
        """One whole packet; False: it has to wait."""
        try:
            return self._packet(payload, start, end)
        except BadFrame as error:
            self._close(error.reason)
            return True

    def _close(self, reason: str) -> None:
        self.broker.close(self.party, reason)
        self._calls.leave(self)

    # --- frames

    def _greet(self, buffer: Buffer, start: int, end: int) -> int:
        size = len(sp.GREETING)
        sp.check_greeting(bytes(memoryview(buffer)[start : min(end, start + size)]))
        self._greeted = self.is_open = end - start >= size
        return size if self._greeted else 0

    def _take_frame(self, buffer: Buffer, at: int, end: int) -> int:
        """One frame: its size, or 0 if it is not whole or must wait."""
        if self._skipping is not None:
            return self._skip(self._skipping, memoryview(buffer)[at:end])
        if self.ipc and at < end and memoryview(buffer)[at] != sp.IPC_MARK:
            raise BadFrame(sp.BAD_FRAME)
        begin = at + self._head
        if begin > end:
            return 0
        size: int = LENGTH.unpack_from(buffer, begin - LENGTH.size)[0]
        if size > self._max_packet_bytes:
            self._skipping = OversizedPacket(size, self._max_packet_bytes)
            self.is_open = False
            return self._head
        if begin + size > end:
            return 0
        return self._head + size if self._packet(buffer, begin, begin + size) else 0

    def _packet(self, buffer: Buffer, start: int, end: int) -> bool:
        """False: it has to wait."""
        hot: Any = read(buffer, start, end)
        if hot is None:
            done = self._other(bytes(memoryview(buffer)[start:end]))
        elif hot[0] == SERVICE_CALL:
            done = self._calls.call(self, *hot[1:])
        else:
            done = self._handle_reply(*hot[1:])
        self.is_first = self.is_first and not done
        return done

    def _other(self, payload: bytes) -> bool:
        found = codec.packet(payload)
        kind = found.WhichOneof("kind") or ""
        if kind not in self._table:
            raise BadFrame(codec.WRONG_DIRECTION)
        return self._table[kind](getattr(found, kind))

    def _skip(self, skipping: OversizedPacket, data: memoryview) -> int:
        """Some of a packet over the limit; at its end whoever sent it is told."""
        used = skipping.feed(data)
        if not skipping.left:
            self._skipping = None
            self.is_open = True
            self.is_first = False
            if skipping.kind == SERVICE_CALL:
                text = f"a packet has at most {self._max_packet_bytes} bytes"
                why = ServiceStatus(StatusCode.TOO_LARGE, text)
                found = skipping.request_id, skipping.address, skipping.data_bytes
                self._calls.refuse(self, *found, why)
            else:
                self._calls.reply_too_large(self, skipping.request_id)
        return used

    # --- packets

    def _hello(self, hello: Any) -> bool:
        if not self.is_first:
            raise BadFrame(codec.SECOND_HELLO)
        self._calls.on_hello(
            self, deadline_ms=hello.deadline_ms, keeps_credits=hello.credits, pings=hello.ping
        )
        return True

    def _call(self, call: Any) -> bool:
        return self._calls.call(self, call.address.encode(), call.request_id.encode(), call.data)

    def _reply(self, reply: Any) -> bool:
        return self._handle_reply(reply.request_id.encode(), reply.code, reply.type, reply.data)

    def _handle_reply(self, call_id: bytes, code: int, kind: int, data: bytes) -> bool:
        if kind not in REPLY_TYPES:
            raise BadFrame(codec.BAD_REPLY_TYPE)
        return self._calls.reply(self, call_id, code, kind, data)

    def _cancel(self, cancel: Any) -> bool:
        self._calls.cancel(self, cancel.request_id.encode())
        return True

    def _ping(self, ping: Any) -> bool:
        self.send_pong(ping.token)
        return True
