"""Alarms: conditions that an operator must end, each with its kind, object and start.

A part of the bus raises an alarm when a condition begins and clears it when the condition
ends; raising it again only changes its text. Both are one log line. `polybus stats` and the
admin verb `alarms` list the alarms that are raised.

Kinds are stable words, listed in docs/guides/running.md. The object is a name, such as a
topic or a group; one kind and object is one alarm.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polybus.bus.broker import Logger

# Of one kind. Objects are named by clients, so their number must be bounded, and alarms of a kind
# that clients can cause must not keep out those of another. Further alarms are counted.
MAX_ALARMS = 1000
NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Alarm:
    """One raised alarm; `since_ns` is the wall-clock time at which it was raised."""

    kind: str
    object: str
    text: str
    since_ns: int

    def to_json(self, *, with_names: bool) -> dict[str, Any]:
        """Return it for JSON. Without names it does not reveal a topic or a user."""
        return {
            "kind": self.kind,
            "since": self.since_ns / NS_PER_S,
            "object": self.object if with_names else "",
            "text": self.text if with_names else "",
        }


class Alarms:
    """The alarms of one bus. Any thread may raise and clear them."""

    def __init__(self, wall_ns: Callable[[], int], log: Logger) -> None:
        self._wall_ns = wall_ns
        self._log = log
        self._mutex = threading.Lock()
        self._raised: dict[tuple[str, str], Alarm] = {}
        self._numbers: Counter[str] = Counter()  # of raised alarms, by kind
        self.left_out = 0  # alarms that were not kept because of MAX_ALARMS

    def raise_alarm(self, kind: str, name: str, text: str) -> None:
        """Raise the alarm `kind` of the object `name`; replace its text if it is raised."""
        with self._mutex:
            known = self._raised.get((kind, name))
            if known is None:
                if self._numbers[kind] >= MAX_ALARMS:
                    self.left_out += 1
                    return
                self._numbers[kind] += 1
            since_ns = known.since_ns if known else self._wall_ns()
            self._raised[kind, name] = Alarm(kind, name, text, since_ns)
        if known is None:
            self._log.warning("alarm raised", kind=kind, object=name, text=text)

    def clear_alarm(self, kind: str, name: str) -> None:
        """Clear an alarm; does nothing if it is not raised."""
        with self._mutex:
            known = self._raised.pop((kind, name), None)
            if known is not None:
                self._numbers[kind] -= 1
        if known is not None:
            lasted_s = round((self._wall_ns() - known.since_ns) / NS_PER_S, 3)
            self._log.info("alarm cleared", kind=kind, object=name, lasted_s=lasted_s)

    def is_raised(self, kind: str, name: str) -> bool:
        return (kind, name) in self._raised

    def to_json(self, *, with_names: bool) -> list[dict[str, Any]]:
        """Return the raised alarms for JSON, the oldest first."""
        with self._mutex:
            alarms = sorted(self._raised.values(), key=lambda alarm: alarm.since_ns)
        return [alarm.to_json(with_names=with_names) for alarm in alarms]
