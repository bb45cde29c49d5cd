"""Looks at a running query now and then: rows, their rate, and how many wait."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from polybus.errors import UsageError
from polybus.spark.source.query_position import QueryPosition

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from polybus.spark.pipelines.query_run import StopSignal

LOOK_EVERY_S = 0.25
SMOOTH = 0.3  # how much the last look counts in the rate


class Progress(NamedTuple):
    """`lag` is how many rows wait, None if that is not known."""

    rows: int
    rows_per_s: float
    lag: int | None


OnProgress = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    pass


class QueryWatch:
    """Looks at a query now and then. Rows are told by offsets: Spark counts a batch that it
    does again once more, and keeps the counts of the last batches only. `before` were done
    by the query before it was started again."""

    def __init__(
        self,
        query: StreamingQuery,
        tell: OnProgress,
        rows: Callable[[], int] | None,
        before: int = 0,
    ) -> None:
        self._query = query
        self._before = before
        self._tell = tell
        self._count = rows
        self._read: list[SourceProgress] = []
        self._looked_s = time.monotonic()
        self._rate = 0.0
        self.rows = before

    def run_until_stopped(self, stop: StopSignal) -> None:
        """Until the query has ended, or is to; then it has."""
        try:
            while not (self._query.awaitTermination(LOOK_EVERY_S) or stop):  # type: ignore[arg-type]  # parts of seconds will do
                self.poll()
            self.poll()
        finally:
            self._query.stop()

    def poll(self) -> None:
        last = self._last()
        if last is None:
            return
        sources = last["sources"]
        if not self._read:
            first = self._query.recentProgress[0]["sources"]
            self._read = [SourceProgress(one["startOffset"], one["endOffset"]) for one in first]
        for reading, source in zip(self._read, sources, strict=True):
            reading.note(source["endOffset"], source.get("latestOffset"))
        rows = self._count() if self._count else self._before + sum(one.rows for one in self._read)
        now_s = time.monotonic()
        rate = (rows - self.rows) / max(now_s - self._looked_s, 1e-3)
        self._rate += (rate - self._rate) * (SMOOTH if self._rate else 1.0)
        self.rows, self._looked_s = rows, now_s
        lags = [one.lag for one in self._read if one.lag is not None]
        self._tell(Progress(rows, self._rate, sum(lags) if lags else None))

    def _last(self) -> dict[str, Any] | None:
        """One call to Java: what Python makes of a progress takes dozens."""
        found = self._query._jsq.lastProgress()
        return None if found is None else json.loads(found.json())


class SourceProgress:
    """How far one source of a query was read since this run began, and how far it could be."""

    def __init__(self, start: Any, end: Any) -> None:
        self.lag: int | None = None
        self.rows = 0
        first, last = _position(start), _position(end)
        self._starts = {} if last is None else (first or QueryPosition({})).starts(last)

    def note(self, end: Any, latest: Any) -> None:
        reached, there = _position(end), _position(latest)
        if reached is None:
            return
        self.rows, lag = 0, 0
        for topic, shards in reached.offsets.items():
            starts = self._starts.setdefault(topic, {})
            for shard, offset in shards.items():
                since = reached.since.get(topic, {}).get(shard, offset)
                self.rows += offset - starts.setdefault(shard, since)
                if there is not None:
                    lag += max(0, there.offsets.get(topic, {}).get(shard, offset) - offset)
        self.lag = None if there is None else lag


def _position(told: Any) -> QueryPosition | None:
    """Of a polybus source; None of any other."""
    try:
        given = json.loads(told) if isinstance(told, str) else told
        return QueryPosition.parse(given) if isinstance(given, dict) else None
    except (ValueError, UsageError):
        return None
