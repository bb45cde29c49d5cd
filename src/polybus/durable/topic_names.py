"""A name is one topic, of one kind: how durable ones come to be and go. The loop's alone.

Making a topic takes a write to disk, for which the loop does not wait. So a name
is reserved here first, then made by whoever asked, on its own thread, and then
known to all, or free again. While reserved it counts as durable for everybody
else; whoever asks for the same name meanwhile waits for the same outcome. In the
same way a topic is claimed by whoever changes or drops it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

from polybus.bus.quotas import TOPICS
from polybus.errors import Denied, DoesNotExist, LimitReached, PolybusError, Unavailable, WrongKind
from polybus.model import topic_name
from polybus.model.access_rule import CREATE, DELETE, PRODUCE, SUBSCRIBE
from polybus.model.identity import Identity

if TYPE_CHECKING:
    from polybus.bus.policy import Policy
    from polybus.bus.quotas import Quotas
    from polybus.durable.topic_registry import DurableTopics
    from polybus.model.topic import Topic

CREATOR = "creator"  # a topic's setting: who made it


class NameReservation:
    """A name that is being bound, and what becomes of it."""

    def __init__(self, name: str, caller: Identity) -> None:
        self.name = name
        self.caller = caller
        self.outcome: Future[Topic] = Future()


class TopicNames:
    def __init__(
        self,
        durable: DurableTopics,
        policy: Policy,
        quotas: Quotas,
        is_ephemeral: Callable[[bytes], bool],
    ) -> None:
        self._durable = durable
        self._policy = policy
        self._quotas = quotas
        self._is_ephemeral = is_ephemeral
        self._reserved: dict[str, NameReservation] = {}
        self._claimed: set[int] = set()
        # Who is told of a topic that is there now, and of one that has gone.
        self.on_bound: list[Callable[[Topic], None]] = []
        self.on_removed: list[Callable[[Topic], None]] = []
        # Topics that count against their creators: not those that a lowered quota has no room for.
        self._charged = {
            topic.number
            for topic in durable.topics()
            if quotas.charge(creator_of(topic), TOPICS, 1, trial=True)
        }

    def is_durable(self, name: bytes) -> bool:
        """Is the name bound durable, or about to be?"""
        text = name.decode("utf-8", "surrogateescape")
        return text in self._reserved or self._durable.find(text) is not None

    def creator_of(self, name: bytes) -> Identity | None:
        topic = self._durable.find(name.decode("utf-8", "surrogateescape"))
        return creator_of(topic) if topic else None

    def check_allowed(self, caller: Identity, verb: str, name: str) -> None:
        """`Denied` unless the policy lets the caller do this with the topic."""
        raw = topic_name.check_topic_name(name)
        if not self._policy.allows(caller, verb, raw, self.creator_of(raw), as_admin=True):
            raise Denied(f"the policy does not let {caller.name} {verb} {name}")

    def check_all_allowed(self, caller: Identity, verb: str, topics: Iterable[str]) -> None:
        for name in topics:
            self.check_allowed(caller, verb, name)

    def missing_topic_error(self, name: str) -> PolybusError:
        """What to answer who asks for a durable topic that is not there."""
        if self._is_ephemeral(topic_name.check_topic_name(name)):
            return WrongKind(f"{name} is an ephemeral topic: it lives in memory, and has no log")
        return DoesNotExist(f"there is no durable topic {name!r}")

    def can_see(self, caller: Identity, topic: Topic) -> bool:
        creator = creator_of(topic)
        if caller.owns(creator):
            return True
        raw = topic.name.encode()
        verbs = (PRODUCE, SUBSCRIBE, DELETE)
        return any(self._policy.allows(caller, verb, raw, creator) for verb in verbs)

    def reserve(self, caller: Identity, name: str) -> tuple[Topic | NameReservation, bool]:
        """The topic if it is there; else a reservation, and whether the caller is to fulfil it."""
        raw = topic_name.check_topic_name(name)
        topic = self._durable.find(name)
        if topic is not None:
            return topic, False
        if self._is_ephemeral(raw):
            raise WrongKind(f"{name} is an ephemeral topic: it cannot be durable, too")
        self.check_allowed(caller, CREATE, name)
        if name in self._reserved:
            return self._reserved[name], False
        if not self._quotas.charge(caller, TOPICS, 1):
            raise LimitReached(TOPICS)
        reservation = self._reserved[name] = NameReservation(name, caller)
        return reservation, True

    def complete(self, reservation: NameReservation, topic: Topic, next_id: int) -> None:
        """The topic was made: from now on it is there for everybody."""
        self._durable.register(topic, next_id)
        self._charged.add(topic.number)
        del self._reserved[reservation.name]
        try:
            for told in self.on_bound:
                told(topic)
        finally:
            reservation.outcome.set_result(topic)

    def abort(self, reservation: NameReservation, error: Exception) -> None:
        del self._reserved[reservation.name]
        self._quotas.release(reservation.caller, TOPICS, 1)
        reservation.outcome.set_exception(error)

    def claim(self, caller: Identity, name: str) -> Topic:
        """A topic for one who may delete it, and who alone changes it until `release`."""
        self.check_allowed(caller, DELETE, name)
        topic = self._durable.get(name)
        if topic.number in self._claimed:
            raise Unavailable(f"topic {name} is being changed by another caller: try again")
        self._claimed.add(topic.number)
        return topic

    def claim_unused(self, topic: Topic) -> bool:
        """The same for the bus itself; False if another changes it just now."""
        if topic.number in self._claimed:
            return False
        self._claimed.add(topic.number)
        return True

    def release(self, topic: Topic) -> None:
        self._claimed.discard(topic.number)

    def update(self, topic: Topic) -> None:
        """Its settings or shards are others now."""
        self._durable.register(topic)

    def remove(self, topic: Topic) -> None:
        self._durable.forget(topic)
        if topic.number in self._charged:
            self._charged.remove(topic.number)
            self._quotas.release(creator_of(topic), TOPICS, 1)
        for told in self.on_removed:
            told(topic)


def creator_of(topic: Topic) -> Identity:
    """Who made it, as far as that was known; the bus itself made what names nobody."""
    found = topic.settings.get(CREATOR)
    if not isinstance(found, Mapping):
        return Identity()
    uid, service, key = found.get("uid"), found.get("service", ""), found.get("key", "")
    return Identity(uid=uid if isinstance(uid, int) else None, service=str(service), key=str(key))


def creator_record(caller: Identity) -> dict[str, object]:
    return {"uid": caller.uid, "service": caller.service, "key": caller.key}
