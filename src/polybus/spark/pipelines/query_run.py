"""Runs the query of a pipeline, once or forever, and reports its progress.

SIGTERM and Ctrl-C stop a query. As after a kill, the next run repeats the unfinished batch.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, current_thread, main_thread
from types import FrameType
from typing import Any, NamedTuple

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from polybus.errors import UsageError
from polybus.spark.pipelines.spark_errors import raise_own_errors
from polybus.spark.source.query_position import QueryPosition

POLL_EVERY_S = 0.25
SMOOTH = 0.3  # weight of the last poll in the smoothed rate
DEFAULT_EVERY_S = 1.0
# A worker that starts too slowly on a busy machine is not an error of the query: retry.
SLOW_WORKER, TRIES = "Python worker failed to connect back", 4
SPARK_ERRORS = (PySparkException, Py4JError, ConnectionError)


class Progress(NamedTuple):
    """Progress of a pipeline. `lag` is the number of unread rows, None if it is unknown."""

    rows: int
    rows_per_s: float
    lag: int | None


OnProgress = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    pass


class QueryWatch:
    """Polls a query and reports its progress.

    Rows are counted by offsets: Spark counts a repeated batch twice, and keeps only the counts of
    the last batches. `before` is the number of rows before the query was restarted.
    """

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

    def poll(self) -> None:
        # One call to Java. PySpark's own property needs dozens of calls.
        last = self._query._jsq.lastProgress()
        if last is None:
            return
        sources = json.loads(last.json())["sources"]
        if not self._read:
            first = self._query.recentProgress[0]["sources"]
            self._read = [
                SourceProgress(source["startOffset"], source["endOffset"]) for source in first
            ]
        for reading, source in zip(self._read, sources, strict=True):
            reading.note(source["endOffset"], source.get("latestOffset"))
        read = sum(reading.rows for reading in self._read)
        rows = self._count() if self._count else self._before + read
        now_s = time.monotonic()
        rate = (rows - self.rows) / max(now_s - self._looked_s, 1e-3)
        self._rate += (rate - self._rate) * (SMOOTH if self._rate else 1.0)
        self.rows, self._looked_s = rows, now_s
        lags = [reading.lag for reading in self._read if reading.lag is not None]
        self._tell(Progress(rows, self._rate, sum(lags) if lags else None))


class SourceProgress:
    """Rows that one source has read in this run, and its lag."""

    def __init__(self, start: Any, end: Any) -> None:
        self.lag: int | None = None
        self.rows = 0
        first, last = _position(start), _position(end)
        self._starts = {} if last is None else (first or QueryPosition({})).starts(last)

    def note(self, end: Any, latest: Any) -> None:
        reached, newest = _position(end), _position(latest)
        if reached is None:
            return
        self.rows, lag = 0, 0
        for topic, shards in reached.offsets.items():
            starts = self._starts.setdefault(topic, {})
            for shard, offset in shards.items():
                since = reached.since.get(topic, {}).get(shard, offset)
                self.rows += offset - starts.setdefault(shard, since)
                if newest is not None:
                    lag += max(0, newest.offsets.get(topic, {}).get(shard, offset) - offset)
        self.lag = None if newest is None else lag


def _position(offset: Any) -> QueryPosition | None:
    """Return the position of a polybus source; None for any other source."""
    try:
        given = json.loads(offset) if isinstance(offset, str) else offset
        return QueryPosition.parse(given) if isinstance(given, dict) else None
    except (ValueError, UsageError):
        return None


class SummaryTable(NamedTuple):
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass
class Summary:
    """Result of a pipeline. `facts` are lines of the printed summary: name → value."""

    rows: int
    seconds: float
    facts: dict[str, object] = field(default_factory=dict)
    stopped_by: signal.Signals | None = None
    table: SummaryTable | None = None


class StopSignal:
    """Flag that SIGTERM and Ctrl-C set."""

    def __init__(self) -> None:
        self.by: signal.Signals | None = None
        self._event = Event()

    def __bool__(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for a signal. Returns True at once if one came, False after `seconds`."""
        return self._event.wait(seconds)

    def ask(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal. A second Ctrl-C raises KeyboardInterrupt at once."""
        if self and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.by = signal.Signals(number)
        self._event.set()


@contextmanager
def stop_on_signals() -> Iterator[StopSignal]:
    """Make SIGTERM and Ctrl-C set a flag. Errors of Spark after a signal are ignored.

    A signal to the process group also ends Spark's Java, which then raises errors. Python handles
    signals only in the main thread: a pipeline in another thread ends with its session.
    """
    stop = StopSignal()
    if current_thread() is not main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    except SPARK_ERRORS:
        if not stop:
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def activate_session(spark: SparkSession) -> None:
    """Make the session active in this thread. Spark needs it to find data sources."""
    sessions = spark._get_j_spark_session_class(spark._jvm)
    sessions.setActiveSession(spark._jsparkSession)


def run_query(
    writer: DataStreamWriter,
    *,
    once: bool,
    every_s: float = DEFAULT_EVERY_S,
    tell: OnProgress = ignore_progress,
    rows: Callable[[], int] | None = None,
) -> Summary:
    """Start a query and wait for its end.

    `rows` counts the finished rows if they are not those that the sources have read.
    """
    if once:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=f"{round(every_s * 1000)} milliseconds")
    began_s, done = time.monotonic(), 0
    with stop_on_signals() as stop, raise_own_errors():
        for tries_left in reversed(range(TRIES)):
            query = writer.start()
            watch = QueryWatch(query, tell, rows, done)
            try:
                while not (query.awaitTermination(POLL_EVERY_S) or stop):  # type: ignore[arg-type]  # fractions work
                    watch.poll()
                watch.poll()
                break
            except StreamingQueryException as error:
                if not tries_left or SLOW_WORKER not in str(error):
                    raise
            finally:
                done = watch.rows  # first: `stop` raises if a signal has ended Java
                query.stop()
    return Summary(done, time.monotonic() - began_s, stopped_by=stop.by)
