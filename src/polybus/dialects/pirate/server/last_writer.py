"""Writing down what subscribers have read: many of them in one commit.

What one turn of the loop brings goes together. Whoever moved a LAST is told when it is
on disk, so that no answer rests on what a crash could take back.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from polybus.dialects.pirate.server import subscriber_records
from polybus.dialects.pirate.server.subscriber_context import Means, fault_of
from polybus.errors import PolybusError
from polybus.model.commit import Commit

if TYPE_CHECKING:
    from polybus.dialects.pirate.server.subscription_table import Subscription, Table
    from polybus.model.commit import Committed

Told = Callable[[PolybusError | None], None]


class Lasts:
    def __init__(self, means: Means, table: Table) -> None:
        self._means = means
        self._table = table
        self._moved: dict[Subscription, None] = {}
        self._waiting: list[Told] = []

    def save(self, moved: Subscription, told: Told) -> None:
        """Has it written with the next `flush`, which comes at the end of the turn."""
        if len(self._moved) >= subscriber_records.AT_ONCE:
            self.flush()
        if not self._moved:
            self._means.soon(self.flush)  # if no turn's end comes before
        self._moved[moved] = None
        self._waiting.append(told)

    def flush(self) -> None:
        if not self._moved:
            return
        moved = [(one, one.last) for one in self._moved]
        waiting, self._waiting, self._moved = self._waiting, [], {}
        changes = tuple([subscriber_records.moving(one.place, last) for one, last in moved])
        self._means.commit(
            Commit(changes=changes), lambda future: self._saved(moved, waiting, future)
        )

    def _saved(
        self,
        moved: list[tuple[Subscription, int]],
        waiting: list[Told],
        future: Future[Committed],
    ) -> None:
        error = fault_of(future)
        if error is None:
            for one, last in moved:
                one.saved = max(one.saved, last)
                self._table.moved.add(one.place.topic)
        for told in waiting:
            told(error)
