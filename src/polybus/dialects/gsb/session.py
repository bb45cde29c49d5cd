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

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from polybus.bus.calls import sabotage
from polybus.bus.calls.calls import FULL, Calls
from polybus.bus.calls.peer import Peer
from polybus.bus.calls.services import Answer
from polybus.bus.outbox import Outbox
from polybus.dialects.gsb import codec, packets, sp
from polybus.dialects.gsb.requests import Requests
from polybus.dialects.gsb.skipping import SERVICE_CALL, Skipping
from polybus.errors import BadFrame
from polybus.kernel.gsb import GsbEncoding, call_reply, call_request, read
from polybus.model.services import Code

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.bus.broker import Broker
    from polybus.bus.calls.deadlines import Timers
    from polybus.bus.party import Pipe
    from polybus.kernel.gsb_calls import Call
    from polybus.model.identity import Identity
    from polybus.model.limits import GsbLimits

LENGTH = struct.Struct(">Q")
REPLY_TYPES = (0, 1)


class GsbDialect:
    """What all GSB connections of a bus share; called with a pipe it opens a session."""

    def __init__(self, broker: Broker, limits: GsbLimits, timers: Timers, owner: Identity) -> None:
        self.broker = broker
        self.limits = limits
        self.timers = timers
        self.calls = Calls(broker, limits, timers, owner)
        numbers = broker.new_encoding_number(), broker.new_encoding_number()
        self.encodings = (GsbEncoding(numbers[0], False), GsbEncoding(numbers[1], True))

    def __call__(self, pipe: Pipe) -> GsbSession:
        return GsbSession(self, pipe)

    def close(self) -> None:
        """The bus is stopping."""
        if self.calls.audit is not None:
            self.calls.audit.close()


