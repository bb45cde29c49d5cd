"""Applies the policy to open connections.

The fan-out caches verdicts by class of callers (policy.py), so each connection gets its
class when it joins. When rules change, the cached verdicts are dropped, all connections are
classified again, and subscriptions that are no longer allowed end. Clients do not have to
reconnect.

A connection whose groups have not been looked up yet is *in doubt*: it is classified again
at every tick until the groups are known. A peer whose user is in doubt stays in its class: it
has hung up, and its user will not become known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING

from polybus.model.access_rule import PRODUCE

if TYPE_CHECKING:
    from polybus.bus.connection import Connection
    from polybus.bus.policy import Policy
    from polybus.bus.pull_topics import PullTopics
    from polybus.bus.subscriptions import Subscriptions
    from polybus.kernel.fanout import Fanout


class PolicyEnforcer:
    """Calls `on_unsubscribed` for each revoked subscription, `revoked` with their number."""

    def __init__(
        self,
        policy: Policy,
        fanout: Fanout,
        connections: Mapping[int, Connection],
        subscriptions: Subscriptions,
        topics: PullTopics,
        revoked: Callable[[int], None],
    ) -> None:
        self._policy = policy
        self._fanout = fanout
        self._connections = connections
        self._subscriptions = subscriptions
        self.topics = topics
        self._revoked = revoked
        self.on_unsubscribed: Callable[[Connection, bytes], None] = lambda connection, topic: None
        self._in_doubt: list[Connection] = []
        policy.on_change(self._reclassify_all)
        self._reclassify_all()

    def classify(self, connections: Iterable[Connection]) -> None:
        for connection in connections:
            identity = connection.pipe.identity
            number = self._policy.classify(identity)
            connection.source.reclassify(number)
            if self._policy.is_in_doubt(number) and not identity.is_in_doubt:
                self._in_doubt.append(connection)

    def tick(self) -> None:
        doubtful, self._in_doubt = self._in_doubt, []
        self.classify(connection for connection in doubtful if not connection.is_closed)

    def _reclassify_all(self) -> None:
        self._fanout.has_produce_rules = self._policy.has_rules_for(PRODUCE)
        self._fanout.forget_verdicts()
        self._in_doubt = []
        self.classify(self._connections.values())
        self._revoke()

    def _revoke(self) -> None:
        ended = self.topics.end_denied()
        may = cache(self._policy.may_subscribe)  # many connections read the same topics
        for connection in list(self._connections.values()):
            lost = self._subscriptions.end_denied(connection, may)
            ended += len(lost)
            for topic in lost:
                self.on_unsubscribed(connection, topic)
        if ended:
            self._revoked(ended)
