"""One GSB connection: SP's frames in, packets to the verbs of calls and topics.

Packets are taken one after another until one stands in the way, and then the session is
*halted*: nothing is read until that is over. What can stand in the way:

    a call to a service that is full         a reply to a caller that is full (pressure.py)
    a broadcast to a full reader of another dialect, or with too much on its way to the disk

The packet that had to wait is offered again, so halting needs no memory of its own.
A peer that hangs up meanwhile is noticed. Its names are free at once, and as it can send
no more, what it sent before is taken past all marks (*lifted*); then it is gone.

A peer whose packets take much work, many of them in one read, rests in the same way until
all others have had a turn.

Whoever breaks the protocol is told by the end of its connection; the log says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.bus.outbox import Outbox
from polybus.dialects.gsb import codec, control_packets, sp
from polybus.dialects.gsb.server.broadcast_outbox import BroadcastOutbox
from polybus.dialects.gsb.server.call_router import FULL, CallRouter
from polybus.dialects.gsb.server.control_requests import ControlRequests
from polybus.dialects.gsb.server.gsb_packets import GsbEncoding, call_reply, call_request
from polybus.dialects.gsb.server.packet_receiver import PacketReceiver
from polybus.dialects.gsb.service_address import StatusCode

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.bus.broker import Broker
    from polybus.bus.connection import ConnectionIO
    from polybus.bus.timers import Timers
    from polybus.dialects.gsb.server.call_table import Call
    from polybus.model.identity import Identity
    from polybus.model.limits import GsbLimits

MAX_VARINT = 2**64 - 1  # a negative code travels as what is left of it in 64 bits


class GsbServer:
    """What all GSB connections of a bus share; called with a pipe it opens a session."""

    def __init__(self, broker: Broker, limits: GsbLimits, timers: Timers, owner: Identity) -> None:
        self.broker = broker
        self.limits = limits
        self.timers = timers
        self.calls = CallRouter(broker, limits, timers, owner)
        numbers = broker.new_encoding_number(), broker.new_encoding_number()
        self.encodings = (GsbEncoding(numbers[0], False), GsbEncoding(numbers[1], True))
        broker.senders.encodings += self.encodings

    def __call__(self, pipe: ConnectionIO) -> GsbSession:
        return GsbSession(self, pipe)

    def close(self) -> None:
        """The bus is stopping."""
        if self.calls.audit is not None:
            self.calls.audit.close()


class GsbSession(PacketReceiver):
    def __init__(self, dialect: GsbServer, pipe: ConnectionIO) -> None:
        broker, limits = dialect.broker, dialect.limits
        self.broker = broker
        self._calls = dialect.calls
        self._call_soon = dialect.timers.call_soon
        self._pipe = pipe
        self.caller_name = _caller_name(pipe.identity).encode()
        most, full = dialect.calls.max_outbox_bytes, limits.outbox_full_bytes
        free = min(full, limits.outbox_free_bytes)
        self._outbox = Outbox(pipe, broker.turn, self, full, most, free)
        self.take_short_path(dialect.calls.desk, self._outbox.push, pipe.is_unix)
        self._encoding = dialect.encodings[self.ipc]
        reader = BroadcastOutbox(self, broker.counters, most)
        self.party = broker.join("gsb", pipe, self._encoding, outbox=self._outbox, reader=reader)
        self.party.on_resume = self.schedule_retry
        self.party.describe = self._describe
        self.on_stalled = self._outbox.on_stalled
        self.on_writable = self._outbox.on_writable
        self._requests = ControlRequests(dialect, self)
        self.init_receiver(limits.max_packet_bytes, self._requests.table)
        self._is_retry_scheduled = False  # soon
        self._rest_taken = False  # it sends no more, and all it sent was taken
        self._calls.join(self)
        self.send(sp.GREETING)

    # --- what the transport calls (`stalled` and `writable` are the outbox's, `receive` is
    # the short path's)

    def on_half_closed(self) -> bool:
        """The peer sends no more; nng's never do that and stay."""
        if self._rest_taken:
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

    # --- what its outbox reports

    def on_filled(self, outbox: Outbox) -> None:
        self._calls.pressure.on_full(self)

    def on_room(self, outbox: Outbox) -> None:
        self._calls.pressure.on_room(self)

    def on_overflow(self, outbox: Outbox) -> None:
        self.broker.cut(self.party, "outbox_overflow")

    # --- what calls ask for

    def send(self, data: bytes) -> None:
        self._outbox.push(data)

    def send_call(self, call: Call, data: Buffer) -> None:
        caller = call.caller.caller_name
        self.send(call_request(self.ipc, call.id, data, caller, call.address))

    def send_reply(self, request_id: bytes, code: int, kind: int, data: Buffer) -> None:
        self.send(call_reply(self.ipc, request_id, code & MAX_VARINT, kind, data))

    def send_failure(self, request_id: bytes, code: int, message: str) -> None:
        data = codec.pack_failure(code, message, codec.Origin.BUS)
        self.send_reply(request_id, StatusCode.FAILURE, FULL, data)

    def send_cancel(self, call_id: bytes) -> None:
        self.send(control_packets.cancel(self.ipc, call_id))

    def send_credit(self, call_id: bytes, replies: int) -> None:
        self.send(control_packets.credit(self.ipc, call_id, replies))

    def send_pong(self, token: bytes) -> None:
        self.send(control_packets.pong(self.ipc, token))

    def send_ping(self) -> None:
        self.send(control_packets.ping(self.ipc, b""))

    def halt(self) -> None:
        if self.halted or self.party.is_closed:
            return
        self.halted = True
        self.halted_since_s = self.broker.now_s()
        self._pipe.pause_reading()
        self._pipe.watch_hangup(self._on_hangup)

    def schedule_retry(self) -> None:
        if self.halted and not self._is_retry_scheduled:
            self._is_retry_scheduled = True
            self._call_soon(self._resume)

    def _resume(self) -> None:
        self._is_retry_scheduled = False
        must_wait = self.full_calls and not self.lifted
        if self.halted and not must_wait and not self.party.is_closed:
            self._end_halt()
            if self.finish_large():
                self._pipe.resume_reading()

    def _end_halt(self) -> None:
        if self.halted:
            self.halted = False
            self.unread_s += self.broker.now_s() - self.halted_since_s

    def _on_hangup(self) -> None:
        self.lifted = True
        self._calls.on_hangup(self)
        self.schedule_retry()

    def _drain_received(self) -> None:
        """What it has sent, whoever is full; nothing more will come.

        Once: with TLS, offering again what is there finds its end again.
        """
        if self._rest_taken:
            return
        self._rest_taken = self.lifted = True
        self._calls.on_hangup(self)
        self._end_halt()
        self.finish_large()
        self._pipe.offer_again()

    def _describe(self) -> dict[str, int | str]:
        return {
            "services": len(self.services),
            "open_calls": len(self.calls),
            "serving": len(self.serving),
            "state": "waiting" if self.halted else "full" if self.full else "open",
        }


def _caller_name(identity: Identity) -> str:
    return "local:anonymous" if identity.uid is None else f"local:{identity.uid}"
