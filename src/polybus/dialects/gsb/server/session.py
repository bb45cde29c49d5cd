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

from typing import TYPE_CHECKING

from polybus.dialects.gsb import codec, sp
from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.codec import FULL
from polybus.dialects.gsb.gsb_packets import GsbEncoding, frame
from polybus.dialects.gsb.network.channels import Channels
from polybus.dialects.gsb.network.network import Network
from polybus.dialects.gsb.network.node_key import NodeKey
from polybus.dialects.gsb.server.call_router import CallRouter
from polybus.dialects.gsb.server.call_table import CallEndpoint
from polybus.dialects.gsb.server.control_requests import CONTROL_KINDS, ControlRequests
from polybus.dialects.gsb.server.oversized_packet import (
    CALL_REPLY,
    RELAY_CALL,
    SERVICE_CALL,
    OversizedPacket,
)
from polybus.dialects.gsb.server.sender_tracker import SenderTracker
from polybus.dialects.gsb.server.service_registry import ServiceStatus
from polybus.dialects.gsb.service_address import StatusCode
from polybus.errors import BadFrame
from polybus.kernel.outbox import Outbox

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.bus.connection import ConnectionIO
    from polybus.bus.counters import Counters
    from polybus.bus.timers import Timers
    from polybus.dialects.gsb.limits import GsbLimits
    from polybus.dialects.gsb.network.link import Link
    from polybus.dialects.gsb.network.link_dialler import LinkDialler
    from polybus.kernel.framing import Encoding
    from polybus.model.identity import Identity

MAX_CONTROL_BYTES = 64 * 1024  # of a packet that carries no data of clients


class GsbServer:
    """State shared by all GSB connections of a bus. Calling it with a pipe opens a session."""

    dialler: LinkDialler | None = None

    def __init__(
        self,
        broker: Broker,
        limits: GsbLimits,
        timers: Timers,
        owner: Identity,
        key: NodeKey | None = None,
    ) -> None:
        """`key` is that of this node; without one it gets a new id."""
        self.broker = broker
        self.limits = limits
        self.timers = timers
        self.owner = owner
        self.network = Network(broker, limits, timers, key or NodeKey.generate())
        self.calls = CallRouter(broker, limits, timers, owner, self.network)
        self.channels = self.network.channels = Channels(self, self.network)
        numbers = broker.new_encoding_number(), broker.new_encoding_number()
        self.encodings = (GsbEncoding(numbers[0], False), GsbEncoding(numbers[1], True))
        self.senders = SenderTracker.install(broker, self.encodings)

    def __call__(self, pipe: ConnectionIO) -> GsbSession:
        return GsbSession(self, pipe)

    def stop(self) -> None:
        """Answer all open calls, while their connections can still send the answers."""
        if self.dialler is not None:
            self.dialler.stop()
        self.network.stop()
        self.calls.stop()

    async def close(self) -> None:
        """End dialled links and write the rest of the call log. Called when the bus stops."""
        if self.dialler is not None:
            await self.dialler.close()
        if self.calls.audit is not None:
            self.calls.audit.close()


class BroadcastOutbox:
    """The reader that fan-out sees. A full connection loses broadcasts and blocks no producer."""

    def __init__(self, session: GsbSession, counters: Counters, max_bytes: int) -> None:
        self._session = session
        self._counters = counters
        self._max_bytes = max_bytes

    def push(self, data: bytes) -> None:
        connection = self._session.connection
        if self._session.full or self._session.outbox_bytes + len(data) > self._max_bytes:
            lost = connection.encoding.count(data, 0)
            self._counters.count("dropped", "subscriber_full", lost)
        else:
            connection.outbox.push(data)


