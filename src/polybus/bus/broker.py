"""The verbs of the bus. Sessions call them; nothing else changes the state of the bus."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from polybus.bus.alarms import Alarms
from polybus.bus.connection import Connection
from polybus.bus.counters import Counters
from polybus.bus.delivery import Delivery
from polybus.bus.durable_hooks import DurableHooks, NoDurableTopics
from polybus.bus.overview import Overview
from polybus.bus.policy import OVERFLOW, Policy
from polybus.bus.policy_enforcer import PolicyEnforcer
from polybus.bus.pull_topics import NoPullTopics, PullTopics
from polybus.bus.quotas import Quotas
from polybus.bus.shares import Shares
from polybus.bus.stall_monitor import StallMonitor
from polybus.bus.subscriptions import SubscribeResult, Subscriptions
from polybus.kernel.fanout import Fanout, Source
from polybus.kernel.outbox import LoopTurn, Outbox
from polybus.model.limits import QuotaLimits

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.bus.connection import ConnectionIO
    from polybus.kernel.fanout import CollectedBatch, RouteResult
    from polybus.kernel.framing import Encoding, Framing
    from polybus.model.limits import Limits

# Four ticks. A bus that did not run for longer (a stopped process, a paused machine) has offered
# nothing to its readers, so this time does not count for those that are slow.
PAUSE_S = 1.0


class Logger(Protocol):
    """The part of a structured logger that the bus uses."""

    def debug(self, event: str, **fields: Any) -> Any: ...
    def info(self, event: str, **fields: Any) -> Any: ...
    def warning(self, event: str, **fields: Any) -> Any: ...


class MessageSink(Protocol):
    """Receiver of the messages for one subscriber."""

    def push(self, data: bytes) -> None: ...


class Broker:
    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float],
        call_soon: Callable[[Callable[[], None]], object],
        log: Logger,
        *,
        wall_ns: Callable[[], int],
        quotas: QuotaLimits | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.log = log
        self.limits = limits
        self.wall_ns = wall_ns
        self._clock = clock
        counters = self.counters = Counters()
        self.alarms = Alarms(wall_ns, log)
        policy = self.policy = policy or Policy()
        self.quotas = Quotas(quotas or QuotaLimits(), counters, log)
        self.shares = Shares(limits, policy.is_admin)
        self.turn = LoopTurn(call_soon)
        self._connections: dict[int, Connection] = {}
        self._accepted_count = 0
        self._encodings = 0
        fanout = self.fanout = Fanout(self._may_produce)
        delivery = self.delivery = Delivery(fanout, self.turn, limits, self.cut)
        delivery.on_collected = self._on_collected
        topic_shares = self.shares.new_table("max_topics", limits.max_topics)
        subscriptions = self._subscriptions = Subscriptions(fanout, policy, limits, topic_shares)
        self.topics: PullTopics = NoPullTopics()
        self.durable: DurableHooks = NoDurableTopics()
        self._enforcer = PolicyEnforcer(
            policy, fanout, self._connections, subscriptions, self.topics, self._on_revoked
        )
        self._stalls = StallMonitor(limits, self.cut)
        self.overview = Overview(
            fanout,
            delivery,
            self.topics,
            subscriptions,
            counters,
            self.alarms,
            self._connections,
            clock,
        )
        self.on_tick: list[Callable[[float], None]] = []  # called with the time, in seconds
        self._ticked_s = clock()
        # Called per batch: bound here to save one call.
        self.route: Callable[[Connection, Framing, Buffer, int, int], RouteResult] = delivery.route
        self.publish = delivery.publish

    def install_durable(self, durable: DurableHooks) -> None:
        """Use these durable topics; must be called before the first connection."""
        self.durable = durable
        self._enforcer.on_unsubscribed = durable.on_unsubscribed

    def install_topics(self, topics: PullTopics) -> None:
        """Use a dialect's topics for pull readers; must be called before the first connection."""
        self.topics = self._enforcer.topics = self.overview.topics = topics

    @property
    def max_uncommitted_bytes(self) -> int:
        """Return the limit of submitted, uncommitted bytes of one connection."""
        return self.limits.max_uncommitted_bytes

    def new_encoding_number(self) -> int:
        """Return a number for a new encoding. Each encoding of a dialect needs its own."""
        self._encodings += 1
        return self._encodings - 1

    def join(
        self,
        dialect: str,
        pipe: ConnectionIO,
        encoding: Encoding,
        *,
        outbox: Outbox | None = None,
        reader: MessageSink | None = None,
    ) -> Connection:
        """Add a connection. Returns it, ready to publish and to subscribe.

        A dialect may pass an outbox with its own high-water mark, and a `reader` that
        receives the messages of the fan-out instead of the outbox.
        """
        self._accepted_count += 1
        outbox = outbox or self.delivery.open_outbox(pipe)
        number = self.fanout.add_subscriber(reader or outbox, encoding)
        source = Source(OVERFLOW)
        connection = Connection(
            id=self._accepted_count,
            dialect=dialect,
            pipe=pipe,
            source=source,
            outbox=outbox,
            encoding=encoding,
            number=number,
            since_s=self._clock(),
            identity=pipe.identity,
            on_resume=pipe.resume_reading,
        )
        outbox.connection = connection
        self._connections[connection.id] = connection
        self._enforcer.classify([connection])
        if pipe.identity.is_in_doubt:
            self.counters.count("in_doubt", dialect)
        self.log.debug("connection opened", dialect=dialect, peer=pipe.peer, id=connection.id)
        return connection

    def subscribe(self, connection: Connection, topic: bytes) -> SubscribeResult:
        if self.durable.is_damaged(topic):
            self.count_refusal(connection, "subscribe_damaged", topic)
            return SubscribeResult.DAMAGED
        result = self._subscriptions.add(connection, topic)
        if result is SubscribeResult.DENIED:
            self.count_refusal(connection, "subscribe_denied", topic)
        elif result is SubscribeResult.NEW:
            self.topics.on_push_subscribed(topic)
            self.durable.on_subscribed(connection, topic)
        return result

    def unsubscribe(self, connection: Connection, topic: bytes) -> bool:
        removed = self._subscriptions.remove(connection, topic)
        if removed:
            self.durable.on_unsubscribed(connection, topic)
        return removed

    def unsubscribe_all(self, connection: Connection) -> None:
        self.durable.on_left(connection, self._subscriptions.clear(connection))

    def is_durable(self, topic: bytes) -> bool:
        return self.durable.is_durable(topic)

    def publish_assembled(self, connection: Connection, topic: bytes, body: bytes) -> None:
        """Publish a message that arrived in pieces to readers that need it whole."""
        if self.is_durable(topic):
            self.durable.publish(connection, topic, array("i", [0, len(body)]), body, 1)
        else:
            self.topics.on_assembled(topic, body)

    def close(self, connection: Connection, reason: str) -> None:
        """End a connection after its pending output has been sent."""
        if self._leave(connection, reason):
            connection.outbox.close(send_held=True)
            connection.pipe.close()
            self.log.warning(
                "connection closed",
                dialect=connection.dialect,
                peer=connection.pipe.peer,
                reason=reason,
            )

    def cut(self, connection: Connection, reason: str) -> None:
        """End a connection at once. Its pending messages are counted as dropped."""
        if not self._leave(connection, reason):
            return
        lost = self._drop_output(connection, reason)
        connection.pipe.abort()
        self.log.warning(
            "connection cut",
            dialect=connection.dialect,
            peer=connection.pipe.peer,
            reason=reason,
            messages_lost=lost,
        )

    def finish(self, connection: Connection) -> None:
        """Handle the end of a peer's input: close after its pending output has been sent."""
        if self._leave(connection, "peer"):
            connection.outbox.close(send_held=True)
            connection.pipe.close()

    def leave(self, connection: Connection) -> None:
        """Remove a connection that is gone.

        Pending messages count as dropped: a connection that the bus closed may have been
        too slow to take them.
        """
        has_left = self._leave(connection, "peer")
        self._drop_output(connection, "disconnected")
        if has_left:
            self.log.debug(
                "connection ended", dialect=connection.dialect, peer=connection.pipe.peer
            )

    def close_all(self, reason: str) -> None:
        for connection in list(self._connections.values()):
            if self._leave(connection, reason):
                connection.outbox.close(send_held=True)
                connection.pipe.close()

    def count_refusal(
        self, connection: Connection, reason: str, topic: bytes, count: int = 1
    ) -> None:
        """Count and log a request that was refused."""
        self.counters.count("refused", reason, count)
        self._log_refusal(connection, reason, topic)

    def watch_stall(self, connection: Connection) -> None:
        """Watch a connection that does not read its answers; it is cut if that continues."""
        self._stalls.add(connection, self._clock())

    def end_stall(self, connection: Connection) -> None:
        """Stop watching a connection that has read all its answers."""
        self._stalls.forget(connection)

    def now_s(self) -> float:
        return self._clock()

    def tick(self) -> None:
        """Apply all timeouts. The server calls this a few times per second."""
        now_s = self._clock()
        if now_s - self._ticked_s > PAUSE_S:
            self.delivery.restart_windows()
            self._stalls.restart_windows(now_s)
        self._ticked_s = now_s
        self.delivery.tick(now_s)
        self._stalls.tick(now_s)
        self.topics.tick()
        self._enforcer.tick()
        for step in self.on_tick:
            step(now_s)

    def stats(self) -> dict[str, Any]:
        return self.overview.stats(accepted=self._accepted_count)

    def _leave(self, connection: Connection, reason: str) -> bool:
        """Remove a connection. Returns False if that is done. Nothing is pushed for it any more."""
        if connection.is_closed:
            return False
        connection.is_closed = True
        self.counters.count("closed", reason)
        del self._connections[connection.id]
        self.unsubscribe_all(connection)
        self.fanout.remove_subscriber(connection.number)
        self.delivery.forget(connection)
        self._stalls.forget(connection)
        return True

    def _on_collected(self, connection: Connection, batch: CollectedBatch) -> None:
        if self.is_durable(batch.topic):
            self.durable.publish(connection, batch.topic, batch.offsets, batch.bodies, batch.count)
        else:
            self.topics.on_collected(batch)

    def _log_refusal(self, connection: Connection, reason: str, topic: bytes) -> None:
        name = topic.decode("utf-8", "backslashreplace")
        self.log.warning("refused", **_log_fields(connection), topic=name, reason=reason)

    def _may_produce(self, identity_class: int, topic: bytes) -> bool:
        """Return the verdict on a class and topic. The fan-out caches it and counts messages."""
        allowed = self.policy.may_produce(identity_class, topic)
        if not allowed and self.delivery.sender is not None:
            self._log_refusal(self.delivery.sender, "produce_denied", topic)
        return allowed

    def _on_revoked(self, count: int) -> None:
        self.counters.count("refused", "subscription_revoked", count)
        self.log.warning("subscriptions revoked", count=count)

    def _drop_output(self, connection: Connection, reason: str) -> int:
        """Drop the output of a connection that has left. Counts and returns its messages."""
        dropped = connection.outbox.close(send_held=False)
        lost = connection.outbox.take_dropped()
        lost += sum(connection.encoding.count(chunk, sent) for chunk, sent in dropped)
        self.counters.count("dropped", reason, lost)
        return lost


def _log_fields(connection: Connection) -> dict[str, str]:
    """Return the fields that identify a connection in the log."""
    pipe = connection.pipe
    return {"dialect": connection.dialect, "peer": pipe.peer, "user": pipe.identity.name}
