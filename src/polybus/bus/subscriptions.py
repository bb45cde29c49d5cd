"""Subscriptions of push readers, within limits and policy.

Probe topics (`model.topic_name`) are exempt: a client waits on one for its own echo, so no
rule and no limit may refuse it. Only FREE_PROBES per connection are exempt; more of them
count like any other topic, or they would bypass the limits.

A topic in the table is charged to one of its subscribers' accounts: the first one, and once
that has no subscription to it, the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from polybus.errors import LimitReached
from polybus.model import topic_name

if TYPE_CHECKING:
    from polybus.bus.connection import Connection
    from polybus.bus.policy import Policy
    from polybus.bus.shares import ShareTable
    from polybus.kernel.fanout import Fanout
    from polybus.model.limits import Limits

FREE_PROBES = 16  # a client needs one at a time; some slack for overlapping subscribes


class SubscribeResult(Enum):
    """The result of a subscribe request. The last three name the limit that was reached.

    A topic is damaged if the store refuses to read it.
    """

    NEW = "new"
    ALREADY = "already"
    DENIED = "denied"
    DAMAGED = "damaged"
    TOO_MANY_SUBSCRIPTIONS = "max_subscriptions_per_connection"
    TOO_MANY_TOPICS = "max_topics"
    TOO_MANY_USER_TOPICS = "max_topics_share"


class Subscriptions:
    def __init__(
        self, fanout: Fanout, policy: Policy, limits: Limits, topic_shares: ShareTable
    ) -> None:
        self._fanout = fanout
        self._policy = policy
        self._limits = limits
        self._topic_shares = topic_shares
        # Topic → account → subscriptions, free probes aside. The first account is charged.
        self._holders: dict[bytes, dict[str, int]] = {}
        self._probes: Counter[bytes] = Counter()  # free ones, and how many read each
        self.count = 0

    @property
    def topics(self) -> int:
        """Return the number of topics that count against the limit."""
        return self._fanout.topic_count - len(self._probes)

    def add(self, connection: Connection, topic: bytes) -> SubscribeResult:
        if self._fanout.is_subscribed(connection.number, topic):
            return SubscribeResult.ALREADY
        if not self._policy.may_subscribe(connection.source.identity, topic):
            return SubscribeResult.DENIED
        free = topic_name.is_probe(topic) and len(connection.free_probes) < FREE_PROBES
        if not free and (reached := self._limit_reached(connection, topic)):
            return reached
        self._fanout.subscribe(connection.number, topic)
        self.count += 1
        if free:
            connection.free_probes.add(topic)
            self._probes[topic] += 1
        else:
            accounts = self._holders.setdefault(topic, {})
            name = connection.identity.account_name
            accounts[name] = accounts.get(name, 0) + 1
        return SubscribeResult.NEW

    def remove(self, connection: Connection, topic: bytes) -> bool:
        """End a subscription. Returns False if there was none."""
        if not self._fanout.unsubscribe(connection.number, topic):
            return False
        self.count -= 1
        if topic in connection.free_probes:
            connection.free_probes.discard(topic)
            self._end_probe(topic)
        else:
            self._end_holding(connection.identity.account_name, topic)
        return True

    def clear(self, connection: Connection) -> frozenset[bytes]:
        """End all subscriptions of a connection. Returns their topics."""
        name = connection.identity.account_name
        topics = self._fanout.topics_of(connection.number)
        for topic in topics - connection.free_probes:
            self._end_holding(name, topic)
        self.count -= self._fanout.unsubscribe_all(connection.number)
        while connection.free_probes:
            self._end_probe(connection.free_probes.pop())
        return topics

    def end_denied(self, connection: Connection, may: Callable[[int, bytes], bool]) -> list[bytes]:
        """End subscriptions that are no longer allowed. Returns their topics."""
        who = connection.source.identity
        lost = [topic for topic in self._fanout.topics_of(connection.number) if not may(who, topic)]
        for topic in lost:
            self.remove(connection, topic)
        return lost

    def _end_probe(self, topic: bytes) -> None:
        self._probes[topic] -= 1
        if not self._probes[topic]:
            del self._probes[topic]

    def _end_holding(self, account: str, topic: bytes) -> None:
        accounts = self._holders[topic]
        accounts[account] -= 1
        if accounts[account]:
            return
        is_charged = next(iter(accounts)) == account
        del accounts[account]
        if is_charged:
            self._topic_shares.release(account)
            if accounts:
                self._topic_shares.restore(next(iter(accounts)))
        if not accounts:
            del self._holders[topic]

    def _limit_reached(self, connection: Connection, topic: bytes) -> SubscribeResult | None:
        counted = self._fanout.subscription_count(connection.number) - len(connection.free_probes)
        if counted >= self._limits.max_subscriptions_per_connection:
            return SubscribeResult.TOO_MANY_SUBSCRIPTIONS
        if self.topics >= self._limits.max_topics and not self._fanout.has_topic(topic):
            return SubscribeResult.TOO_MANY_TOPICS
        if topic not in self._holders:
            try:
                self._topic_shares.take(connection.identity)
            except LimitReached:
                return SubscribeResult.TOO_MANY_USER_TOPICS
        return None