class GsbSession(Peer):
    def __init__(self, dialect: GsbDialect, pipe: Pipe) -> None:
        broker, limits = dialect.broker, dialect.limits
        self.broker = broker
        self._calls = dialect.calls
        self._call_soon = dialect.timers.call_soon
        self._pipe = pipe
        self._max_packet_bytes = limits.max_packet_bytes
        self._head = sp.head_size(sp.Form(pipe.is_unix))
        self.caller_name = _caller(pipe.identity).encode()
        most, full = dialect.calls.max_owed, limits.outbox_full_bytes
        free = min(full, limits.outbox_free_bytes)
        self._outbox = Outbox(pipe, broker.turn, self, full, most, free)
        self.take_short_path(dialect.calls.desk, self._outbox.push, pipe.is_unix)
        self._encoding = dialect.encodings[self.ipc]
        reader = Subscriber(self, most)
        self.party = broker.join("gsb", pipe, self._encoding, outbox=self._outbox, reader=reader)
        self.party.resume = self.try_again
        self.party.describe = self._describe
        self.stalled = self._outbox.stalled
        self.writable = self._outbox.writable
        self._requests = Requests(dialect, self)
        self._table: dict[str, Callable[[Any], bool]] = {
            **self._requests.table,
            "service_call_request": self._call,
            "call_reply": self._reply,
            "cancel": self._cancel,
            "ping": self._ping,
            "pong": lambda pong: True,
        }
        self._greeted = False
        self._skipping: Skipping | None = None
        self._trying = False  # soon
        self._rest_taken = False  # it sends no more, and all it sent was taken
        self._calls.join(self)
        self.send(sp.GREETING)

    # --- what the transport calls (`stalled` and `writable` are the outbox's, `receive` is
    # the short path's, which calls these two if need be)

    def receive_slowly(self, buffer: Buffer, start: int, end: int) -> int:
        """The greeting, a frame, or some of what is skipped: its size; 0: nothing is whole."""
        if self.party.ended:
            return end - start
        try:
            if not self._greeted:
                return self._greet(buffer, start, end)
            return self._take(buffer, start, end)
        except BadFrame as error:
            self._close(error.reason)
            return end - start

    def packet_slowly(self, payload: bytes, start: int, end: int) -> bool:
        """One whole packet; False: it has to wait."""
        try:
            return self._packet(payload, start, end)
        except BadFrame as error:
            self._close(error.reason)
            return True

    def half_closed(self) -> bool:
        """The peer sends no more; nng's never do that and stay."""
        if self._rest_taken:
            return True
        self._take_rest()
        self._calls.leave(self)
        self.broker.finish(self.party)
        return True

    def ended(self) -> None:
        if not self.party.ended:
            self._take_rest()
        self._calls.leave(self)
        self.broker.leave(self.party)

    # --- what its outbox reports

    def filled(self, outbox: Outbox) -> None:
        self._calls.pressure.filled(self)

    def has_room(self, outbox: Outbox) -> None:
        self._calls.pressure.has_room(self)

    def overflowed(self, outbox: Outbox) -> None:
        self.broker.cut(self.party, "outbox_overflow")

    # --- what calls ask for

    def send(self, data: bytes) -> None:
        self._outbox.push(data)

    def send_call(self, call: Call, data: Buffer) -> None:
        caller = call.caller.caller_name
        self.send(call_request(self.ipc, call.id, data, caller, call.address))

    def send_reply(self, request_id: bytes, code: int, kind: int, data: Buffer) -> None:
        self.send(call_reply(self.ipc, request_id, code, kind, data))

    def send_failure(self, request_id: bytes, code: int, message: str) -> None:
        data = codec.pack_failure(code, message, codec.Origin.BUS)
        self.send_reply(request_id, Code.FAILURE, FULL, data)

    def send_cancel(self, call_id: bytes) -> None:
        self.send(packets.cancel(self.ipc, call_id))

    def send_credit(self, call_id: bytes, replies: int) -> None:
        self.send(packets.credit(self.ipc, call_id, replies))

    def send_ping(self) -> None:
        self.send(packets.ping(self.ipc, b""))

    def halt(self) -> None:
        if self.halted or self.party.ended:
            return
        self.halted = True
        self.halted_since_s = self.broker.now_s()
        self._pipe.pause_reading()
        self._pipe.watch_hangup(self._hung_up)

    def try_again(self) -> None:
        if self.halted and not self._trying:
            self._trying = True
            self._call_soon(self._go_on)

    def _go_on(self) -> None:
        self._trying = False
        must_wait = self.full_calls and not self.lifted
        if self.halted and not must_wait and not self.party.ended:
            self._wake()
            if self.finish_large():
                self._pipe.resume_reading()

    def _wake(self) -> None:
        if self.halted:
            self.halted = False
            self.unread_s += self.broker.now_s() - self.halted_since_s

    def _hung_up(self) -> None:
        self.lifted = True
        self._calls.hung_up(self)
        self.try_again()

    def _take_rest(self) -> None:
        """What it has sent, whoever is full; nothing more will come.

        Once: with TLS, offering again what is there finds its end again.
        """
        if self._rest_taken:
            return
        self._rest_taken = self.lifted = True
        self._calls.hung_up(self)
        self._wake()
        self.finish_large()
        self._pipe.offer_again()

    # --- frames

    def _greet(self, buffer: Buffer, start: int, end: int) -> int:
        size = len(sp.GREETING)
        sp.check_greeting(bytes(memoryview(buffer)[start : min(end, start + size)]))
        self._greeted = self.is_open = end - start >= size
        return size if self._greeted else 0

    def _take(self, buffer: Buffer, at: int, end: int) -> int:
        """One frame: its size, or 0 if it is not whole or must wait."""
        if self._skipping is not None:
            return self._skip(self._skipping, memoryview(buffer)[at:end])
        if self.ipc and at < end and memoryview(buffer)[at] != sp.IPC_MARK:
            raise BadFrame(sp.BAD_FRAME)
        begin = at + self._head
        if begin > end:
            return 0
        size: int = LENGTH.unpack_from(buffer, begin - LENGTH.size)[0]
        if size > self._max_packet_bytes and not sabotage.SIZES_OFF:
            self._skipping = Skipping(size)
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
            done = self._replied(*hot[1:])
        self.is_first = self.is_first and not done
        return done

    def _other(self, payload: bytes) -> bool:
        found = codec.packet(payload)
        kind = found.WhichOneof("kind") or ""
        if kind == "hello":
            return self._hello(found.hello)
        if kind not in self._table:
            raise BadFrame(codec.WRONG_DIRECTION)
        return self._table[kind](getattr(found, kind))

    def _skip(self, skipping: Skipping, data: memoryview) -> int:
        """Some of a packet over the limit; at its end whoever sent it is told."""
        used = skipping.feed(data)
        if not skipping.left:
            self._skipping = None
            self.is_open = True
            self.is_first = False
            if skipping.kind == SERVICE_CALL:
                text = f"a packet has at most {self._max_packet_bytes} bytes"
                why = Answer(Code.TOO_LARGE, text)
                self._calls.refuse(self, skipping.request_id, b"", b"", why)
            else:
                self._calls.reply_too_large(self, skipping.request_id)
        return used

    def _close(self, reason: str) -> None:
        self.broker.close(self.party, reason)
        self._calls.leave(self)

    # --- packets

    def _hello(self, hello: Any) -> bool:
        if not self.is_first:
            raise BadFrame(codec.SECOND_HELLO)
        self._calls.greet(
            self, deadline_ms=hello.deadline_ms, keeps_credits=hello.credits, pings=hello.ping
        )
        return True

    def _call(self, call: Any) -> bool:
        return self._calls.call(self, call.address.encode(), call.request_id.encode(), call.data)

    def _reply(self, reply: Any) -> bool:
        return self._replied(reply.request_id.encode(), reply.code, reply.type, reply.data)

    def _replied(self, call_id: bytes, code: int, kind: int, data: bytes) -> bool:
        if kind not in REPLY_TYPES:
            raise BadFrame(codec.BAD_REPLY_TYPE)
        return self._calls.reply(self, call_id, code, kind, data)

    def _cancel(self, cancel: Any) -> bool:
        self._calls.cancel(self, cancel.request_id.encode())
        return True

    def _ping(self, ping: Any) -> bool:
        self.send(packets.pong(self.ipc, ping.token))
        return True

    def _describe(self) -> dict[str, int | str]:
        return {
            "services": len(self.services),
            "open_calls": len(self.calls),
            "serving": len(self.serving),
            "state": "waiting" if self.halted else "full" if self.full else "open",
        }


class Subscriber:
    """Takes broadcasts for one connection. It never makes anybody wait: a full one loses them."""

    def __init__(self, session: GsbSession, max_bytes: int) -> None:
        self._session = session
        self._counters = session.broker.counters
        self._max_bytes = max_bytes

    def push(self, data: bytes) -> None:
        party = self._session.party
        if self._session.full or self._session.owed + len(data) > self._max_bytes:
            lost = party.encoding.count(data, 0)
            self._counters.count("dropped", "subscriber_full", lost)
        else:
            party.outbox.push(data)


def _caller(identity: Identity) -> str:
    return "local:anonymous" if identity.uid is None else f"local:{identity.uid}"
