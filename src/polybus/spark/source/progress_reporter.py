"""What the bus is told of a query: how far it has come, and not too often."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from polybus.errors import PolybusError

if TYPE_CHECKING:
    from polybus.spark.source.log_access import LogAccess
    from polybus.spark.source.query_position import QueryPosition

log = logging.getLogger("polybus.spark")

# Telling the bus costs it a commit: not for each of a hundred batches a second.
TELL_EVERY_S = 1.0


class ProgressReporter:
    def __init__(self) -> None:
        self._noted: QueryPosition | None = None
        self._untold: QueryPosition | None = None
        self._told_s = float("-inf")

    def note(self, position: QueryPosition) -> None:
        if position != self._noted:
            self._noted = self._untold = position

    def report(self, access: LogAccess, *, now: bool = False) -> None:
        """Tells the newest, if the last time is long enough ago."""
        position = self._untold
        if position is None or not (now or time.monotonic() - self._told_s >= TELL_EVERY_S):
            return
        self._untold, self._told_s = None, time.monotonic()
        for topic, offsets in position.offsets.items():
            try:
                access.report_progress(position.query, "", topic, offsets)
            except PolybusError as error:  # who looks at the lag sees an old one; reading goes on
                log.warning("the bus was not told how far %s was read: %s", topic, error)
