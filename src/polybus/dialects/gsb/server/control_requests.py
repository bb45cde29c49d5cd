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
from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.server.gsb_packets import frame
from polybus.dialects.gsb.server.service_registry import OK_STATUS, ServiceStatus
from polybus.dialects.gsb.service_address import StatusCode
from polybus.errors import InvalidTopic
from polybus.kernel.fanout import BLOCKED
from polybus.model import topic_name
from polybus.model.access_rule import PRODUCE

if TYPE_CHECKING:
    from polybus.dialects.gsb.server.session import GsbServer, GsbSession


def encode_cancel(ipc: bool, call_id: bytes) -> bytes:
    return frame(ipc, _packet(cancel=pb.Cancel(request_id=call_id.decode())))


def encode_credit(ipc: bool, call_id: bytes, replies: int) -> bytes:
    return frame(ipc, _packet(credit=pb.Credit(request_id=call_id.decode(), replies=replies)))


def encode_ping(ipc: bool, token: bytes) -> bytes:
    return frame(ipc, _packet(ping=pb.Ping(token=token)))


def encode_pong(ipc: bool, token: bytes) -> bytes:
    return frame(ipc, _packet(pong=pb.Pong(token=token)))


def encode_reply(ipc: bool, request: str, code: int, message: str) -> bytes:
    """Return the reply to a request of this kind."""
    packet = pb.Packet()
    answer: Any = getattr(packet, request.replace("_request", "_reply"))
    answer.SetInParent()  # else a reply without code and message would have no kind
    answer.code = code
    answer.message = message
    return frame(ipc, packet.SerializeToString())


def _packet(
    *,
    cancel: pb.Cancel | None = None,
    credit: pb.Credit | None = None,
    ping: pb.Ping | None = None,
    pong: pb.Pong | None = None,
) -> bytes:
    return pb.Packet(cancel=cancel, credit=credit, ping=ping, pong=pong).SerializeToString()


# The cost of a waiting reply besides its request's data: an object and a few bytes.
SLOT_BYTES = 128


class OrderedReplies:
    """Replies of one connection, sent in the order of their requests."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._slots: deque[ReplySlot] = deque()
        self.pending_bytes = 0

    def __len__(self) -> int:
        """Return the number of waiting replies."""
        return len(self._slots)

    def add(self, data: bytes) -> None:
        if self._slots:
            self._append(ReplySlot(0, data))
        else:
            self._send(data)

    def reserve(self, size: int) -> ReplySlot:
        """Reserve the place of a later reply. `size` is the size of the request's data."""
        return self._append(ReplySlot(size))

    def fulfil(self, slot: ReplySlot, data: bytes) -> None:
        slot.data = data
        while self._slots and (ready := self._slots[0].data) is not None:
            self.pending_bytes -= self._slots.popleft().weight
            self._send(ready)

    def _append(self, slot: ReplySlot) -> ReplySlot:
        self._slots.append(slot)
        self.pending_bytes += slot.weight
        return slot


class ReplySlot:
    __slots__ = ("data", "weight")

    def __init__(self, size: int, data: bytes | None = None) -> None:
        self.weight = size + SLOT_BYTES
        self.data = data


OUTCOMES = {
    OutcomeKind.OK: StatusCode.OK,
    OutcomeKind.NO: StatusCode.DENIED,
    OutcomeKind.DOES_NOT_EXIST: StatusCode.NOT_FOUND,
    OutcomeKind.OVER_QUOTA: StatusCode.DENIED,
}


