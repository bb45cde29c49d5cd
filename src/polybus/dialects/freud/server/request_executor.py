"""Freud's single requests: each a verb of the bus and the payload of its answer."""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polybus.bus.quotas import QUOTAS
from polybus.bus.request_outcome import DOES_NOT_EXIST, OK, Kind, Outcome
from polybus.dialects.freud.codec import RequestType
from polybus.dialects.freud.server.fair_scheduler import NAME, READER
from polybus.dialects.freud.server.pull_reader import Reader
from polybus.model.access_rule import PRODUCE

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.bus.connection import Party
    from polybus.dialects.freud.server.request_scanner import Produces, Request

Answered = tuple[Outcome, bytes]

# Requests that change nothing: not worth the work when nobody is there to be answered.
QUESTIONS = frozenset((RequestType.LIST_TOPICS, RequestType.COUNT_SUBSCRIBERS))

# Subscriptions that have ended are forgotten when this many have come together, then at twice.
PRUNE_FIRST_AT = 64


class Requests:
    """Carries out the requests of one connection. `readers` are the subscriptions it made."""

    def __init__(self, broker: Broker, party: Party) -> None:
        self._broker = broker
        self._topics = broker.topics
        self._party = party
        self._caller = party.pipe.identity
        self.readers: dict[bytes, Reader] = {}
        self._prune_at = PRUNE_FIRST_AT
        self._table = {
            RequestType.CREATE_TOPIC: self._create,
            RequestType.DELETE_TOPIC: self._delete,
            RequestType.SUBSCRIBE: self._subscribe,
            RequestType.UNSUBSCRIBE: self._unsubscribe,
            RequestType.LIST_TOPICS: self._list,
            RequestType.COUNT_SUBSCRIBERS: self._count,
        }

    def carry_out(self, request: Request) -> Answered:
        return self._table[RequestType(request.type)](request.subject)

    def weight(self, request: Request) -> int:
        """Of carrying it out (see turns.py), beside what every request weighs."""
        if request.type == RequestType.LIST_TOPICS:
            return NAME * self._topics.known_count
        return READER * self._topics.reach(request.subject)

    def may_produce(self, name: bytes) -> bool:
        broker = self._broker
        creator = broker.binding.creator_of(name) if broker.binding else None
        return broker.policy.allows(self._caller, PRODUCE, name, creator)

    def note(self, outcome: Outcome, verb: str, subject: bytes, count: int = 1) -> None:
        """Refusals are counted and logged, with who was refused what.

        The quotas do so themselves.
        """
        if outcome.kind is Kind.NO:
            self._broker.refused(self._party, f"{verb}_denied", subject, count)
        elif outcome.kind is Kind.OVER_QUOTA and outcome.text not in QUOTAS:
            self._broker.refused(self._party, outcome.text, subject, count)

    def _create(self, name: bytes) -> Answered:
        outcome = self._topics.create(self._caller, name)
        self.note(outcome, "create", name)
        return outcome, b""

    def _delete(self, name: bytes) -> Answered:
        outcome = self._topics.delete(self._caller, name)
        self.note(outcome, "delete", name)
        return outcome, b""

    def _subscribe(self, name: bytes) -> Answered:
        result = self._topics.subscribe(self._caller, name)
        if isinstance(result, Reader):
            self._keep(result)
            return OK, result.id
        self.note(result, "subscribe", name)
        return result, b""

    def _keep(self, reader: Reader) -> None:
        if len(self.readers) >= self._prune_at:
            self.readers = {key: one for key, one in self.readers.items() if not one.gone}
            self._prune_at = 2 * len(self.readers) + PRUNE_FIRST_AT
        self.readers[reader.id] = reader

    def _unsubscribe(self, reader_id: bytes) -> Answered:
        reader = self._topics.readers.find(self._caller, reader_id)
        if reader is None:
            return DOES_NOT_EXIST, b""
        self._topics.unsubscribe(reader)
        self.readers.pop(reader_id, None)
        return OK, b""

    def _list(self, _nothing: bytes) -> Answered:
        listed = self._topics.names(self._caller)
        parts = [struct.pack("<I", len(listed))]
        parts += [struct.pack("<I", len(name)) + name for name in listed]
        return OK, b"".join(parts)

    def _count(self, name: bytes) -> Answered:
        result = self._topics.count(self._caller, name)
        if isinstance(result, int):
            return OK, struct.pack("<I", result)
        self.note(result, "count", name)
        return result, b""


@dataclass(frozen=True, slots=True)
class HalfProduces:
    """Some messages of a group that had to be taken apart."""

    topic: bytes
    count: int
    offsets: bytes
    bodies: bytes


def halves(group: Produces | HalfProduces) -> list[HalfProduces]:
    """The group in two, in its order. Half by half, not one by one: what waits stays small."""
    ends = array("i")
    ends.frombytes(group.offsets)
    middle = group.count // 2
    return [_part(group, ends[: middle + 1]), _part(group, ends[middle:])]


def _part(group: Produces | HalfProduces, ends: array[int]) -> HalfProduces:
    start = ends[0]
    offsets = array("i", [end - start for end in ends]).tobytes()
    return HalfProduces(group.topic, len(ends) - 1, offsets, group.bodies[start : ends[-1]])
