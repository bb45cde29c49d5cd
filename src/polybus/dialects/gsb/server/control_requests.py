"""Requests without an id: register, subscribe, broadcast. The bus replies in their order.

Most replies are known at once. A broadcast to a durable topic is answered when it is on disk,
and the replies to later requests wait for it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from polybus.bus.request_outcome import OutcomeKind, RequestOutcome
from polybus.bus.subscriptions import SubscribeResult
from polybus.dialects.gsb.server.service_registry import OK_STATUS, ServiceStatus
from polybus.dialects.gsb.service_address import NET, StatusCode, parse_address
from polybus.errors import InvalidTopic, MalformedRequest
from polybus.kernel.fanout import BLOCKED
from polybus.model import topic_name
from polybus.model.access_rule import PRODUCE

if TYPE_CHECKING:
    from polybus.dialects.gsb.server.session import GsbServer, GsbSession

BROADCAST, SUBSCRIBE = "broadcast_request", "subscribe_request"
CONTROL_KINDS = frozenset(
    {
        "register_request",
        "unregister_request",
        SUBSCRIBE,
        "unsubscribe_request",
        BROADCAST,
    }
)
# The cost of a waiting reply besides its request's data: an object and a few bytes.
SLOT_BYTES = 128

OUTCOMES = {
    OutcomeKind.OK: StatusCode.OK,
    OutcomeKind.NO: StatusCode.DENIED,
    OutcomeKind.DOES_NOT_EXIST: StatusCode.NOT_FOUND,
    OutcomeKind.OVER_QUOTA: StatusCode.DENIED,
}


class ReplySlot:
    """The place of one reply in the order of replies. `data` is None until it is known."""

    __slots__ = ("data", "weight")

    def __init__(self, size: int, data: bytes | None = None) -> None:
        self.weight = size + SLOT_BYTES
        self.data = data


class ControlRequests:
    """Executes the requests of one connection, and replies in their order."""

    def __init__(self, server: GsbServer, session: GsbSession) -> None:
        self._broker = server.broker
        self._channels = server.channels
        self._session = session
        # Replies that wait for a commit, or for a reply before them.
        self._slots: deque[ReplySlot] = deque()
        self._pending_bytes = 0

    def execute(self, kind: str, packet: Any) -> bool:
        """Execute one request, a packet of either framing. Returns False if it has to wait.

        The session is then halted, and the transport offers the request again.
        """
        if self._must_wait(0):
            return False
        session = self._session
        match kind:
            case "register_request":
                status = session.register(packet.register_request.service_id)
            case "unregister_request":
                status = session.unregister(packet.unregister_request.service_id)
            case "subscribe_request":
                topic = packet.subscribe_request.topic
                if topic.startswith(NET):
                    return self._subscribe_remote(topic)
                status = self._subscribe(topic)
            case "unsubscribe_request":
                removed = self._unsubscribe(packet.unsubscribe_request.topic)
                missing = ServiceStatus(StatusCode.NOT_FOUND, "no such subscription")
                status = OK_STATUS if removed else missing
            case _:
                return self._broadcast(packet.broadcast_request)
        return self._reply(kind, status)

    def _subscribe(self, topic: str) -> ServiceStatus:
        try:
            name = topic_name.check_topic_name(topic)
        except InvalidTopic as error:
            return ServiceStatus(StatusCode.BAD_REQUEST, str(error))
        result = self._broker.subscribe(self._session.connection, name)
        if result in (SubscribeResult.NEW, SubscribeResult.ALREADY):
            return OK_STATUS
        if result is SubscribeResult.DENIED:
            return ServiceStatus(StatusCode.DENIED, f"not allowed to subscribe to {topic!r}")
        if result is SubscribeResult.DAMAGED:
            return ServiceStatus(StatusCode.DENIED, f"topic {topic!r} is damaged")
        self._broker.count_refusal(self._session.connection, result.value, name)
        return ServiceStatus(StatusCode.DENIED, f"{result.value} is reached")

    def _subscribe_remote(self, topic: str) -> bool:
        """Subscribe to a topic of another node. The reply is sent when that node has answered."""
        try:
            name, node = parse_address(topic)
        except MalformedRequest as error:
            return self._reply(SUBSCRIBE, ServiceStatus(StatusCode.BAD_REQUEST, str(error)))
        assert node is not None
        if node == self._channels.node_id:
            # Messages have the topic's own name, and the client waits for this one.
            text = f"{node} is this node: subscribe to {name!r}"
            return self._reply(SUBSCRIBE, ServiceStatus(StatusCode.BAD_REQUEST, text))
        slot = self._append(ReplySlot(0))
        then = partial(self._on_status, SUBSCRIBE, slot)
        self._channels.subscribe(self._session, node, name, then)
        return True

    def _unsubscribe(self, topic: str) -> bool:
        """Returns False if there is no such subscription."""
        if topic.startswith(NET):
            try:
                name, node = parse_address(topic)
            except MalformedRequest:
                return False
            assert node is not None
            return self._channels.unsubscribe(self._session, node, name)
        name_bytes = topic.encode("utf-8", "surrogatepass")
        return self._broker.unsubscribe(self._session.connection, name_bytes)

    def _broadcast(self, request: Any) -> bool:
        session, connection, data = self._session, self._session.connection, request.data
        try:
            name = topic_name.check_topic_name(request.topic)
        except InvalidTopic as error:
            return self._reply(BROADCAST, ServiceStatus(StatusCode.BAD_REQUEST, str(error)))
        if self._broker.is_durable(name):
            return self._publish_durable(name, data)
        denied = connection.source.denied
        with session.senders.sending_as(session.caller_name):
            routed = self._broker.publish(connection, name, array("i", [0, len(data)]), data)
        if routed.stop == BLOCKED:  # a full reader of another dialect blocks its producers
            if session.draining:  # the session ends and cannot wait
                self._broker.counters.count("dropped", "disconnected")
                return True
            session.halt()
            return False
        refused = ServiceStatus(StatusCode.DENIED, f"not allowed to broadcast to {request.topic!r}")
        return self._reply(BROADCAST, OK_STATUS if connection.source.denied == denied else refused)

    def _publish_durable(self, name: bytes, data: bytes) -> bool:
        """Commit the message. The reply is sent when it is on disk."""
        session, durable = self._session, self._broker.durable
        identity, creator = session.connection.pipe.identity, durable.creator_of(name)
        if not self._broker.policy.allows(identity, PRODUCE, name, creator):
            self._broker.count_refusal(session.connection, "produce_denied", name)
            refusal = f"not allowed to broadcast to {name.decode()!r}"
            return self._reply(BROADCAST, ServiceStatus(StatusCode.DENIED, refusal))
        if self._must_wait(len(data)):
            return False
        slot = self._append(ReplySlot(len(data)))
        on_id = session.senders.track(name, session.caller_name)
        then = partial(self._on_committed, slot, on_id)
        durable.publish_with_outcome(name, array("i", [0, len(data)]), data, then)
        return True

    def _on_committed(
        self,
        slot: ReplySlot,
        on_id: Callable[[int], None],
        outcome: RequestOutcome,
        first_id: int,
    ) -> None:
        on_id(first_id)
        code = OUTCOMES.get(outcome.kind, StatusCode.DENIED)
        reason = outcome.text or outcome.kind.value
        if code and self._session.gone:
            self._broker.counters.count("dropped", reason)
        self._on_status(BROADCAST, slot, ServiceStatus(code, reason) if code else OK_STATUS)

    def _on_status(self, kind: str, slot: ReplySlot, status: ServiceStatus) -> None:
        """Send the reply to a request whose outcome is known now, in its order."""
        slot.data = self._session.encode_status(kind, status)
        while self._slots and (ready := self._slots[0].data) is not None:
            self._pending_bytes -= self._slots.popleft().weight
            self._session.send(ready)
        self._session.schedule_retry()

    # --- the order of replies

    def _must_wait(self, size: int) -> bool:
        """Halt the session if its uncommitted bytes are over the limit, unless it drains."""
        pending, limit = self._pending_bytes, self._broker.max_uncommitted_bytes
        if not pending or pending + size <= limit or self._session.draining:
            return False
        self._session.halt()
        return True

    def _append(self, slot: ReplySlot) -> ReplySlot:
        self._slots.append(slot)
        self._pending_bytes += slot.weight
        return slot

    def _reply(self, kind: str, status: ServiceStatus) -> bool:
        data = self._session.encode_status(kind, status)
        if self._slots:
            self._append(ReplySlot(0, data))
        else:
            self._session.send(data)
        return True
