"""Access of the port's threads to state of the event loop: the policy and topic names.

Actions run on their own threads. Policy checks and bindings of names run on the loop while
the thread waits. A stream or a wait checks once, and again after the rules have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from polybus.durable.topic_names import CREATOR, NameReservation, creator_of, creator_record
from polybus.durable.topic_registry import PAUSED, WITH_SUBSCRIBERS, paused_sides
from polybus.errors import DoesNotExist, Unavailable
from polybus.model.access_rule import PRODUCE
from polybus.model.topic_name import DEAD_LETTER_SUFFIX, dead_letter_source

if TYPE_CHECKING:
    from polybus.bus.dialect import RunOnLoop
    from polybus.bus.policy import Policy
    from polybus.durable.topic_names import TopicNames
    from polybus.durable.topic_registry import DurableTopics
    from polybus.model.identity import Identity
    from polybus.model.topic import Topic

T = TypeVar("T")
# Settings that the bus stores itself; `topic.configure` does not change them.
OWN_SETTINGS = (CREATOR, WITH_SUBSCRIBERS, PAUSED)
MAX_REMEMBERED = 16_384  # allowed (caller, action, topic); about 200 bytes each
BIND_TIMEOUT_S = 30.0  # while another caller creates the topic: one commit, on a slow disk


class TopicAccess:
    def __init__(
        self, durable: DurableTopics, binding: TopicNames, policy: Policy, on_loop: RunOnLoop
    ) -> None:
        self.durable = durable
        self.on_loop = on_loop
        self._binding = binding
        self.generation = 0  # incremented when the rules change
        self.on_rules_changed: list[Callable[[], None]] = []  # called on the loop
        self._allowed_generation: dict[tuple[Identity, str, str], int] = {}
        policy.on_change(self._rules_changed)

    def check_allowed(self, caller: Identity, verb: str, name: str) -> None:
        """Raise `Denied` unless the caller may."""
        self.on_loop(self._binding.check_allowed, caller, verb, name)

    def get_topic(self, caller: Identity, verb: str, name: str) -> Topic:
        """Return an existing topic; raise `Denied` unless the caller may do this with it."""
        self.check_allowed(caller, verb, name)
        topic = self.durable.find(name)
        if topic is None:
            raise self.on_loop(self._binding.missing_topic_error, name)
        return topic

    def get_topic_cached(self, caller: Identity, verb: str, name: str) -> Topic:
        """As `get_topic`; a positive check is cached until the rules change."""
        key, generation = (caller, verb, name), self.generation
        if self._allowed_generation.get(key) != generation:
            self.check_allowed(caller, verb, name)
            if len(self._allowed_generation) >= MAX_REMEMBERED:
                self._allowed_generation.clear()
            self._allowed_generation[key] = generation
        return self.durable.get(name)

    def get_topics(self, caller: Identity, verb: str, names: Iterable[str]) -> dict[str, Topic]:
        """Return several topics by name, with one check."""
        self.on_loop(self._binding.check_all_allowed, caller, verb, names)
        return {name: self.durable.get(name) for name in names}

    def check_staged(self, caller: Identity, stages: Sequence[str]) -> None:
        """Raise `Denied` or `Paused` unless the caller may produce to all topics of these stages.

        Rules and pauses may have changed since the stages were filled.
        """
        numbers = self.durable.store.staged_topics(stages)
        topics = list(filter(None, map(self.durable.find_by_number, numbers)))
        names = [topic.name for topic in topics]  # a dropped topic is the commit's error
        self.on_loop(self._binding.check_all_allowed, caller, PRODUCE, names)
        for topic in topics:
            self.durable.check_produce(topic)

    def list_visible(self, caller: Identity) -> list[Topic]:
        """Return the topics that are visible to the caller."""
        topics = self.durable.topics()
        sees = self._binding.can_see
        return self.on_loop(lambda: [topic for topic in topics if sees(caller, topic)])

    def get_visible_topic(self, caller: Identity, name: str) -> Topic:
        """Return a topic; raise `DoesNotExist` if it is not visible to the caller."""
        topic = self.durable.get(name)
        if not self.on_loop(self._binding.can_see, caller, topic):
            raise DoesNotExist(f"there is no durable topic {name!r}")
        return topic

    def find_or_create(
        self, caller: Identity, name: str, shards: int, settings: Mapping[str, object]
    ) -> tuple[Topic, bool]:
        """Return the topic of this name and whether this call created it."""
        found, is_mine = self.on_loop(self._binding.reserve, caller, name)
        # Dead letters wait for a person, so the defaults do not apply to them.
        is_dead_letters = dead_letter_source(name.encode()) is not None
        defaults = {} if is_dead_letters else self.durable.default_settings
        return self._complete(found, is_mine, shards, {**defaults, **settings})

    def get_or_create(self, caller: Identity, name: str, shards: int) -> Topic:
        """Return the topic of this name, created with default settings if it is missing."""
        return self.durable.find(name) or self.find_or_create(caller, name, shards, {})[0]

    def open_dead_letters(self, source: Topic) -> Topic:
        """Return the dead letter topic of `source`, created if it is missing.

        The bus asks, not a client, so no rule is asked. Raises `Denied` if the topic belongs to
        another user than `source`.
        """
        name, shards = source.name + DEAD_LETTER_SUFFIX, len(source.open_shards)
        found, is_mine = self.on_loop(self._binding.reserve_for_bus, creator_of(source), name)
        topic, _ = self._complete(found, is_mine, shards, {})
        self._binding.check_dead_letters(topic, source)
        return topic

    def drop(self, caller: Identity, name: str) -> None:
        with self.exclusive_topic(caller, name) as topic:
            self.durable.store.drop(name)
            self.on_loop(self._binding.remove, topic)

    def configure(
        self,
        caller: Identity,
        name: str,
        settings: Mapping[str, object],
        *,
        keep_others: bool = False,
    ) -> Topic:
        """Replace the settings, or only those that are given; None removes one."""
        with self.exclusive_topic(caller, name) as topic:
            kept = {
                key: value
                for key, value in topic.settings.items()
                if key in OWN_SETTINGS or (keep_others and key not in settings)
            }
            return self._store_settings(topic, {**settings, **kept})

    def configure_paused(
        self, caller: Identity, name: str, change: Callable[[set[str]], set[str]]
    ) -> Topic:
        """Replace the paused sides of a topic by those that `change` returns."""
        with self.exclusive_topic(caller, name) as topic:
            paused = sorted(change(set(paused_sides(topic))))
            return self._store_settings(topic, {**topic.settings, PAUSED: paused or None})

    def _store_settings(self, topic: Topic, settings: Mapping[str, object]) -> Topic:
        given = {key: value for key, value in settings.items() if value is not None}
        changed = self.durable.store.configure(topic.name, given)
        self.on_loop(self._binding.update, changed)
        return changed

    def reshard(self, topic: Topic, shards: int) -> Topic:
        """Seal all shards of an exclusive topic and open new ones. Later batches go to those."""
        changed = self.durable.store.configure(topic.name, topic.settings, add_shards=shards)
        self.on_loop(self._binding.update, changed)
        return changed

    def add_drop_listener(self, listener: Callable[[Topic], None]) -> None:
        """Call `listener` on the loop with each dropped topic."""
        self._binding.on_removed.append(listener)

    @contextmanager
    def exclusive_topic(self, caller: Identity, name: str) -> Iterator[Topic]:
        """Lock a topic against other changes, for a caller that may delete it.

        The store finds it by name, which must not become another topic meanwhile.
        """
        topic = self.on_loop(self._binding.claim, caller, name)
        try:
            yield topic
        finally:
            self.on_loop(self._binding.release, topic)

    def _complete(
        self,
        found: Topic | NameReservation,
        is_mine: bool,
        shards: int,
        settings: Mapping[str, object],
    ) -> tuple[Topic, bool]:
        """Return the topic of a name, created by this call or by another, and which it was."""
        if not isinstance(found, NameReservation):
            return found, False
        if is_mine:
            return self._create_topic(found, shards, settings), True
        try:  # another caller creates it
            return found.outcome.result(BIND_TIMEOUT_S), False
        except TimeoutError:
            raise Unavailable(f"topic {found.name} is still being created; retry") from None

    def _create_topic(
        self, reservation: NameReservation, shards: int, settings: Mapping[str, object]
    ) -> Topic:
        own = {**settings, CREATOR: creator_record(reservation.owner)}
        own = {key: value for key, value in own.items() if value is not None}
        try:
            topic = self.durable.store.create(reservation.name, shards, own)
            next_id = self.durable.store.bounds(topic.number).next_id
        except Exception as error:
            self.on_loop(self._binding.abort, reservation, error)
            raise
        self.on_loop(self._binding.complete, reservation, topic, next_id)
        return topic

    def _rules_changed(self) -> None:
        self.generation += 1
        for listener in self.on_rules_changed:
            listener()
