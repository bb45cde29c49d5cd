"""Requests without an id: registering, subscribing, broadcasting. Answered in their order."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from polybus.bus.request_outcome import Kind, Outcome
from polybus.bus.subscriptions import Subscribed
from polybus.dialects.gsb import control_packets
from polybus.dialects.gsb.server.ordered_replies import Answers, Slot
from polybus.dialects.gsb.server.service_registry import DONE, Answer
from polybus.dialects.gsb.service_address import Code
from polybus.errors import InvalidTopic
from polybus.kernel.fanout import BLOCKED
from polybus.model import topic_name
from polybus.model.access_rule import PRODUCE

if TYPE_CHECKING:
    from polybus.dialects.gsb.server.session import GsbDialect, GsbSession

OUTCOMES = {
    Kind.OK: Code.OK,
    Kind.NO: Code.DENIED,
    Kind.DOES_NOT_EXIST: Code.NOT_FOUND,
    Kind.OVER_QUOTA: Code.DENIED,
}


class Requests:
    """Carries out the requests of one connection; False: not now, its session is halted."""

    def __init__(self, dialect: GsbDialect, session: GsbSession) -> None:
        self._broker = dialect.broker
        self._services = dialect.calls.services
        self._session = session
        self._answers = Answers(session.send)
        verbs: dict[str, Callable[[Any], bool]] = {
            "register_request": self._register,
            "unregister_request": self._unregister,
            "subscribe_request": self._subscribe,
            "unsubscribe_request": self._unsubscribe,
            "broadcast_request": self._broadcast,
        }
        self.table = {kind: partial(self._in_turn, verb) for kind, verb in verbs.items()}

    @property
    def unanswered(self) -> int:
        return len(self._answers)

    def _in_turn(self, carry_out: Callable[[Any], bool], request: Any) -> bool:
        if self._is_too_much(0):
            self._session.halt()
            return False
        return carry_out(request)

    def _is_too_much(self, size: int) -> bool:
        """Does so much wait for the disk that this has to wait too? Not if nothing can follow."""
        unsettled = self._answers.unsettled_bytes
        most = self._broker.max_uncommitted_bytes
        return bool(unsettled) and unsettled + size > most and not self._session.lifted

    def _register(self, request: Any) -> bool:
        answer = self._services.register(self._session, request.service_id)
        return self._answer("register_request", answer)

    def _unregister(self, request: Any) -> bool:
        answer = self._services.unregister(self._session, request.service_id)
        return self._answer("unregister_request", answer)

    def _subscribe(self, request: Any) -> bool:
        return self._answer("subscribe_request", self._subscribed(request.topic))

    def _subscribed(self, topic: str) -> Answer:
        try:
            name = topic_name.check(topic)
        except InvalidTopic as error:
            return Answer(Code.BAD_REQUEST, str(error))
        result = self._broker.subscribe(self._session.party, name)
        if result in (Subscribed.NEW, Subscribed.ALREADY):
            return DONE
        if result is Subscribed.DENIED:
            return Answer(Code.DENIED, f"not allowed to subscribe to {topic!r}")
        self._broker.refused(self._session.party, result.value, name)
        return Answer(Code.DENIED, f"{result.value} is reached")

    def _unsubscribe(self, request: Any) -> bool:
        name = request.topic.encode("utf-8", "surrogatepass")
        found = self._broker.unsubscribe(self._session.party, name)
        answer = DONE if found else Answer(Code.NOT_FOUND, "there is no such subscription")
        return self._answer("unsubscribe_request", answer)

    def _broadcast(self, request: Any) -> bool:
        try:
            name = topic_name.check(request.topic)
        except InvalidTopic as error:
            return self._answer("broadcast_request", Answer(Code.BAD_REQUEST, str(error)))
        if self._broker.is_durable(name):
            return self._keep(name, request.data)
        source = self._session.party.source
        denied = source.denied
        routed = self._publish(name, request.data)
        if routed.stop == BLOCKED:
            return self._wait()
        refused = Answer(Code.DENIED, f"not allowed to broadcast to {request.topic!r}")
        return self._answer("broadcast_request", DONE if source.denied == denied else refused)

    def _publish(self, name: bytes, data: bytes) -> Any:
        """To subscribers now, who are told whose it is."""
        ends = array("i", [0, len(data)])
        with self._broker.callers.said_by(self._session.caller_name):
            return self._broker.publish(self._session.party, name, ends, data)

    def _wait(self) -> bool:
        """A reader of another dialect is full: its writers wait for it."""
        if self._session.lifted:  # this one will not be there any more
            self._broker.counters.count("dropped", "disconnected")
            return True
        self._session.halt()
        return False

    def _keep(self, name: bytes, data: bytes) -> bool:
        """Answered when it is on disk."""
        party, keeping = self._session.party, self._broker.keeping
        creator = self._broker.binding.creator_of(name) if self._broker.binding else None
        if not self._broker.policy.allows(party.pipe.identity, PRODUCE, name, creator):
            self._broker.refused(party, "produce_denied", name)
            refused = Answer(Code.DENIED, f"not allowed to broadcast to {name.decode()!r}")
            return self._answer("broadcast_request", refused)
        if self._is_too_much(len(data)):
            self._session.halt()
            return False
        assert keeping is not None
        slot = self._answers.promise(len(data))
        heard_of = self._broker.callers.sent(name, self._session.caller_name)
        then = partial(self._kept, slot, heard_of)
        keeping.produce(name, array("i", [0, len(data)]), data, then)
        return True

    def _kept(
        self, slot: Slot, heard_of: Callable[[int], None], outcome: Outcome, first_id: int
    ) -> None:
        heard_of(first_id)
        code = OUTCOMES.get(outcome.kind, Code.DENIED)
        if code and self._session.gone:
            self._broker.counters.count("dropped", outcome.text or outcome.kind.value)
        text = "" if code is Code.OK else outcome.text or outcome.kind.value
        self._answers.fulfil(slot, self._encoded("broadcast_request", Answer(code, text)))
        self._session.try_again()

    def _answer(self, request: str, answer: Answer) -> bool:
        self._answers.add(self._encoded(request, answer))
        return True

    def _encoded(self, request: str, answer: Answer) -> bytes:
        return control_packets.reply(self._session.ipc, request, answer.code, answer.message)
