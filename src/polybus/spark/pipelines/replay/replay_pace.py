"""How much a part of a replay reads.

All it may, if nothing is said of a rate; else about what may be written in a second. Where a
filter lets few of them through, parts grow: a slow replay of one key would else read its topic
as slowly as it may write.
"""

from __future__ import annotations

PART_S = 1.0
MOST_GROWTH = 64  # then many come at once where the filter begins to let all through


class ReplayPace:
    """`rows` is what the next part reads."""

    def __init__(self, most_rows: int, rate: float | None) -> None:
        self._allowed = most_rows if rate is None else max(1, int(rate * PART_S))
        self._least = self.rows = min(most_rows, self._allowed)
        self._most = min(most_rows, self._least * MOST_GROWTH)

    def adapt(self, written: int) -> None:
        """Of the last part: twice as much if that is not too much either."""
        if written > self._allowed:
            self.rows = self._least
        elif written * 2 <= self._allowed:
            self.rows = min(self._most, self.rows * 2)
