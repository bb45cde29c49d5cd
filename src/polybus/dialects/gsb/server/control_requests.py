"""Requests without an id: registering, subscribing, broadcasting. Answered in their order."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from polybus.bus.request_outcome import OutcomeKind, RequestOutcome
from polybus.bus.subscriptions import SubscribeResult
from polybus.dialects.gsb import control_packets
from polybus.dialects.gsb.server.ordered_replies import OrderedReplies, ReplySlot
from polybus.dialects.gsb.server.service_registry import OK_STATUS, ServiceStatus
from polybus.dialects.gsb.service_address import StatusCode
from polybus.errors import InvalidTopic
from polybus.kernel.fanout import BLOCKED
from polybus.model import topic_name
from polybus.model.access_rule import PRODUCE

if TYPE_CHECKING:
    from polybus.dialects.gsb.server.session import GsbServer, GsbSession

OUTCOMES = {
    OutcomeKind.OK: StatusCode.OK,
    OutcomeKind.NO: StatusCode.DENIED,
    OutcomeKind.DOES_NOT_EXIST: StatusCode.NOT_FOUND,
    OutcomeKind.OVER_QUOTA: StatusCode.DENIED,
}


class ControlRequests:
    """Carries out the requests of one connection; False: not now, its session is halted."""

    def __init__(self, dialect: GsbServer, session: GsbSession) -> None:
        self._broker = dialect.broker
        self._services = dialect.calls.services
        self._session = session
        self._answers = OrderedReplies(session.send)
        verbs: dict[str, Callable[[Any], bool]] = {
            "register_request": self._register,
            "unregister_request": self._unregister,
            "subscribe_request": self._subscribe,
            "unsubscribe_request": self._unsubscribe,
            "broadcast_request": self._broadcast,
        }
        self.table = {kind: partial(self._admit, verb) for kind, verb in verbs.items()}

    @property
    def unanswered(self) -> int:
        return len(self._answers)

    def _admit(self, carry_out: Callable[[Any], bool], request: Any) -> bool:
        if self._exceeds_uncommitted(0):
            self._session.halt()
            return False
        return carry_out(request)

    def _exceeds_uncommitted(self, size: int) -> bool:
        """Does so much wait for the disk that this has to wait too? Not if nothing can follow."""
        unsettled = self._answers.pending_bytes
        most = self._broker.max_uncommitted_bytes
        return bool(unsettled) and unsettled + size > most and not self._session.lifted

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
        found = self._broker.unsubscribe(self._session.party, name)
        answer = (
            OK_STATUS
            if found
            else ServiceStatus(StatusCode.NOT_FOUND, "there is no such subscription")
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
        """To subscribers now, who are told whose it is."""
        ends = array("i", [0, len(data)])
        with self._broker.senders.sending_as(self._session.caller_name):
            return self._broker.publish(self._session.party, name, ends, data)

    def _wait_for_reader(self) -> bool:
        """A reader of another dialect is full: its writers wait for it."""
        if self._session.lifted:  # this one will not be there any more
            self._broker.counters.count("dropped", "disconnected")
            return True
        self._session.halt()
        return False

    def _publish_durable(self, name: bytes, data: bytes) -> bool:
        """Answered when it is on disk."""
        party, keeping = self._session.party, self._broker.publisher
        creator = self._broker.topic_names.creator_of(name) if self._broker.topic_names else None
        if not self._broker.policy.allows(party.pipe.identity, PRODUCE, name, creator):
            self._broker.count_refusal(party, "produce_denied", name)
            refused = ServiceStatus(
                StatusCode.DENIED, f"not allowed to broadcast to {name.decode()!r}"
            )
            return self._answer("broadcast_request", refused)
        if self._exceeds_uncommitted(len(data)):
            self._session.halt()
            return False
        assert keeping is not None
        slot = self._answers.reserve(len(data))
        heard_of = self._broker.senders.track(name, self._session.caller_name)
        then = partial(self._on_committed, slot, heard_of)
        keeping.publish_with_outcome(name, array("i", [0, len(data)]), data, then)
        return True

    def _on_committed(
        self,
        slot: ReplySlot,
        heard_of: Callable[[int], None],
        outcome: RequestOutcome,
        first_id: int,
    ) -> None:
        heard_of(first_id)
        code = OUTCOMES.get(outcome.kind, StatusCode.DENIED)
        if code and self._session.gone:
            self._broker.counters.count("dropped", outcome.text or outcome.kind.value)
        text = "" if code is StatusCode.OK else outcome.text or outcome.kind.value
        self._answers.fulfil(slot, self._encoded("broadcast_request", ServiceStatus(code, text)))
        self._session.schedule_retry()

    def _answer(self, request: str, answer: ServiceStatus) -> bool:
        self._answers.add(self._encoded(request, answer))
        return True

    def _encoded(self, request: str, answer: ServiceStatus) -> bytes:
        return control_packets.reply(self._session.ipc, request, answer.code, answer.message)
