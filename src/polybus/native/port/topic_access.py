"""The port's way to what only the loop may touch: the policy, and what a name is.

The port's verbs run on threads of their own. Whatever asks the policy or binds a
name is carried out by the loop, and waited for here; a stream asks once, and
again only after the rules have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from polybus.durable.topic_names import CREATOR, Reservation, as_creator
from polybus.durable.topic_registry import WITH_SUBSCRIBERS
from polybus.errors import Unavailable

if TYPE_CHECKING:
    from polybus.bus.policy import Policy
    from polybus.durable.topic_names import Binding
    from polybus.durable.topic_registry import Durable
    from polybus.model.identity import Identity
    from polybus.model.topic import Topic

T = TypeVar("T")
MAX_REMEMBERED = 16_384  # verdicts; some 200 bytes each
BIND_TIMEOUT_S = 30.0  # another caller makes the topic: a commit, on a disk that may be slow


class OnLoop(Protocol):
    """Runs a function on the loop, and gives or raises what it does."""

    def __call__(self, function: Callable[..., T], /, *args: Any) -> T: ...


class Access:
    def __init__(self, durable: Durable, binding: Binding, policy: Policy, on_loop: OnLoop) -> None:
        self.durable = durable
        self.on_loop = on_loop
        self._binding = binding
        self.generation = 0  # of the rules
        self._yes: dict[tuple[Identity, str, str], int] = {}
        policy.watch(self._rules_changed)

    def judge(self, caller: Identity, verb: str, name: str) -> None:
        """`Denied` unless the caller may."""
        self.on_loop(self._binding.judge, caller, verb, name)

    def topic(self, caller: Identity, verb: str, name: str) -> Topic:
        """A topic that is there, for a caller that may do this with it."""
        self.judge(caller, verb, name)
        topic = self.durable.find(name)
        if topic is None:
            raise self.on_loop(self._binding.missing, name)
        return topic

    def topic_again(self, caller: Identity, verb: str, name: str) -> Topic:
        """As `topic`, for who asks often: a yes is remembered until the rules change."""
        key, generation = (caller, verb, name), self.generation
        if self._yes.get(key) != generation:
            self.judge(caller, verb, name)
            if len(self._yes) >= MAX_REMEMBERED:
                self._yes.clear()
            self._yes[key] = generation
        return self.durable.get(name)

    def topics(self, caller: Identity, verb: str, names: Iterable[str]) -> dict[str, Topic]:
        """The same for several, by name."""
        self.on_loop(self._binding.judge_all, caller, verb, names)
        return {name: self.durable.get(name) for name in names}

    def visible(self, caller: Identity) -> list[Topic]:
        """The topics that the caller may know of."""
        topics = self.durable.topics()
        sees = self._binding.sees
        return self.on_loop(lambda: [topic for topic in topics if sees(caller, topic)])

    def is_visible(self, caller: Identity, topic: Topic) -> bool:
        return self.on_loop(self._binding.sees, caller, topic)

    def bind(
        self, caller: Identity, name: str, shards: int, settings: Mapping[str, object]
    ) -> tuple[Topic, bool]:
        """The topic of this name, made if need be, and whether it was."""
        found, mine = self.on_loop(self._binding.reserve, caller, name)
        if not isinstance(found, Reservation):
            return found, False
        if not mine:
            return _await(found), False
        return self._make(found, shards, settings), True

    def drop(self, caller: Identity, name: str) -> None:
        with self._alone(caller, name) as topic:
            self.durable.store.drop(name)
            self.on_loop(self._binding.gone, topic)

    def configure(self, caller: Identity, name: str, settings: Mapping[str, object]) -> Topic:
        with self._alone(caller, name) as topic:
            own = (CREATOR, WITH_SUBSCRIBERS)
            kept = {key: topic.settings[key] for key in own if key in topic.settings}
            changed = self.durable.store.configure(name, {**settings, **kept})
            self.on_loop(self._binding.changed, changed)
            return changed

    def tell_gone(self, told: Callable[[Topic], None]) -> None:
        """Calls it on the loop with each topic that was dropped."""
        self._binding.on_gone.append(told)

    @contextmanager
    def _alone(self, caller: Identity, name: str) -> Iterator[Topic]:
        """A topic that nobody else changes meanwhile, for a caller that may delete it.

        The store knows it by name: it must not have become another topic in between.
        """
        topic = self.on_loop(self._binding.claim, caller, name)
        try:
            yield topic
        finally:
            self.on_loop(self._binding.release, topic)

    def _make(self, reservation: Reservation, shards: int, settings: Mapping[str, object]) -> Topic:
        own = {**settings, CREATOR: as_creator(reservation.caller)}
        try:
            topic = self.durable.store.create(reservation.name, shards, own)
            next_id = self.durable.store.bounds(topic.number).next_id
        except Exception as error:
            self.on_loop(self._binding.give_up, reservation, error)
            raise
        self.on_loop(self._binding.fulfil, reservation, topic, next_id)
        return topic

    def _rules_changed(self) -> None:
        self.generation += 1


def _await(reservation: Reservation) -> Topic:
    try:
        return reservation.outcome.result(BIND_TIMEOUT_S)
    except TimeoutError:
        raise Unavailable(f"topic {reservation.name} is still being made: try again") from None
