"""The verbs of calls. Every call ends in exactly one FULL reply.

    caller                    the bus                          service
      │ call(address, id) ───▶ open: two tables ──────────────▶ │ CallRequest(own id)
      │ ◀─────────────────────── PARTIAL, in order ◀─────────── │
      │ ◀─────────────────────── FULL: closed ◀──────────────── │

Or the bus ends it: the caller cancels (499), the service goes away (503) or is too slow
(504), a reply is too large (413). Then the service is told to stop, where it is there to
be told, and what it still sends is counted and dropped. A caller that vanishes cancels
all its calls.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, cast

from polybus.dialects.gsb.server.back_pressure import BackPressure
from polybus.dialects.gsb.server.built_in_services import BuiltInServices
from polybus.dialects.gsb.server.call_deadlines import CallDeadlines
from polybus.dialects.gsb.server.call_log import CallLog, EndedCall
from polybus.dialects.gsb.server.call_table import Call
from polybus.dialects.gsb.server.peer_liveness import PingMonitor, StuckPeerMonitor
from polybus.dialects.gsb.server.service_registry import ServiceRegistry, ServiceStatus
from polybus.dialects.gsb.service_address import MAX_REQUEST_ID_BYTES, StatusCode

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.bus.broker import Broker
    from polybus.bus.timers import Timers
    from polybus.dialects.gsb.server.call_peer import CallPeer
    from polybus.model.identity import Identity
    from polybus.model.limits import GsbLimits

FULL, PARTIAL = 0, 1
CODES = frozenset(StatusCode)  # a service may send any other: they are counted as failures


class CallRouter:
    def __init__(
        self,
        broker: Broker,
        limits: GsbLimits,
        timers: Timers,
        owner: Identity,
    ) -> None:
        """`owner` is the bus itself: whose topic the log of calls is."""
        self._limits = limits
        self._clock = broker.now_s
        self.counters = broker.counters
        self.peers: dict[CallPeer, None] = {}
        # What one connection is ever owed: at half of it nobody is read who would add to it, so
        # that must hold the mark and a packet.
        self.max_outbox_bytes = max(
            broker.limits.outbox_max_bytes, 2 * (limits.outbox_full_bytes + limits.max_packet_bytes)
        )
        self.pressure = BackPressure(limits, self.max_outbox_bytes, broker.now_s)
        desk = self.desk = self.pressure.desk
        self.services = ServiceRegistry(broker, desk, limits)
        self.deadlines = CallDeadlines(self.peers, desk, timers, broker.now_s, self._expire)
        self.pings = PingMonitor(broker, limits)
        self._stuck = StuckPeerMonitor(self.pressure, broker, limits)
        self._built_in = BuiltInServices(self.services, broker.stats)
        self.audit = CallLog(broker, desk, owner) if limits.audit else None
        self._ended_by_code: Counter[int] = Counter()
        broker.on_tick += [self.pings.tick, self._stuck.tick]
        broker.overview.sections["gsb"] = self.stats
        if self.audit is not None:
            broker.on_tick.append(self.audit.tick)

    # --- connections

    def join(self, peer: CallPeer) -> None:
        self.peers[peer] = None
        peer.deadline_s = self._limits.deadline_ms / 1000
        peer.heard_s = self._clock()

    def on_hello(
        self, peer: CallPeer, *, deadline_ms: int, keeps_credits: bool, pings: bool
    ) -> None:
        """Its hello."""
        peer.deadline_s = (deadline_ms or self._limits.deadline_ms) / 1000
        peer.credits = keeps_credits
        if pings:
            self.pings.peers[peer] = None

    def on_hangup(self, peer: CallPeer) -> None:
        """It sends no more; what it has sent is still there. Its names are free at once."""
        self.services.unregister_all(peer)

    def leave(self, peer: CallPeer) -> None:
        if peer.gone:
            return
        peer.gone = True
        self.peers.pop(peer, None)
        self.pings.peers.pop(peer, None)
        self.services.unregister_all(peer)
        for call in list(peer.serving.values()):
            self._fail(call, StatusCode.UNAVAILABLE, "the service went away", cancel=False)
        for call in list(peer.calls.values()):
            self._fail(call, StatusCode.CANCELLED, "the caller went away", cancel=True)
        self.pressure.remove(peer)

    # --- what callers do

    def call(self, caller: CallPeer, address: bytes, request_id: bytes, data: Buffer) -> bool:
        """False: it has to wait for the service, and is not read until then."""
        if caller.lifted:
            return True  # nobody is left to hear an answer
        if problem := self._call_refusal(caller, request_id):
            self.refuse(caller, request_id, address, len(memoryview(data)), problem)
            return True
        route = self.services.route(caller, address)
        if isinstance(route, ServiceStatus):
            self.refuse(caller, request_id, address, len(memoryview(data)), route)
            return True
        if isinstance(route, str):
            self._call_built_in(caller, request_id, route, bytes(data))
            return True
        service = cast("CallPeer", route.service.end)
        if service.full:
            self.pressure.wait(caller, service)
            return False
        now_s = self._clock()
        self.desk.opened += 1
        call_id = b"%x" % self.desk.opened
        call = Call(caller, route, request_id, call_id, len(memoryview(data)), now_s)
        caller.calls[request_id] = service.serving[call.id] = call
        call.service.calls += 1
        call.service.pending += 1
        self.pressure.on_call_open(call)
        self.deadlines.watch(now_s + caller.deadline_s)
        service.send_call(call, data)
        return True

    def cancel(self, caller: CallPeer, request_id: bytes) -> None:
        call = caller.calls.get(request_id)
        if call is None:
            self.counters.count("refused", "unknown_cancel")
        else:
            self._fail(call, StatusCode.CANCELLED, "cancelled by the caller", cancel=True)

    def refuse(
        self, caller: CallPeer, request_id: bytes, address: bytes, size: int, why: ServiceStatus
    ) -> None:
        """The one FULL of a call that never opened; `size` is that of its data."""
        self._ended_by_code[why.code] += 1
        if self.audit is not None:
            self.audit.add(EndedCall.refused(caller, address, size, why.code, self._clock()))
        caller.send_failure(request_id, why.code, why.message)

    # --- what services do

    def reply(self, service: CallPeer, call_id: bytes, code: int, kind: int, data: Buffer) -> bool:
        """False: it has to wait for the caller, and is not read until then."""
        call = service.serving.get(call_id)
        if call is None:
            self.counters.count("dropped", "unknown_call")
            return True
        caller = cast("CallPeer", call.caller)
        if not self.pressure.can_forward(call, partial=kind == PARTIAL):
            self.pressure.wait(service, caller)
            return False
        size = len(memoryview(data))
        if kind == PARTIAL:
            call.restart_clock(self._clock())
            caller.send_reply(call.request_id, code, kind, data)
            self.pressure.on_partial(call, size)
        else:
            call.reply_bytes += size
            self._close(call, code)
            caller.send_reply(call.request_id, code, kind, data)
        return True

    def reply_too_large(self, service: CallPeer, call_id: bytes) -> None:
        call = service.serving.get(call_id)
        if call is None:
            self.counters.count("dropped", "unknown_call")
        else:
            self._fail(call, StatusCode.TOO_LARGE, "a reply is over max_packet_bytes", cancel=True)

    # --- what is told of them

    def stats(self) -> dict[str, Any]:
        open_calls = sum(len(peer.calls) for peer in self.peers)
        ended = self._ended_by_code + Counter(
            {int(StatusCode.OK): self.desk.answered, int(StatusCode.FAILURE): self.desk.failed}
        )
        return {
            "connections": len(self.peers),
            "services": len(self.services),
            "calls": self.desk.opened,
            "open_calls": open_calls,
            "serving": sum(len(peer.serving) for peer in self.peers),
            "full": len(self.pressure.full),
            "waiting": sum(peer.halted for peer in self.peers),
            "ended": {str(int(code)): count for code, count in sorted(ended.items())},
        }

    # --- inside

    def _call_refusal(self, caller: CallPeer, request_id: bytes) -> ServiceStatus | None:
        if not 0 < len(request_id) <= MAX_REQUEST_ID_BYTES:
            text = f"a request id has 1 to {MAX_REQUEST_ID_BYTES} bytes"
            return ServiceStatus(StatusCode.BAD_REQUEST, text)
        if request_id in caller.calls:
            return ServiceStatus(StatusCode.CONFLICT, "a call with this request id is open")
        if len(caller.calls) >= self._limits.max_open_calls:
            self.counters.count("refused", "max_open_calls")
            return ServiceStatus(
                StatusCode.UNAVAILABLE, f"max_open_calls: {self._limits.max_open_calls}"
            )
        return None

    def _call_built_in(self, caller: CallPeer, request_id: bytes, name: str, data: bytes) -> None:
        found = self._built_in.answer(name, data)
        if found is None:
            why = ServiceStatus(StatusCode.NOT_FOUND, f"no service {name!r}")
            self.refuse(caller, request_id, name.encode(), len(data), why)
            return
        self.desk.opened += 1
        self._ended_by_code[StatusCode.OK] += 1
        if self.audit is not None:
            self.audit.add(EndedCall.by_bus(caller, name, len(data), len(found), self._clock()))
        caller.send_reply(request_id, StatusCode.OK, FULL, found)

    def _fail(self, call: Call, code: StatusCode, message: str, *, cancel: bool) -> None:
        """The bus ends it. The service is told first: both may be one connection."""
        self._close(call, code)
        if cancel and not call.end.gone:
            cast("CallPeer", call.end).send_cancel(call.id)
        if not call.caller.gone:
            cast("CallPeer", call.caller).send_failure(call.request_id, code, message)

    def _expire(self, call: Call) -> None:
        text = f"no reply for {call.caller.deadline_s:g} s"
        self._fail(call, StatusCode.DEADLINE, text, cancel=True)

    def _close(self, call: Call, code: int) -> None:
        call.caller.calls.pop(call.request_id, None)
        call.end.serving.pop(call.id, None)
        call.service.pending -= 1
        self._ended_by_code[code if code in CODES else StatusCode.FAILURE] += 1
        self.pressure.on_call_end(call)
        if self.desk.log is not None:
            self.desk.log.append((call, code, self._clock()))
