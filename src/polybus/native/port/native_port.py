"""What a connection to the native port can ask for; each verb runs on the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polybus.errors import DoesNotExist
from polybus.groups.coordinator_timer import Ticking
from polybus.groups.shard_ends import Ends
from polybus.native.port import actions, group_actions, group_fetch_stream
from polybus.native.port.produce_stream import Budget, Stream
from polybus.native.port.producer_registry import Owners
from polybus.native.port.shard_waits import Waits
from polybus.native.port.topic_access import Access
from polybus.native.port.topic_reader import Reading
from polybus.native.protocol.fields import Action, Answer

if TYPE_CHECKING:
    from polybus.model.identity import Identity
    from polybus.model.limits import NativeLimits
    from polybus.model.rows import Rows
    from polybus.model.topic import Topic


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and whether it is still there to be answered."""

    identity: Identity
    is_gone: Callable[[], bool]


class Port:
    def __init__(
        self,
        access: Access,
        limits: NativeLimits,
        clock: Callable[[], float],
        stats: Callable[[], Answer],
        rules: Callable[[str, Mapping[str, object], Identity], Any],
        wall_ns: Callable[[], int],
    ) -> None:
        """`rules` answers the verbs of `polybus acl`. Groups are looked after until `close`."""
        self.access = access
        self.store = access.durable.store
        self.limits = limits
        ends = Ends(self.store)
        self.waits = Waits(self.store, limits.max_waits, clock, ends.hear)
        self.owners = Owners(self.store, clock, wall_ns)
        self.rules = rules
        self.wall_ns = wall_ns
        self.budget = Budget(limits.max_uncommitted_bytes)
        self._stats = stats
        self.groups = group_actions.open_coordinator(
            access, ends, self.waits, limits, clock, wall_ns
        )
        self._ticking = Ticking(self.groups, clock)
        access.tell_gone(self.waits.gone)
        access.tell_gone(self.groups.drop)
        self._ticking.start()

    def caller(self, identity: Identity, is_gone: Callable[[], bool]) -> Caller:
        return Caller(identity, is_gone)

    def produce(self, caller: Caller, topic: str, *, create: bool = True) -> Stream:
        """A stream of batches to a topic, which is made if need be; `Denied` at once if not.

        Without `create` a topic that is not there is `DoesNotExist`, now or later.
        """
        shards = self.limits.default_shards if create else None
        stream = Stream(self.access, self.owners, self.budget, caller.identity, topic, shards)
        stream.open()
        return stream

    def read(self, caller: Caller, ticket: Mapping[str, object]) -> Reading:
        return Reading(self, caller, dict(ticket))

    def act(self, caller: Caller, name: str, request: Mapping[str, object]) -> Answer:
        action, perform = actions.find(name)
        return perform(self, caller, action.read(request))

    def follow(
        self, caller: Caller, request: Mapping[str, object]
    ) -> Iterator[tuple[Answer | None, Rows]]:
        """`group.fetch`: what it says, if that is more than rows, and the rows."""
        return group_fetch_stream.follow(self, caller, group_actions.FETCH.read(request))

    def actions(self) -> list[Action]:
        return [action for action, _ in actions.ACTIONS.values()]

    def seen(self, caller: Caller, name: str) -> Topic:
        """A topic that the caller may know of."""
        topic = self.access.durable.get(name)
        if not self.access.is_visible(caller.identity, topic):
            raise DoesNotExist(f"there is no durable topic {name!r}")
        return topic

    def stats(self) -> Answer:
        return self.access.on_loop(self._stats)

    def close(self) -> None:
        """Lets go of all that wait: the bus stops."""
        self._ticking.stop()
        self.waits.close()
        self.budget.close()
