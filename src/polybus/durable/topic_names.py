"""Names of durable topics: creation, change and removal. Used on the loop only.

A name is one topic of one kind. Creating a topic needs a write to disk, for which the loop
must not wait. So the caller reserves the name here, creates the topic on its own thread,
then completes or aborts the reservation. A reserved name counts as durable; other callers
that create it wait for the same outcome. In the same way a caller claims a topic before it
changes or drops it.
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

CREATOR = "creator"  # the setting of a topic that names its creator


class NameReservation:
    """A reserved name, the creator of its topic for the record, and the future of the topic."""

    def __init__(self, name: str, owner: Identity) -> None:
        self.name = name
        self.owner = owner
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
        # Called with a new topic, and with a removed one.
        self.on_bound: list[Callable[[Topic], None]] = []
        self.on_removed: list[Callable[[Topic], None]] = []
        # Topics charged to their creators; not those that exceed a lowered quota.
        self._charged = {
            topic.number
            for topic in durable.topics()
            if quotas.charge(creator_of(topic), TOPICS, 1, trial=True)
        }

    def is_durable(self, name: bytes) -> bool:
        """Return True if the name is a durable topic, or reserved for one."""
        text = name.decode("utf-8", "surrogateescape")
        return text in self._reserved or self._durable.find(text) is not None

    def creator_of(self, name: bytes) -> Identity | None:
        topic = self._durable.find(name.decode("utf-8", "surrogateescape"))
        return creator_of(topic) if topic else None

    def check_allowed(self, caller: Identity, verb: str, name: str) -> None:
        """Raise `Denied` unless the policy allows the caller the verb on the topic."""
        raw = topic_name.check_topic_name(name)
        if not self._policy.allows(caller, verb, raw, self.creator_of(raw), as_admin=True):
            purpose = self._policy.purpose_of(raw)
            why = f": it is reserved for {purpose}" if purpose else ""
            raise Denied(f"the policy does not let {caller.name} {verb} {name}{why}")

    def check_all_allowed(self, caller: Identity, verb: str, topics: Iterable[str]) -> None:
        for name in topics:
            self.check_allowed(caller, verb, name)

    def missing_topic_error(self, name: str) -> PolybusError:
        """Return the error for a durable topic that does not exist."""
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
        """Return the topic, or a reservation and whether the caller must complete it.

        Dead letters of an existing topic belong to the creator of that topic, not to the caller:
        else any reader of them could take the name that consumer groups need.
        """
        if self._durable.find(name) is None:
            self.check_allowed(caller, CREATE, name)
        raw = topic_name.check_topic_name(name)
        source = topic_name.dead_letter_source(raw)
        # Groups write `a.dlq` alone; the creator of `a` must not pay for `a.dlq.dlq` of others.
        is_target = source is not None and raw == source + topic_name.DEAD_LETTER_SUFFIX.encode()
        creator = self.creator_of(source) if source is not None and is_target else None
        return self.reserve_for_bus(caller if creator is None else creator, name)

    def reserve_for_bus(self, owner: Identity, name: str) -> tuple[Topic | NameReservation, bool]:
        """As `reserve`, for the bus itself: no rule is asked."""
        topic = self._durable.find(name)
        if topic is not None:
            return topic, False
        if self._is_ephemeral(topic_name.check_topic_name(name)):
            raise WrongKind(f"{name} is an ephemeral topic: it cannot be durable, too")
        if name in self._reserved:
            return self._reserved[name], False
        if not self._quotas.charge(owner, TOPICS, 1):
            raise LimitReached(TOPICS)
        reservation = self._reserved[name] = NameReservation(name, owner)
        return reservation, True

    def check_dead_letters(self, topic: Topic, source: Topic) -> None:
        """Raise `Denied` if dead letters of `source` must not be written to `topic`.

        It must belong to the same user as `source`, or to an admin: another user could read
        and delete them.
        """
        owner, creator = creator_of(topic), creator_of(source)
        if owner.account != creator.account and not self._policy.is_born_admin(owner):
            raise Denied(
                f"{topic.name} belongs to {owner.name} and {source.name} to {creator.name};"
                f" remove {topic.name}, and the bus creates it again"
            )

    def complete(self, reservation: NameReservation, topic: Topic, next_id: int) -> None:
        """Register the new topic of a reservation and call `on_bound`."""
        self._durable.register(topic, next_id)
        self._charged.add(topic.number)
        del self._reserved[reservation.name]
        try:
            for on_bound in self.on_bound:
                on_bound(topic)
        finally:
            reservation.outcome.set_result(topic)

    def abort(self, reservation: NameReservation, error: Exception) -> None:
        del self._reserved[reservation.name]
        self._quotas.release(reservation.owner, TOPICS, 1)
        reservation.outcome.set_exception(error)

    def claim(self, caller: Identity, name: str) -> Topic:
        """Return a topic that only this caller may change until `release`."""
        self.check_allowed(caller, DELETE, name)
        topic = self._durable.get(name)
        if topic.number in self._claimed:
            raise Unavailable(f"topic {name} is being changed by another caller: try again")
        self._claimed.add(topic.number)
        return topic

    def claim_unused(self, topic: Topic) -> bool:
        """Claim a topic for the bus itself. Returns False if it is claimed."""
        if topic.number in self._claimed:
            return False
        self._claimed.add(topic.number)
        return True

    def release(self, topic: Topic) -> None:
        self._claimed.discard(topic.number)

    def update(self, topic: Topic) -> None:
        """Register changed settings or shards."""
        self._durable.register(topic)

    def remove(self, topic: Topic) -> None:
        self._durable.forget(topic)
        if topic.number in self._charged:
            self._charged.remove(topic.number)
            self._quotas.release(creator_of(topic), TOPICS, 1)
        for on_removed in self.on_removed:
            on_removed(topic)


def creator_of(topic: Topic) -> Identity:
    """Return the creator of a topic; an empty identity if its settings name none."""
    found = topic.settings.get(CREATOR)
    if not isinstance(found, Mapping):
        return Identity()
    uid, service, key = found.get("uid"), found.get("service", ""), found.get("key", "")
    return Identity(uid=uid if isinstance(uid, int) else None, service=str(service), key=str(key))


def creator_record(caller: Identity) -> dict[str, object]:
    return {"uid": caller.uid, "service": caller.service, "key": caller.key}
