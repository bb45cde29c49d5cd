"""One GSB connection: SP frames in, packets to the call router and to the broker.

A session handles packets in order until one has to wait. Then the session is *halted*: the bus
reads nothing from the connection until the condition is over. A packet has to wait if it is

    a call to a service whose outbox is full, or a reply to a caller whose outbox is full
    (back_pressure.py)
    a broadcast to a full reader of another dialect, or one with too many uncommitted bytes

The transport offers that packet again, so a halted session needs no memory of its own.

A hang-up is noticed while a session is halted. Its service names are released at once, and
since the peer can send nothing more, the packets that it has sent are handled regardless of
high-water marks (*draining*). Then the session ends.

A peer that sends many expensive packets in one read is halted until all others had a turn.

A peer that violates the protocol is disconnected; the log has the reason.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from polybus.bus.outbox import Outbox
from polybus.dialects.gsb import codec, sp
from polybus.dialects.gsb.server import control_requests
from polybus.dialects.gsb.server.call_router import FULL, CallRouter
from polybus.dialects.gsb.server.call_table import CallEndpoint
from polybus.dialects.gsb.server.control_requests import ControlRequests
from polybus.dialects.gsb.server.gsb_packets import GsbEncoding, call_reply, call_request, read
from polybus.dialects.gsb.server.oversized_packet import SERVICE_CALL, OversizedPacket
from polybus.dialects.gsb.server.sender_tracker import SenderTracker
from polybus.dialects.gsb.server.service_registry import ServiceStatus
from polybus.dialects.gsb.service_address import StatusCode
from polybus.errors import BadFrame

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from polybus.bus.broker import Broker
    from polybus.bus.connection import ConnectionIO
    from polybus.bus.counters import Counters
    from polybus.bus.timers import Timers
    from polybus.dialects.gsb.limits import GsbLimits
    from polybus.dialects.gsb.server.call_table import Call
    from polybus.model.identity import Identity

LENGTH = struct.Struct(">Q")
REPLY_TYPES = (0, 1)
MAX_VARINT = 2**64 - 1  # protobuf encodes a negative code modulo 2**64


class GsbServer:
    """State shared by all GSB connections of a bus. Calling it with a pipe opens a session."""

    def __init__(self, broker: Broker, limits: GsbLimits, timers: Timers, owner: Identity) -> None:
        self.broker = broker
        self.limits = limits
        self.timers = timers
        self.calls = CallRouter(broker, limits, timers, owner)
        numbers = broker.new_encoding_number(), broker.new_encoding_number()
        self.encodings = (GsbEncoding(numbers[0], False), GsbEncoding(numbers[1], True))
        self.senders = SenderTracker.install(broker, self.encodings)

    def __call__(self, pipe: ConnectionIO) -> GsbSession:
        return GsbSession(self, pipe)

    def close(self) -> None:
        """Write the rest of the call log. Called when the bus stops."""
        if self.calls.audit is not None:
            self.calls.audit.close()


class BroadcastOutbox:
    """The reader that fan-out sees. A full connection loses broadcasts and blocks no producer."""

    def __init__(self, session: GsbSession, counters: Counters, max_bytes: int) -> None:
        self._session = session
        self._counters = counters
        self._max_bytes = max_bytes

    def push(self, data: bytes) -> None:
        party = self._session.party
        if self._session.full or self._session.outbox_bytes + len(data) > self._max_bytes:
            lost = party.encoding.count(data, 0)
            self._counters.count("dropped", "subscriber_full", lost)
        else:
            party.outbox.push(data)


class GsbSession(CallEndpoint):
    """One connection. The fast path (call_table.pyx) has `receive` and the state of calls.

    It calls `receive_slow_path` for frames that it does not handle, and `packet_slow_path` for
    a large packet that it has assembled.
    """

    wants_pings: bool = False
    waiting_for: GsbSession | None = None

    def __init__(self, dialect: GsbServer, pipe: ConnectionIO) -> None:
        broker, limits = dialect.broker, dialect.limits
        self.broker = broker
        self._calls = dialect.calls
        self.senders = dialect.senders
        self._call_soon = dialect.timers.call_soon
        self._pipe = pipe
        self.caller_name = _caller_name(pipe.identity).encode()
        max_bytes, full_bytes = dialect.calls.max_outbox_bytes, limits.outbox_full_bytes
        free_bytes = min(full_bytes, limits.outbox_free_bytes)
        self._outbox = Outbox(pipe, broker.turn, self, full_bytes, max_bytes, free_bytes)
        self.attach_fast_path(dialect.calls.table, self._outbox.push, pipe.is_unix)
        self._encoding = dialect.encodings[self.ipc]
        reader = BroadcastOutbox(self, broker.counters, max_bytes)
        self.party = broker.join("gsb", pipe, self._encoding, outbox=self._outbox, reader=reader)
        self.party.on_resume = self.schedule_retry
        self.party.describe = self._describe
        self.on_stalled = self._outbox.on_stalled
        self.on_writable = self._outbox.on_writable
        self._requests = ControlRequests(dialect, self)
        self._max_packet_bytes = limits.max_packet_bytes
        self._head_bytes = sp.head_size(sp.Form(self.ipc))
        self._greeted = False
        self._skipping: OversizedPacket | None = None
        self._handlers: dict[str, Callable[[Any], bool]] = {
            **self._requests.handlers,
            "hello": self._hello,
            "service_call_request": self._call,
            "call_reply": self._reply,
            "cancel": self._cancel,
            "ping": self._ping,
            "pong": lambda pong: True,
        }
        self._is_retry_scheduled = False
        self._is_drained = False
        self._calls.join(self)
        self.send(sp.GREETING)

    # --- called by the transport (`on_stalled` and `on_writable` are the outbox's own)

    def on_half_closed(self) -> bool:
        """End the session. nng sockets never half-close a connection and stay."""
        if self._is_drained:
            return True
        self._drain_received()
        self._calls.leave(self)
        self.broker.finish(self.party)
        return True

    def on_ended(self) -> None:
        if not self.party.is_closed:
            self._drain_received()
        self._calls.leave(self)
        self.broker.leave(self.party)

    # --- called by the outbox

    def on_filled(self, outbox: Outbox) -> None:
        self._calls.pressure.on_full(self)

    def on_room(self, outbox: Outbox) -> None:
        self._calls.pressure.on_room(self)

    def on_overflow(self, outbox: Outbox) -> None:
        self.broker.cut(self.party, "outbox_overflow")

    @property
    def outbox_bytes(self) -> int:
        """Bytes in the outbox that the peer has not taken."""
        return self.party.outbox.backlog()

    # --- frames: the slow path

    def receive_slow_path(self, buffer: Buffer, start: int, end: int) -> int:
        """Handle the greeting, one frame, or a part of an oversized packet.

        Returns the number of bytes used; 0 if the frame is incomplete or has to wait.
        """
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
        """Handle one complete packet. Returns False if it has to wait."""
        try:
            return self._packet(payload, start, end)
        except BadFrame as error:
            self._close(error.reason)
            return True

    def _close(self, reason: str) -> None:
        self.broker.close(self.party, reason)
        self._calls.leave(self)

    def _greet(self, buffer: Buffer, start: int, end: int) -> int:
        size = len(sp.GREETING)
        sp.check_greeting(bytes(memoryview(buffer)[start : min(end, start + size)]))
        self._greeted = self.is_open = end - start >= size
        return size if self._greeted else 0

    def _take_frame(self, buffer: Buffer, at: int, end: int) -> int:
        if self._skipping is not None:
            return self._skip(self._skipping, memoryview(buffer)[at:end])
        if self.ipc and at < end and memoryview(buffer)[at] != sp.IPC_MARK:
            raise BadFrame(sp.BAD_FRAME)
        begin = at + self._head_bytes
        if begin > end:
            return 0
        size: int = LENGTH.unpack_from(buffer, begin - LENGTH.size)[0]
        if size > self._max_packet_bytes:
            self._skipping = OversizedPacket(size, self._max_packet_bytes)
            self.is_open = False  # the fast path must not read the skipped bytes as frames
            return self._head_bytes
        if begin + size > end:
            return 0
        return self._head_bytes + size if self._packet(buffer, begin, begin + size) else 0

    def _skip(self, skipping: OversizedPacket, data: memoryview) -> int:
        """Skip bytes of a packet over max_packet_bytes. At its end, refuse the call."""
        used = skipping.feed(data)
        if not skipping.left:
            self._skipping = None
            self.is_open = True
            self.is_first = False
            if skipping.kind == SERVICE_CALL:
                text = f"a packet must have at most {self._max_packet_bytes} bytes"
                status = ServiceStatus(StatusCode.TOO_LARGE, text)
                call = skipping.request_id, skipping.address, skipping.data_bytes
                self._calls.refuse(self, *call, status)
            else:
                self._calls.reply_too_large(self, skipping.request_id)
        return used

    # --- packets. Handlers return False if the packet has to wait.

    def _packet(self, buffer: Buffer, start: int, end: int) -> bool:
        hot: Any = read(buffer, start, end)
        if hot is None:
            done = self._decode_and_handle(bytes(memoryview(buffer)[start:end]))
        elif hot[0] == SERVICE_CALL:
            done = self._calls.call(self, *hot[1:])
        else:
            done = self._handle_reply(*hot[1:])
        self.is_first = self.is_first and not done
        return done

    def _decode_and_handle(self, payload: bytes) -> bool:
        packet = codec.decode_packet(payload)
        kind = packet.WhichOneof("kind") or ""
        if kind not in self._handlers:
            raise BadFrame(codec.WRONG_DIRECTION)
        return self._handlers[kind](getattr(packet, kind))

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
        self.send(control_requests.encode_pong(self.ipc, ping.token))
        return True

    # --- sending to the peer

    def send(self, data: bytes) -> None:
        self._outbox.push(data)

    def send_call(self, call: Call, data: Buffer) -> None:
        caller = call.caller.caller_name
        self.send(call_request(self.ipc, call.id, data, caller, call.address))

    def send_reply(self, request_id: bytes, code: int, kind: int, data: Buffer) -> None:
        self.send(call_reply(self.ipc, request_id, code & MAX_VARINT, kind, data))

    def send_failure(self, request_id: bytes, code: int, message: str) -> None:
        """Send the FULL reply with which the bus itself ends a call."""
        data = codec.pack_failure(code, message, codec.Origin.BUS)
        self.send_reply(request_id, StatusCode.FAILURE, FULL, data)

    def send_cancel(self, call_id: bytes) -> None:
        self.send(control_requests.encode_cancel(self.ipc, call_id))

    def send_credit(self, call_id: bytes, replies: int) -> None:
        self.send(control_requests.encode_credit(self.ipc, call_id, replies))

    def send_ping(self) -> None:
        self.send(control_requests.encode_ping(self.ipc, b""))

    # --- halting

    def halt(self) -> None:
        """Stop reading from the connection. A hang-up is still noticed."""
        if self.halted or self.party.is_closed:
            return
        self.halted = True
        self.halted_since_s = self.broker.now_s()
        self._pipe.pause_reading()
        self._pipe.watch_hangup(self._on_hangup)

    def schedule_retry(self) -> None:
        """Offer the waiting packet again soon, and resume reading if it is taken."""
        if self.halted and not self._is_retry_scheduled:
            self._is_retry_scheduled = True
            self._call_soon(self._resume)

    def yield_turn(self) -> None:
        """Let all other connections be read first."""
        self.halt()
        self.schedule_retry()

    def _resume(self) -> None:
        self._is_retry_scheduled = False
        must_wait = self.full_calls and not self.draining
        if self.halted and not must_wait and not self.party.is_closed:
            self._end_halt()
            if self.finish_large():
                self._pipe.resume_reading()

    def _end_halt(self) -> None:
        if self.halted:
            self.halted = False
            self.unread_s += self.broker.now_s() - self.halted_since_s

    def _on_hangup(self) -> None:
        self.draining = True
        self._calls.on_hangup(self)
        self.schedule_retry()

    def _drain_received(self) -> None:
        """Handle the bytes already received, regardless of high-water marks."""
        # Once only: with TLS, offering the received bytes again reports the end again.
        if self._is_drained:
            return
        self._is_drained = self.draining = True
        self._calls.on_hangup(self)
        self._end_halt()
        self.finish_large()
        self._pipe.redeliver()

    def _describe(self) -> dict[str, int | str]:
        return {
            "services": len(self.services),
            "open_calls": len(self.calls),
            "serving": len(self.serving),
            "state": "waiting" if self.halted else "full" if self.full else "open",
        }


def _caller_name(identity: Identity) -> str:
    return "local:anonymous" if identity.uid is None else f"local:{identity.uid}"
