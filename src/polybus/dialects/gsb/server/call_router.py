"""Routes calls from callers to services. Every call ends in exactly one FULL reply.

call_table.pyx has the rules of calls and replies. This is their slow path: what needs names,
rules, texts, timers, or a wait.

    caller                    the bus                          service
      │ call(address, id) ───▶ open: two tables ──────────────▶ │ CallRequest(own id)
      │ ◀─────────────────────── PARTIAL, in order ◀─────────── │
      │ ◀─────────────────────── FULL: closed ◀──────────────── │

The bus ends a call if its caller cancels it (499), its service disconnects (503) or is too slow
(504), a reply is too large (413), a change of the rules revokes the right to call (403) or to
the service's name (503), or the bus stops (503). The service then gets a cancel, if it is still
connected, and its later replies are counted and dropped. A caller that disconnects cancels all
its calls.

The bus itself serves the names under `sys/`:

    sys/services   every registered name: {id, since_ms, calls, pending}
    sys/ping       returns its data
    sys/stats      the counters of the bus
    sys/nodes      the id of this node, and the nodes that it knows
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgpack

from polybus.dialects.gsb.codec import FULL
from polybus.dialects.gsb.gsb_packets import MAX_HOPS
from polybus.dialects.gsb.server.back_pressure import MAX_WINDOW, MIN_WINDOW, BackPressure
from polybus.dialects.gsb.server.call_log import CallLog
from polybus.dialects.gsb.server.call_table import CallTable, OpenCall, Refusal, overdue
from polybus.dialects.gsb.server.peer_liveness import PingMonitor, StuckPeerMonitor
from polybus.dialects.gsb.server.service_registry import ServiceRegistry, ServiceStatus
from polybus.dialects.gsb.service_address import PUBLIC_PING, StatusCode

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.bus.timers import Timer, Timers
    from polybus.dialects.gsb import gsb_pb2 as pb
    from polybus.dialects.gsb.limits import GsbLimits
    from polybus.dialects.gsb.network.network import Network
    from polybus.dialects.gsb.server.call_table import CallingNode, Route
    from polybus.dialects.gsb.server.session import GsbSession
    from polybus.model.identity import Identity


NEVER = float("inf")
MIN_STEP_S = 0.01  # between two checks: how late a deadline may be noticed
IDLE_RATIO = 20  # checks take at most a twentieth of the loop's time


class CallDeadlines:
    """Calls `expire` for each call over its deadline.

    A call's clock starts again with each reply. It is stopped while the service is out of
    credit and while the bus does not read from it, since neither is the service's fault.

    One timer serves all calls: it is set for the earliest deadline, and checks all open calls
    when it fires. A call that is answered in time costs one comparison.
    """

    def __init__(
        self,
        endpoints: Iterable[GsbSession],
        table: CallTable,
        timers: Timers,
        clock: Callable[[], float],
        expire: Callable[[OpenCall], None],
    ) -> None:
        self._endpoints = endpoints
        self._table = table
        self._timers = timers
        self._clock = clock
        self._expire = expire
        self._timer: Timer | None = None
        table.next_due_s = NEVER

    def set_timer(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._table.next_due_s = due_s
        if due_s < NEVER:
            self._timer = self._timers.call_later(
                max(0.0, due_s - self._clock()), self._check_calls
            )

    def _check_calls(self) -> None:
        self._timer = None
        self._table.next_due_s = NEVER
        now_s = self._clock()
        late, nearest_s = overdue(self._endpoints, now_s)
        if nearest_s is not None:
            took_s = self._clock() - now_s
            self.set_timer(max(nearest_s, now_s + MIN_STEP_S, now_s + IDLE_RATIO * took_s))
        for call in late:
            self._expire(call)


# The refusals of call_table.pyx.
REFUSALS = {
    Refusal.BAD_REQUEST_ID: ServiceStatus(
        StatusCode.BAD_REQUEST, "a request id must have 1 to 255 bytes"
    ),
    Refusal.ID_IN_USE: ServiceStatus(
        StatusCode.CONFLICT, "a call with this request id is already open"
    ),
    Refusal.TOO_MANY_CALLS: ServiceStatus(StatusCode.UNAVAILABLE, "max_open_calls is reached"),
    # A call may overtake the announcement of a node that has just started.
    Refusal.UNANNOUNCED_RUN: ServiceStatus(
        StatusCode.UNAVAILABLE, "the announcement of one of the two nodes has not arrived"
    ),
    Refusal.FORGED_CALL: ServiceStatus(StatusCode.DENIED, "the call is not signed by its node"),
    Refusal.TOO_MANY_HOPS: ServiceStatus(
        StatusCode.UNAVAILABLE, f"the node is more than {MAX_HOPS} links away"
    ),
    Refusal.FULL_WAY: ServiceStatus(StatusCode.UNAVAILABLE, "the way to the service is full"),
}
# The refusals with a counter of their own.
COUNTED = {Refusal.TOO_MANY_CALLS: "max_open_calls", Refusal.FORGED_CALL: "forged_call"}


class CallRouter:
    def __init__(
        self,
        broker: Broker,
        limits: GsbLimits,
        timers: Timers,
        owner: Identity,
        network: Network,
    ) -> None:
        """`owner` is the identity of the bus, which owns the topic of the call log."""
        self._broker = broker
        self._limits = limits
        self._clock = broker.now_s
        self.counters = broker.counters
        self.peers: dict[GsbSession, None] = {}
        # The most that one outbox may hold. At half of it the bus stops reading from every
        # connection that adds to it, so half must hold the high-water mark and one packet.
        self.max_outbox_bytes = max(
            broker.limits.outbox_max_bytes, 2 * (limits.outbox_full_bytes + limits.max_packet_bytes)
        )
        table = self.table = CallTable(
            broker.now_s,
            self,
            StatusCode,
            max_packet_bytes=limits.max_packet_bytes,
            max_open_calls=limits.max_open_calls,
            free_partials=limits.free_partials,
            free_bytes=limits.free_bytes,
            window_bytes=limits.outbox_full_bytes,
            min_window=MIN_WINDOW,
            max_window=MAX_WINDOW,
            hard_limit_bytes=self.max_outbox_bytes // 2,
            max_hops=MAX_HOPS,
        )
        self.pressure = BackPressure(broker.now_s)
        self.services = ServiceRegistry(broker, table, limits, network)
        self.network = network
        self.deadlines = CallDeadlines(self.peers, table, timers, broker.now_s, self._expire)
        self.pings = PingMonitor(broker, limits)
        self._stuck = StuckPeerMonitor(self.pressure, broker, limits)
        # The services that the bus answers itself: the data of a call to the data of its reply.
        self._built_in: dict[str, Callable[[bytes], bytes]] = {
            "sys/services": lambda _: msgpack.packb(self.services.describe()),
            "sys/ping": lambda data: data,
            PUBLIC_PING: lambda data: data,  # of this node by its own id
            "sys/stats": lambda _: msgpack.packb(broker.stats()),
            "sys/nodes": lambda _: msgpack.packb(network.describe()),
        }
        self.audit = CallLog(broker, table, owner) if limits.audit else None
        broker.policy.on_change(self._end_denied)
        broker.on_tick += [self.pings.tick, self._stuck.tick]
        broker.overview.sections["gsb"] = self.stats
        network.start(self)
        if self.audit is not None:
            broker.on_tick.append(self.audit.tick)

    # --- connections

    def join(self, peer: GsbSession) -> None:
        self.peers[peer] = None
        peer.deadline_s = self._limits.deadline_ms / 1000
        peer.heard_s = self._clock()

    def on_hello(self, peer: GsbSession, hello: pb.Hello) -> None:
        """Apply the options of a connection's hello."""
        peer.deadline_s = (hello.deadline_ms or self._limits.deadline_ms) / 1000
        peer.credits = hello.credits
        if hello.ping:
            self.pings.peers[peer] = None

    def on_hangup(self, peer: GsbSession) -> None:
        """Release the peer's names at once. Packets that it has sent are still handled."""
        self.services.unregister_all(peer)

    def leave(self, peer: GsbSession) -> None:
        if peer.gone:
            return
        peer.gone = True
        self.peers.pop(peer, None)
        self.pings.peers.pop(peer, None)
        self.services.unregister_all(peer)
        if peer.link is not None:
            self.network.on_lost(peer.link)
        if peer.channels:
            self.network.channels.leave(peer)
        for call in list(peer.serving.values()):
            lost = "the link to its node is broken" if peer.is_link else "the service went away"
            self.fail(call, StatusCode.UNAVAILABLE, lost, cancel=False)
        for call in list(peer.calls.values()):
            self.fail(call, StatusCode.CANCELLED, "the caller went away", cancel=True)
        self.pressure.remove(peer)

    def stop(self) -> None:
        """End all open calls, because the bus stops."""
        for call in [call for peer in self.peers for call in peer.calls.values()]:
            self.fail(call, StatusCode.UNAVAILABLE, "the bus is stopping", cancel=True)

    # --- requests of callers

    def resolve(
        self, caller: GsbSession, address: bytes, request_id: bytes, data: bytes
    ) -> Route | None:
        """Return the route of a call. Returns None if the call is answered or refused."""
        route = self.services.route(caller, address)
        if isinstance(route, ServiceStatus):
            self.refuse(caller, request_id, address, len(data), route)
            return None
        if isinstance(route, str):
            self.call_built_in(caller, request_id, route, data)
            return None
        return route

    def cancel(self, caller: GsbSession, request_id: bytes) -> None:
        call = caller.calls.get(request_id)
        if call is None:
            self.counters.count("refused", "unknown_cancel")
        else:
            self.fail(call, StatusCode.CANCELLED, "cancelled by the caller", cancel=True)

    def refuse_call(
        self,
        caller: GsbSession,
        refusal: Refusal,
        request_id: bytes,
        address: bytes,
        size: int,
        origin: CallingNode | None,
    ) -> None:
        """Refuse a call for a reason of call_table.pyx. `origin` is the node that has signed it."""
        if refusal in COUNTED:
            self.counters.count("refused", COUNTED[refusal])
        status = REFUSALS[refusal]._replace(origin=origin)
        self.refuse(caller, request_id, address, size, status)

    def refuse(
        self,
        caller: GsbSession,
        request_id: bytes,
        address: bytes,
        size: int,
        status: ServiceStatus,
    ) -> None:
        """Send the FULL reply of a call that was not opened. `size` is the size of its data."""
        self._log_unopened(caller, address, size, status.code, status.origin)
        if not caller.gone:
            caller.send_failure(request_id, status.code, status.message)

    def _end_denied(self) -> None:
        """Release names and end open calls that the rules no longer allow."""
        for service in self.services.find_denied():
            endpoint = service.endpoint
            self.services.unregister(endpoint, service.id)
            self._broker.count_refusal(endpoint.connection, "service_revoked", service.id.encode())
            text = "the service may no longer use its name"
            for call in [one for one in endpoint.serving.values() if one.service is service]:
                self.fail(call, StatusCode.UNAVAILABLE, text, cancel=True)
        for call in [call for peer in self.peers for call in peer.calls.values()]:
            if not self.services.may_call(call):
                text = "not allowed to call any longer"
                if self.fail(call, StatusCode.DENIED, text, cancel=True):
                    connection = call.caller.connection
                    self._broker.count_refusal(connection, "call_revoked", call.address)

    # --- requests of services

    def on_unknown_reply(self) -> None:
        """Count a reply to a call that has ended, or never was."""
        self.counters.count("dropped", "unknown_call")

    def on_blocked_reply(self, call: OpenCall, is_partial: bool) -> bool:
        """Make the service wait. Returns True if the call is ended instead, and the reply dropped.

        Two links that wait for each other would wait forever. And a node that grants credit
        and does not read must not stop a service.
        """
        service, caller = call.endpoint, call.caller
        is_full_link = caller.is_link and not caller.has_room()
        if service.is_link or is_full_link:
            text = "the caller takes its replies too slowly"
            self.fail(call, StatusCode.UNAVAILABLE, text, cancel=is_partial)
            return True
        self.pressure.wait(service, caller)
        return False

    def reply_too_large(self, service: GsbSession, call_id: bytes) -> None:
        """End the call of a reply over max_packet_bytes, which was skipped."""
        call = service.serving.get(call_id)
        if call is None:
            self.on_unknown_reply()
        else:
            self.fail(
                call, StatusCode.TOO_LARGE, "a reply is larger than max_packet_bytes", cancel=True
            )

    # --- statistics

    def stats(self) -> dict[str, Any]:
        open_calls = sum(len(peer.calls) for peer in self.peers)
        return {
            "connections": len(self.peers),
            "services": len(self.services),
            "calls": self.table.opened,
            "open_calls": open_calls,
            "serving": sum(len(peer.serving) for peer in self.peers),
            "full": len(self.pressure.full),
            "waiting": sum(peer.halted for peer in self.peers),
            "ended": {str(code): count for code, count in self.table.ended.items()},
            "network": self.network.stats(),
        }

    # --- inside

    def call_built_in(self, caller: GsbSession, request_id: bytes, name: str, data: bytes) -> None:
        handler = self._built_in.get(name)
        if handler is None:
            status = ServiceStatus(StatusCode.NOT_FOUND, f"no service {name!r}")
            self.refuse(caller, request_id, name.encode(), len(data), status)
            return
        self.answer(caller, request_id, name, len(data), handler(data))

    def answer(
        self,
        caller: GsbSession,
        request_id: bytes,
        name: str,
        size: int,
        reply: bytes,
        origin: CallingNode | None = None,
    ) -> None:
        """Send the reply of a service of the bus itself. `size` is the size of the call's data."""
        self.table.opened += 1
        self._log_unopened(caller, name.encode(), size, StatusCode.OK, origin, name, len(reply))
        if not caller.gone:
            caller.send_reply(request_id, StatusCode.OK, FULL, reply)

    def _log_unopened(
        self,
        caller: GsbSession,
        address: bytes,
        size: int,
        code: StatusCode,
        origin: CallingNode | None,
        service: str = "",
        reply_bytes: int = 0,
    ) -> None:
        """Count a call that ends without being opened: refused, or answered by the bus itself.

        `origin` is the node that has signed it. Without one the call is that of its connection,
        which is the neighbour's if it is a link.
        """
        self.table.count_end(code)
        if origin is not None:
            origin.account.add(size, reply_bytes, code != StatusCode.OK)
        if self.audit is not None:
            name = caller.caller_name if origin is None else origin.name
            self.audit.add(name, address, size, code, service, reply_bytes)

    def fail(self, call: OpenCall, code: StatusCode, message: str, *, cancel: bool) -> bool:
        """End a call with a failure of the bus. Returns False if it has ended before."""
        if not self.table.end(call, code):
            return False
        # The cancel is sent first because caller and service may be the same connection.
        if cancel and not call.endpoint.gone:
            call.endpoint.send_cancel(call.id)
        if not call.caller.gone:
            call.caller.send_failure(call.request_id, code, message)
        return True

    def fail_too_large(self, call: OpenCall) -> None:
        """End a call of this node that is too large for its link."""
        text = "the call is too large for a link"
        self.fail(call, StatusCode.TOO_LARGE, text, cancel=False)

    def _expire(self, call: OpenCall) -> None:
        text = f"no reply for {call.deadline_s:g} s"
        self.fail(call, StatusCode.DEADLINE, text, cancel=True)
