"""Writing down what subscribers have read: many of them in one commit.

What one turn of the loop brings goes together. Whoever moved a LAST is told when it is
on disk, so that no answer rests on what a crash could take back.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from polybus.dialects.pirate.server import subscriber_records
from polybus.dialects.pirate.server.subscriber_context import SubscriberContext, error_from_future
from polybus.errors import PolybusError
from polybus.model.commit import Commit

if TYPE_CHECKING:
    from polybus.dialects.pirate.server.subscription_table import Subscription, SubscriptionTable
    from polybus.model.commit import CommitResult

OnSaved = Callable[[PolybusError | None], None]


class LastWriter:
    def __init__(self, means: SubscriberContext, table: SubscriptionTable) -> None:
        self._means = means
        self._table = table
        self._unsaved: dict[Subscription, None] = {}
        self._waiting: list[OnSaved] = []

    def save(self, moved: Subscription, told: OnSaved) -> None:
        """Has it written with the next `flush`, which comes at the end of the turn."""
        if len(self._unsaved) >= subscriber_records.MAX_CHANGES_PER_COMMIT:
            self.flush()
        if not self._unsaved:
            self._means.run_on_loop(self.flush)  # if no turn's end comes before
        self._unsaved[moved] = None
        self._waiting.append(told)

    def flush(self) -> None:
        if not self._unsaved:
            return
        moved = [(one, one.last) for one in self._unsaved]
        waiting, self._waiting, self._unsaved = self._waiting, [], {}
        changes = tuple([subscriber_records.last_change(one.place, last) for one, last in moved])
        self._means.commit(
            Commit(changes=changes), lambda future: self._on_committed(moved, waiting, future)
        )

    def _on_committed(
        self,
        moved: list[tuple[Subscription, int]],
        waiting: list[OnSaved],
        future: Future[CommitResult],
    ) -> None:
        error = error_from_future(future)
        if error is None:
            for one, last in moved:
                one.saved = max(one.saved, last)
                self._table.changed_topics.add(one.place.topic)
        for told in waiting:
            told(error)