class GsbSession(CallEndpoint):
    """One connection. Its base (call_table.pyx) has `receive` and the rules of calls.

    The base calls `receive_unframed` for the greeting and the bytes of an oversized packet, and
    `receive_packet` for packets that are no calls and replies in their usual form.

    Sessions of another framing (ya/session.py) have the same rules and other packets.
    """

    NAME = "gsb"  # of its listeners
    LENGTH_BYTES = 8  # of a frame

    waiting_for: GsbSession | None = None
    link: Link | None = None  # of a connection to another bus

    def __init__(self, server: GsbServer, pipe: ConnectionIO) -> None:
        broker, limits = server.broker, server.limits
        self.broker = broker
        self._calls = server.calls
        self._network = server.network
        self.channels: set[tuple[str, str]] = set()  # subscribed topics of other nodes
        self.senders = server.senders
        self._call_soon = server.timers.call_soon
        self._pipe = pipe
        identity = pipe.identity
        self.caller_name = f"local:{identity.name.removeprefix('uid:')}".encode()
        max_bytes, full_bytes = server.calls.max_outbox_bytes, limits.outbox_full_bytes
        free_bytes = min(full_bytes, limits.outbox_free_bytes)
        self._outbox = Outbox(pipe, broker.turn, self, full_bytes, max_bytes, free_bytes)
        self.send = self._outbox.push
        is_marked = self._marks_frames(pipe)
        table = server.calls.table
        self.attach(table, self._outbox.push, is_marked, self.LENGTH_BYTES)
        self.connection = broker.join(
            self.NAME,
            pipe,
            self._choose_encoding(server),
            outbox=self._outbox,
            reader=BroadcastOutbox(self, broker.counters, max_bytes),
        )
        self.connection.on_resume = self.schedule_retry
        self.connection.describe = self._describe
        self.on_stalled = self._outbox.on_stalled
        self.on_writable = self._outbox.on_writable
        self._requests = ControlRequests(server, self)
        self._max_packet_bytes = limits.max_packet_bytes
        self._skipping: OversizedPacket | None = None
        self._is_retry_scheduled = False
        self._is_drained = False
        self._calls.join(self)
        self._begin()

    def _marks_frames(self, pipe: ConnectionIO) -> bool:
        """Return whether each frame begins with SP's mark of ipc."""
        return pipe.is_unix

    def _choose_encoding(self, server: GsbServer) -> Encoding:
        return server.encodings[self.ipc]

    def _begin(self) -> None:
        self.send(sp.GREETING)

    # --- called by the transport (`on_stalled` and `on_writable` are the outbox's own)

    def on_half_closed(self) -> bool:
        """End the session. nng sockets never half-close a connection and stay."""
        if self._is_drained:
            return True
        self._drain_received()
        self._calls.leave(self)
        self.broker.finish(self.connection)
        return True

    def on_ended(self) -> None:
        if not self.connection.is_closed:
            self._drain_received()
        self._calls.leave(self)
        self.broker.leave(self.connection)

    # --- called by the outbox

    def on_filled(self, outbox: Outbox) -> None:
        self._calls.pressure.on_full(self)

    def on_room(self, outbox: Outbox) -> None:
        self._calls.pressure.on_room(self)

    def on_overflow(self, outbox: Outbox) -> None:
        self.broker.cut(self.connection, "outbox_overflow")

    @property
    def outbox_bytes(self) -> int:
        """Bytes in the outbox that the peer has not taken."""
        return self._outbox.backlog()

    # --- called by `receive`

    def receive_unframed(self, data: memoryview) -> int:
        """Handle the greeting, or a part of an oversized packet. Returns the bytes used."""
        if self.connection.is_closed:
            return len(data)
        if self._skipping is not None:
            return self._skip(self._skipping, data)
        size = len(sp.GREETING)
        # An incomplete greeting is checked too: a wrong byte closes the connection at once.
        sp.check_greeting(bytes(data[:size]))
        self.is_open = len(data) >= size
        return size if self.is_open else 0

    def begin_skipping(self, size: int) -> None:
        """Skip the coming packet, which is over max_packet_bytes."""
        self._skipping = self._begin_oversized(size)
        self.is_open = False  # its bytes are not frames

    def close(self, reason: str) -> None:
        if self.link is not None:
            self.link.end_reason = reason
        self.broker.close(self.connection, reason)
        self._calls.leave(self)

    def _begin_oversized(self, size: int) -> OversizedPacket:
        return OversizedPacket(size, self._max_packet_bytes)

    def _skip(self, skipping: OversizedPacket, data: memoryview) -> int:
        """Skip bytes of a packet over max_packet_bytes. At its end, refuse the call."""
        used = skipping.feed(data)
        if not skipping.left:
            self._skipping = None
            self.is_open = True
            self.is_first = False
            is_call = skipping.kind == (SERVICE_CALL if self.link is None else RELAY_CALL)
            if not is_call and skipping.kind != CALL_REPLY:
                raise BadFrame(codec.WRONG_DIRECTION)
            if is_call:
                text = f"a packet must have at most {self._max_packet_bytes} bytes"
                status = ServiceStatus(StatusCode.TOO_LARGE, text)
                call = skipping.request_id, skipping.address, skipping.data_bytes
                self._calls.refuse(self, *call, status)
            else:
                self._calls.reply_too_large(self, skipping.request_id)
        return used

    # --- packets

    def receive_packet(self, payload: bytes) -> bool:
        """Handle one packet. Returns False if it has to wait."""
        if self.connection.is_closed:
            return True
        if len(payload) > MAX_CONTROL_BYTES:
            codec.check_large(memoryview(payload))
        packet = codec.decode_packet(payload)
        kind = packet.WhichOneof("kind")
        if self.link is not None:
            self.link.receive(kind, packet)
            return True
        match kind:
            case "service_call_request" | "call_reply":
                return self.take_decoded(packet)
            case "cancel":
                self._calls.cancel(self, packet.cancel.request_id.encode())
            case "hello" | "link_hello":
                self._on_hello(packet)
            case "ping":
                self.send_packet(pb.Packet(pong=pb.Pong(token=packet.ping.token)))
            case "pong":
                pass  # `receive` has noted that the peer is alive
            case kind if kind in CONTROL_KINDS:
                return self._requests.execute(kind, packet)
            case _:
                raise BadFrame(codec.WRONG_DIRECTION)
        return True

    def take_decoded(self, packet: pb.Packet) -> bool:
        """Handle a call or reply in an unusual form. Returns False if it has to wait."""
        packet.DiscardUnknownFields()
        return self.take_canonical(packet.SerializeToString())

    def _on_hello(self, packet: pb.Packet) -> None:
        if not self.is_first:
            raise BadFrame(codec.SECOND_HELLO)
        if packet.HasField("link_hello"):
            self._network.accept(self, packet.link_hello)
        else:
            self._calls.on_hello(self, packet.hello)

    def register(self, service_id: str) -> ServiceStatus:
        return self._calls.services.register(self, service_id)

    def unregister(self, service_id: str) -> ServiceStatus:
        return self._calls.services.unregister(self, service_id)

    # --- sending to the peer (`send` is the outbox's `push`)

    def send_packet(self, packet: pb.Packet) -> None:
        self.send(frame(self.ipc, packet.SerializeToString()))

    def send_cancel(self, call_id: bytes) -> None:
        self.send_packet(pb.Packet(cancel=pb.Cancel(request_id=call_id.decode())))

    def send_ping(self) -> None:
        self.send_packet(pb.Packet(ping=pb.Ping()))

    def encode_status(self, kind: str, status: ServiceStatus) -> bytes:
        """Return the framed reply to a request without an id (control_requests.py)."""
        packet = pb.Packet()
        reply = codec.begin_status(packet, kind)
        reply.code, reply.message = status.code, status.message
        return frame(self.ipc, packet.SerializeToString())

    def send_broadcast(self, topic: str, data: bytes, caller: str) -> None:
        """Send a message of another node's topic."""
        message = pb.BroadcastRequest(topic=topic, data=data, caller=caller)
        self.send_packet(pb.Packet(broadcast_request=message))

    def send_failure(self, request_id: bytes, code: int, message: str) -> None:
        """Send the FULL reply with which the bus itself ends a call."""
        data = codec.pack_failure(code, message, codec.Origin.BUS)
        self.send_reply(request_id, StatusCode.FAILURE, FULL, data)

    # --- halting

    def halt(self) -> None:
        """Stop reading from the connection. A hang-up is still noticed."""
        if self.halted or self.connection.is_closed:
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
        # A service without credits waits until none of its callers is full.
        must_wait = self.full_calls and not self.draining
        if self.halted and not must_wait and not self.connection.is_closed:
            self._end_halt()
            if self.finish_large():
                self._pipe.resume_reading()

    def _end_halt(self) -> None:
        """Stop the clock of unread time, which the deadlines of its calls leave out."""
        if self.halted:
            self.halted = False
            self.unread_s += self.broker.now_s() - self.halted_since_s

    def _on_hangup(self) -> None:
        # The peer can send nothing more, and so cannot be slowed down.
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
        if self.link is not None:
            return self.link.describe()
        return {
            "services": len(self.services),
            "open_calls": len(self.calls),
            "serving": len(self.serving),
            "state": "waiting" if self.halted else "full" if self.full else "open",
        }
