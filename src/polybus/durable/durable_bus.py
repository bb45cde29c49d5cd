"""The durable topics of a running bus: registry, names, push readers and publisher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from polybus.durable.delay_scheduler import DelayScheduler
from polybus.durable.followed_topics import FollowedTopics
from polybus.durable.publisher import CallOnLoop, DurablePublisher
from polybus.durable.push_readers import BlockingWorkRunner, PushReaders
from polybus.durable.topic_names import TopicNames
from polybus.durable.topic_registry import DurableTopics

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.bus.broker import Broker
    from polybus.bus.connection import Connection
    from polybus.bus.durable_hooks import OnOutcome
    from polybus.model.identity import Identity
    from polybus.store.contract import ShardEnd, Store


TOPIC_DAMAGED = "topic_damaged"  # an alarm, and the reason of a counted fault


class DurableBus:
    """The `DurableHooks` of a bus with a store, and the parts behind them."""

    def __init__(
        self,
        broker: Broker,
        store: Store,
        call_on_loop: CallOnLoop,
        run_blocking: BlockingWorkRunner,
    ) -> None:
        self.run_blocking = run_blocking
        self.topics = DurableTopics(store)
        self._alarms = broker.alarms
        self._counters = broker.counters
        self._call_on_loop = call_on_loop
        for topic, reason in self.topics.damaged:
            self._alarms.raise_alarm(TOPIC_DAMAGED, topic.name, reason)
            self._counters.count("faults", TOPIC_DAMAGED)
        store.watch_damage(self._on_damage)
        # A dialect may install its topics later, so the broker is asked each time.
        self.names = TopicNames(
            self.topics, broker.policy, broker.quotas, lambda name: broker.topics.exists(name)
        )
        followed = self._followed = FollowedTopics(
            lambda number: self.topics.find_by_number(number) is not None
        )
        self.push_readers = PushReaders(
            self.topics,
            broker.fanout,
            broker.delivery.relay_committed,
            run_blocking,
            broker.log,
            followed,
        )
        self.publisher = DurablePublisher(
            self.topics,
            broker.counters,
            broker.max_uncommitted_bytes,
            call_on_loop,
            broker.wall_ns,
            broker.log,
        )
        # Called on the loop with the numbers of followed topics that have new messages.
        self.on_commit: list[Callable[[set[int]], None]] = [self.push_readers.on_commit]
        self.names.on_bound.append(self.push_readers.on_bound)
        self.names.on_removed.append(self.push_readers.on_removed)
        self.names.on_removed.append(self.topics.delayed.on_dropped)
        self.names.on_removed.append(lambda topic: followed.forget(topic.number))
        self.names.on_removed.append(
            lambda topic: self._alarms.clear_alarm(TOPIC_DAMAGED, topic.name)
        )
        # Called per batch: bound here to save one call.
        self.is_durable = self.names.is_durable
        self.publish = self.publisher.publish
        store.watch(self._on_commit)
        self._delay_scheduler = DelayScheduler(
            self.topics, broker.now_s, broker.wall_ns, broker.alarms
        )
        self._delay_scheduler.start()

    def close(self) -> None:
        """Stop the thread that appends delayed messages. The store is still open."""
        self._delay_scheduler.stop()

    def creator_of(self, name: bytes) -> Identity | None:
        return self.names.creator_of(name)

    def is_damaged(self, name: bytes) -> bool:
        topic = self.topics.find(name.decode("utf-8", "surrogateescape"))
        return topic is not None and self.topics.is_damaged(topic)

    def publish_with_outcome(
        self, name: bytes, offsets: Buffer, bodies: bytes, then: OnOutcome
    ) -> None:
        self.publisher.publish_with_outcome(name, offsets, bodies, then)

    def on_subscribed(self, connection: Connection, name: bytes) -> None:
        self.push_readers.on_subscribed(connection, name)

    def on_unsubscribed(self, connection: Connection, name: bytes) -> None:
        self.push_readers.on_unsubscribed(connection, name)

    def on_left(self, connection: Connection, names: Iterable[bytes]) -> None:
        self.push_readers.on_left(connection, names)

    def _on_damage(self, number: int, text: str) -> None:
        """Raise the alarm of a topic whose log is damaged. Runs on any thread."""
        topic = self.topics.find_by_number(number)
        name = topic.name if topic else f"number {number}"
        if not self._alarms.is_raised(TOPIC_DAMAGED, name):
            self._call_on_loop(lambda: self._counters.count("faults", TOPIC_DAMAGED))
        self._alarms.raise_alarm(TOPIC_DAMAGED, name, text)

    def _on_commit(self, ends: Sequence[ShardEnd]) -> None:
        """Wake the loop if it follows a topic of a commit. Runs on the store's thread."""
        followed = self._followed.select({end.topic for end in ends})
        if followed:
            self._call_on_loop(lambda: self._notify(followed))

    def _notify(self, numbers: set[int]) -> None:
        for on_commit in self.on_commit:
            on_commit(numbers)


def attach_store(
    broker: Broker, store: Store, call_on_loop: CallOnLoop, run_blocking: BlockingWorkRunner
) -> DurableBus:
    """Give a broker durable topics; must be called before the first connection.

    `call_on_loop` may be called from any thread; `run_blocking` reads on other threads.
    """
    durable = DurableBus(broker, store, call_on_loop, run_blocking)
    broker.overview.traffic = durable.topics.traffic
    broker.overview.sections["delayed"] = durable.topics.delayed.overview
    broker.delivery.on_room_again = durable.push_readers.on_room
    broker.install_durable(durable)
    return durable


def durable_bus(broker: Broker) -> DurableBus | None:
    """Return the durable topics of a broker, None on a bus without a store."""
    return broker.durable if isinstance(broker.durable, DurableBus) else None
