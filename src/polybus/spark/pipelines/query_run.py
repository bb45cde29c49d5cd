"""Runs a pipeline's query: once or for ever, with its progress told, until it is to stop.

SIGTERM and Ctrl-C end a query between two looks at it; whatever it was about to do is done
by the next run, as after a kill.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, current_thread, main_thread
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException, StreamingQueryException

from polybus.spark.pipelines.query_watch import OnProgress, Progress, QueryWatch, ignore_progress
from polybus.spark.pipelines.spark_errors import raise_own_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

__all__ = [
    "OnProgress",
    "Progress",
    "Summary",
    "SummaryTable",
    "activate_session",
    "ignore_progress",
    "raise_own_errors",
    "run_query",
    "stop_on_signals",
]

DEFAULT_EVERY_S = 1.0
# A worker that is slow to start on a busy machine is no fault of the query's: once more.
SLOW_WORKER, TRIES = "Python worker failed to connect back", 4
SPARK_ERRORS = (PySparkException, Py4JError, ConnectionError)


class SummaryTable(NamedTuple):
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass
class Summary:
    """What a pipeline has done. `facts` are lines for people: what → how much."""

    rows: int
    seconds: float
    facts: dict[str, object] = field(default_factory=dict)
    stopped_by: signal.Signals | None = None
    table: SummaryTable | None = None


class StopSignal:
    """Whether to go on. Set by a signal, and by nobody else."""

    def __init__(self) -> None:
        self.by: signal.Signals | None = None
        self._event = Event()

    def __bool__(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """True at once if it is to stop, else False when the time is over."""
        return self._event.wait(seconds)

    def ask(self, number: int, frame: FrameType | None = None) -> None:
        """A second Ctrl-C does not wait for anything."""
        if self and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.by = signal.Signals(number)
        self._event.set()


@contextmanager
def stop_on_signals() -> Iterator[StopSignal]:
    """Meanwhile SIGTERM and Ctrl-C only ask for an end. Signals are the main thread's: a
    pipeline that runs in another is ended by whoever ends its session.

    Who signals a whole group of processes ends Spark's Java, too: what Spark has to say then
    is no error.
    """
    stop = StopSignal()
    if current_thread() is not main_thread():
        yield stop
        return
    before = {one: signal.signal(one, stop.ask) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    except SPARK_ERRORS:
        if not stop:
            raise
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def activate_session(spark: SparkSession) -> None:
    """Spark finds formats by the session that is active in a thread; a new thread has none."""
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
    """Starts a query and stays with it to its end.

    `rows` counts what it has done, if that is not what its sources gave it.
    """
    if once:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=f"{round(every_s * 1000)} milliseconds")
    began_s, done = time.monotonic(), 0
    with stop_on_signals() as stop, raise_own_errors():
        for tries_left in reversed(range(TRIES)):
            watch = QueryWatch(writer.start(), tell, rows, done)
            try:
                watch.run_until_stopped(stop)
                break
            except StreamingQueryException as error:
                if not tries_left or SLOW_WORKER not in str(error):
                    raise
            finally:
                done = watch.rows
    return Summary(done, time.monotonic() - began_s, stopped_by=stop.by)
