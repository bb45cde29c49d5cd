"""Freud's single requests: each is a call of the bus and the payload of its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.bus.quotas import QUOTAS
from polybus.bus.request_outcome import DOES_NOT_EXIST, OK, OutcomeKind, RequestOutcome
from polybus.dialects.freud.codec import RequestType, subscriber_count, topic_list
from polybus.dialects.freud.server.fair_scheduler import NAME_WEIGHT, READER_WEIGHT
from polybus.dialects.freud.server.pull_reader import PullReader
from polybus.model.access_rule import PRODUCE

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.bus.connection import Connection
    from polybus.dialects.freud.server.ephemeral_topics import EphemeralTopics
    from polybus.dialects.freud.server.request_scanner import SingleRequest

Response = tuple[RequestOutcome, bytes]

# Requests that change nothing: they are skipped when the client is gone.
READ_ONLY_REQUESTS = frozenset((RequestType.LIST_TOPICS, RequestType.COUNT_SUBSCRIBERS))

# Ended subscriptions are removed when `readers` reaches this size, then at twice the rest.
PRUNE_FIRST_AT = 64


class RequestExecutor:
    """Executes the requests of one connection. `readers` are the subscriptions it owns."""

    def __init__(self, broker: Broker, topics: EphemeralTopics, connection: Connection) -> None:
        self._broker = broker
        self._topics = topics
        self._connection = connection
        self._caller = connection.pipe.identity
        self.readers: dict[bytes, PullReader] = {}
        self._prune_at = PRUNE_FIRST_AT
        self._table = {
            RequestType.CREATE_TOPIC: self._create,
            RequestType.DELETE_TOPIC: self._delete,
            RequestType.SUBSCRIBE: self._subscribe,
            RequestType.UNSUBSCRIBE: self._unsubscribe,
            RequestType.LIST_TOPICS: self._list,
            RequestType.COUNT_SUBSCRIBERS: self._count,
        }

    def execute(self, request: SingleRequest) -> Response:
        return self._table[RequestType(request.type)](request.subject)

    def weight(self, request: SingleRequest) -> int:
        """Return the weight of the request beyond REQUEST_WEIGHT (fair_scheduler.py)."""
        if request.type == RequestType.LIST_TOPICS:
            return NAME_WEIGHT * self._topics.known_count
        return READER_WEIGHT * self._topics.fan_out_count(request.subject)

    def can_produce(self, name: bytes) -> bool:
        broker = self._broker
        creator = broker.durable.creator_of(name)
        return broker.policy.allows(self._caller, PRODUCE, name, creator)

    def own(self, reader: PullReader) -> None:
        """Make this connection the owner of a new or a detached subscription."""
        if len(self.readers) >= self._prune_at:
            self.readers = {key: kept for key, kept in self.readers.items() if not kept.gone}
            self._prune_at = 2 * len(self.readers) + PRUNE_FIRST_AT
        self.readers[reader.id] = reader
        self._topics.readers.attach(reader)

    def record_refusal(
        self, outcome: RequestOutcome, verb: str, subject: bytes, count: int = 1
    ) -> None:
        """Count and log a refusal. The quotas count and log theirs themselves."""
        if outcome.kind is OutcomeKind.NO:
            self._broker.count_refusal(self._connection, f"{verb}_denied", subject, count)
        elif outcome.kind is OutcomeKind.OVER_QUOTA and outcome.text not in QUOTAS:
            self._broker.count_refusal(self._connection, outcome.text, subject, count)

    def _create(self, name: bytes) -> Response:
        outcome = self._topics.create(self._caller, name)
        self.record_refusal(outcome, "create", name)
        return outcome, b""

    def _delete(self, name: bytes) -> Response:
        outcome = self._topics.delete(self._caller, name)
        self.record_refusal(outcome, "delete", name)
        return outcome, b""

    def _subscribe(self, name: bytes) -> Response:
        result = self._topics.subscribe(self._caller, name)
        if isinstance(result, PullReader):
            self.own(result)
            return OK, result.id
        self.record_refusal(result, "subscribe", name)
        return result, b""

    def _unsubscribe(self, reader_id: bytes) -> Response:
        reader = self._topics.plain_delivery.find_reader(self._caller.account, reader_id)
        if reader is None:
            return DOES_NOT_EXIST, b""
        self._topics.unsubscribe(reader)
        self.readers.pop(reader_id, None)
        return OK, b""

    def _list(self, _nothing: bytes) -> Response:
        return OK, topic_list(self._topics.names(self._caller))

    def _count(self, name: bytes) -> Response:
        result = self._topics.count(self._caller, name)
        if isinstance(result, int):
            return OK, subscriber_count(result)
        self.record_refusal(result, "count", name)
        return result, b""