class ControlRequests:
    """Executes the requests of one connection.

    A handler returns False if its request has to wait. The session is then halted.
    """

    def __init__(self, dialect: GsbServer, session: GsbSession) -> None:
        self._broker = dialect.broker
        self._services = dialect.calls.services
        self._session = session
        self._replies = OrderedReplies(session.send)
        verbs: dict[str, Callable[[Any], bool]] = {
            "register_request": self._register,
            "unregister_request": self._unregister,
            "subscribe_request": self._subscribe,
            "unsubscribe_request": self._unsubscribe,
            "broadcast_request": self._broadcast,
        }
        self.handlers = {kind: partial(self._admit, verb) for kind, verb in verbs.items()}

    @property
    def unanswered(self) -> int:
        return len(self._replies)

    def _admit(self, execute: Callable[[Any], bool], request: Any) -> bool:
        if self._exceeds_uncommitted(0):
            self._session.halt()
            return False
        return execute(request)

    def _exceeds_uncommitted(self, size: int) -> bool:
        """Return True if uncommitted bytes are over the limit. A draining session never waits."""
        pending = self._replies.pending_bytes
        limit = self._broker.max_uncommitted_bytes
        return bool(pending) and pending + size > limit and not self._session.draining

    def _register(self, request: Any) -> bool:
        answer = self._services.register(self._session, request.service_id)
        return self._answer("register_request", answer)

    def _unregister(self, request: Any) -> bool:
        answer = self._services.unregister(self._session, request.service_id)
        return self._answer("unregister_request", answer)

    def _subscribe(self, request: Any) -> bool:
        return self._answer("subscribe_request", self._subscribe_topic(request.topic))

    def _subscribe_topic(self, topic: str) -> ServiceStatus:
        try:
            name = topic_name.check_topic_name(topic)
        except InvalidTopic as error:
            return ServiceStatus(StatusCode.BAD_REQUEST, str(error))
        result = self._broker.subscribe(self._session.party, name)
        if result in (SubscribeResult.NEW, SubscribeResult.ALREADY):
            return OK_STATUS
        if result is SubscribeResult.DENIED:
            return ServiceStatus(StatusCode.DENIED, f"not allowed to subscribe to {topic!r}")
        self._broker.count_refusal(self._session.party, result.value, name)
        return ServiceStatus(StatusCode.DENIED, f"{result.value} is reached")

    def _unsubscribe(self, request: Any) -> bool:
        name = request.topic.encode("utf-8", "surrogatepass")
        removed = self._broker.unsubscribe(self._session.party, name)
        answer = (
            OK_STATUS if removed else ServiceStatus(StatusCode.NOT_FOUND, "no such subscription")
        )
        return self._answer("unsubscribe_request", answer)

    def _broadcast(self, request: Any) -> bool:
        try:
            name = topic_name.check_topic_name(request.topic)
        except InvalidTopic as error:
            return self._answer(
                "broadcast_request", ServiceStatus(StatusCode.BAD_REQUEST, str(error))
            )
        if self._broker.is_durable(name):
            return self._publish_durable(name, request.data)
        source = self._session.party.source
        denied = source.denied
        routed = self._publish(name, request.data)
        if routed.stop == BLOCKED:
            return self._wait_for_reader()
        refused = ServiceStatus(StatusCode.DENIED, f"not allowed to broadcast to {request.topic!r}")
        return self._answer("broadcast_request", OK_STATUS if source.denied == denied else refused)

    def _publish(self, name: bytes, data: bytes) -> Any:
        """Deliver to subscribers now. GSB subscribers also get the caller's name."""
        ends = array("i", [0, len(data)])
        with self._session.senders.sending_as(self._session.caller_name):
            return self._broker.publish(self._session.party, name, ends, data)

    def _wait_for_reader(self) -> bool:
        """Wait for a full reader of another dialect, which blocks its producers."""
        if self._session.draining:  # the session ends and cannot wait
            self._broker.counters.count("dropped", "disconnected")
            return True
        self._session.halt()
        return False

    def _publish_durable(self, name: bytes, data: bytes) -> bool:
        """Commit the message. The reply is sent when it is on disk."""
        party, publisher = self._session.party, self._broker.durable
        creator = self._broker.durable.creator_of(name)
        if not self._broker.policy.allows(party.pipe.identity, PRODUCE, name, creator):
            self._broker.count_refusal(party, "produce_denied", name)
            refused = ServiceStatus(
                StatusCode.DENIED, f"not allowed to broadcast to {name.decode()!r}"
            )
            return self._answer("broadcast_request", refused)
        if self._exceeds_uncommitted(len(data)):
            self._session.halt()
            return False
        slot = self._replies.reserve(len(data))
        on_id = self._session.senders.track(name, self._session.caller_name)
        then = partial(self._on_committed, slot, on_id)
        publisher.publish_with_outcome(name, array("i", [0, len(data)]), data, then)
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
        if code and self._session.gone:
            self._broker.counters.count("dropped", outcome.text or outcome.kind.value)
        text = "" if code is StatusCode.OK else outcome.text or outcome.kind.value
        self._replies.fulfil(slot, self._encoded("broadcast_request", ServiceStatus(code, text)))
        self._session.schedule_retry()

    def _answer(self, request: str, answer: ServiceStatus) -> bool:
        self._replies.add(self._encoded(request, answer))
        return True

    def _encoded(self, request: str, answer: ServiceStatus) -> bytes:
        return encode_reply(self._session.ipc, request, answer.code, answer.message)
