"""The native port: its methods run on the threads of its callers and may block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polybus.groups.coordinator import CoordinatorTimer
from polybus.groups.shard_ends import ShardEnds
from polybus.model.delivery_time import due_of
from polybus.native.port import actions, group_actions
from polybus.native.port.port_shares import PortShares
from polybus.native.port.produce_stream import ProduceStream, UncommittedBudget
from polybus.native.port.producer_registry import ProducerRegistry
from polybus.native.port.shard_waits import ShardWaits
from polybus.native.port.stage_owners import StageOwners
from polybus.native.port.topic_access import TopicAccess
from polybus.native.port.topic_reader import TopicReader
from polybus.native.protocol.requests import GroupFetch

if TYPE_CHECKING:
    from polybus.bus.alarms import Alarms
    from polybus.model.commit import CommitResult
    from polybus.model.identity import Identity
    from polybus.model.limits import NativeLimits
    from polybus.native.protocol.answers import Answer, Committed, WrittenSpan


@dataclass(frozen=True, slots=True)
class Caller:
    """The identity of a caller, and whether its call was cancelled."""

    identity: Identity
    is_gone: Callable[[], bool]


class NativePort:
    def __init__(
        self,
        access: TopicAccess,
        limits: NativeLimits,
        clock: Callable[[], float],
        stats: Callable[[], Answer],
        rules: Callable[[str, Mapping[str, object], Identity], Any],
        wall_ns: Callable[[], int],
        alarms: Alarms,
        shares: PortShares | None = None,
    ) -> None:
        """`rules` executes the commands of `polybus acl`. Members expire until `close`.

        Without `shares` the port has one user, who may fill its tables.
        """
        self.shares = shares or PortShares.of_one_user(limits)
        self.access = access
        self.store = access.durable.store
        self.limits = limits
        ends = ShardEnds(self.store)
        self.waits = ShardWaits(
            self.store, self.shares.waits, self.shares.wait_positions, clock, ends
        )
        self.owners = ProducerRegistry(self.store, clock, wall_ns, self.shares.producers)
        self.stages = StageOwners(self.shares.stages, clock)
        self.rules = rules
        self.wall_ns = wall_ns
        self.budget = UncommittedBudget(limits.max_uncommitted_bytes)
        self.stats = stats  # for the event loop
        self.groups = group_actions.open_coordinator(
            access, ends, self.waits, self.shares.groups, limits, clock, wall_ns, alarms
        )
        access.durable.delayed.set_limits(self.shares.delayed, limits.max_topic_delayed)
        self._expiry_thread = CoordinatorTimer(self.groups, clock)
        access.on_rules_changed.append(self.waits.wake_all)
        access.add_drop_listener(self.groups.drop)  # forgets the ends, which waits then miss
        access.add_drop_listener(self.waits.on_topic_dropped)
        self._expiry_thread.start()

    def begin_call(self, identity: Identity) -> None:
        """Count a call until `end_call`. Raises `LimitReached`."""
        self.shares.calls.take(identity)

    def end_call(self, identity: Identity) -> None:
        self.shares.calls.release(identity.account_name)

    def new_caller(self, identity: Identity, is_gone: Callable[[], bool]) -> Caller:
        return Caller(identity, is_gone)

    def produce(self, caller: Caller, topic: str, *, create: bool = True) -> ProduceStream:
        """Open a stream of batches to a topic, which is created if it is missing.

        Raises:
            Denied: the caller may not produce to the topic.
            DoesNotExist: the topic is missing and `create` is false; `produce` of the stream
                also raises it.
        """
        shards = self.limits.default_shards if create else None
        stream = ProduceStream(
            self.access, self.owners, self.budget, caller.identity, topic, shards, self.wall_ns
        )
        stream.open()
        return stream

    def read(self, caller: Caller, ticket: Mapping[str, object]) -> TopicReader:
        return TopicReader(self, caller, dict(ticket))

    def act(self, caller: Caller, name: str, request: Mapping[str, object]) -> Answer:
        request_class, handler = actions.find_action(name)
        return handler(self, caller, request_class.decode(request))

    def stream_fetch(
        self, caller: Caller, request: Mapping[str, object]
    ) -> Iterator[group_actions.FetchPart]:
        """Run `group.fetch`: yield its object, None if there are only rows, and the rows."""
        return group_actions.stream_fetch(self, caller, GroupFetch.decode(request))

    def is_streamed(self, name: str) -> bool:
        """Return whether an action returns several results, by `stream_fetch`."""
        return name == GroupFetch.action_name

    def list_actions(self) -> list[tuple[str, str]]:
        """Return name and meaning of every action."""
        return [(request.action_name, request.meaning) for request in actions.ACTIONS]

    def describe_commit(self, done: CommitResult) -> Committed:
        """Return the result of a commit as the port answers it."""
        spans: list[WrittenSpan] = []
        for span in done.spans:
            topic = self.access.durable.find_by_number(span.topic)
            spans.append(
                {
                    "topic": topic.name if topic else None,
                    "shard": span.shard,
                    "first_offset": span.first_offset,
                    "first_id": span.first_id,
                    "count": span.count,
                }
            )
        return {
            "duplicate": done.duplicate,
            "spans": spans,
            "timestamp_ns": done.timestamp_ns,
            "deliver_at_ns": due_of(done),
        }

    def close(self) -> None:
        """End all waits, because the bus stops."""
        self._expiry_thread.stop()
        self.waits.close()
        self.budget.close()
