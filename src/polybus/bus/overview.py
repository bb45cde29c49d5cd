"""The statistics of a bus: its counters and its connections.

Dialects whose messages or connections do not pass the fan-out add their own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from polybus.bus.connection_list import ConnectionList
from polybus.bus.traffic import LoopTraffic, TrafficTotals

if TYPE_CHECKING:
    from polybus.bus.alarms import Alarms
    from polybus.bus.connection import Connection
    from polybus.bus.counters import Counters
    from polybus.bus.delivery import Delivery
    from polybus.bus.pull_topics import PullTopics
    from polybus.bus.subscriptions import Subscriptions
    from polybus.bus.traffic import SharedTraffic
    from polybus.kernel.fanout import Fanout


class Overview:
    def __init__(
        self,
        fanout: Fanout,
        delivery: Delivery,
        topics: PullTopics,
        subscriptions: Subscriptions,
        counters: Counters,
        alarms: Alarms,
        connections: Mapping[int, Connection],
        clock: Callable[[], float],
    ) -> None:
        self._fanout = fanout
        self._delivery = delivery
        self.topics = topics
        self._subscriptions = subscriptions
        self._counters = counters
        self._alarms = alarms
        self._clock = clock
        self._started_s = clock()
        self.traffic: SharedTraffic | None = None  # of the native port
        self.sections: dict[str, Callable[[], dict[str, Any]]] = {}  # added to `stats` by dialects
        self.connections = ConnectionList()
        self.connections.add_source(BrokerConnections(fanout, connections, clock))
        self.other_totals: list[LoopTraffic] = []  # of connections that do not join the broker

    def stats(self, accepted: int) -> dict[str, Any]:
        return {
            "uptime_s": round(self._clock() - self._started_s, 3),
            "messages": self._messages(),
            "topics": self._subscriptions.topics,
            "subscriptions": self._subscriptions.count + len(self.topics.readers),
            "connections": {
                "open": self.connections.count,
                "accepted": accepted,
                "waiting": self._delivery.waiting,
                "closed": self._counters.family("closed"),
                "in_doubt": self._counters.family("in_doubt"),
                "unfinished_frames": self._counters.family("unfinished_frames"),
            },
            "dropped": self._dropped(),
            "refused": self._counters.family("refused"),
            "faults": self._counters.family("faults"),
            # Any caller may read statistics; the admin socket adds names for admins.
            "alarms": self._alarms.to_json(with_names=False),
            **{name: section() for name, section in self.sections.items()},
        }

    def _messages(self) -> dict[str, int]:
        fanout, pulled, others = self._fanout, self.topics.message_counts, self._other_totals()
        relayed, relayed_bytes = self._delivery.relayed
        received = fanout.messages - relayed + pulled.received
        received_bytes = fanout.bytes - relayed_bytes + pulled.received_bytes
        delivered_bytes = fanout.delivered_bytes + pulled.delivered_bytes
        return {
            "received": received + others.received,
            "received_bytes": received_bytes + others.received_bytes,
            "delivered": fanout.delivered + pulled.delivered + others.delivered,
            "delivered_bytes": delivered_bytes + others.delivered_bytes,
        }

    def _other_totals(self) -> TrafficTotals:
        totals = self.traffic.totals if self.traffic is not None else TrafficTotals()
        for one in self.other_totals:
            totals = TrafficTotals(
                totals.received + one.received,
                totals.received_bytes + one.received_bytes,
                totals.delivered + one.delivered,
                totals.delivered_bytes + one.delivered_bytes,
            )
        return totals

    def _dropped(self) -> dict[str, int]:
        dropped = Counter(self._counters.family("dropped"))
        fanout = self._fanout
        dropped.update(denied=fanout.denied, no_subscriber=fanout.unheard)
        dropped.update(too_large=fanout.too_large, alarms=self._alarms.left_out)
        return {reason: n for reason, n in sorted(dropped.items()) if n}


class BrokerConnections:
    """The connections of the broker, as a source of the `ConnectionList`."""

    def __init__(
        self, fanout: Fanout, connections: Mapping[int, Connection], clock: Callable[[], float]
    ) -> None:
        self._fanout = fanout
        self._connections = connections
        self._clock = clock

    @property
    def count(self) -> int:
        return len(self._connections)

    def page(self, after: int, limit: int) -> list[tuple[int, dict[str, Any]]]:
        # Ids rise, so the keys are sorted. Copying them takes 5 ns for each connection.
        numbers = list(self._connections)
        first = bisect_right(numbers, after)
        return [
            (number, self._describe(self._connections[number]))
            for number in numbers[first : first + limit]
        ]

    def _describe(self, connection: Connection) -> dict[str, Any]:
        messages, size = self._fanout.sent_totals(connection.number)
        return {
            "id": connection.id,
            "dialect": connection.dialect,
            "peer": connection.pipe.peer,
            "identity": connection.pipe.identity.name,
            "age_s": round(self._clock() - connection.since_s, 3),
            "subscriptions": self._fanout.subscription_count(connection.number),
            "received_messages": connection.source.messages,
            "received_bytes": connection.source.bytes,
            "sent_messages": messages,
            "sent_bytes": size,
            "outbox_bytes": connection.outbox.backlog(),
            "state": _state(connection),
            **(connection.describe() if connection.describe is not None else {}),
        }


def _state(connection: Connection) -> str:
    if connection.blocked_by is not None:
        return "waiting"
    return "full" if connection.outbox.full else "open"
