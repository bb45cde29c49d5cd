"""The stage of a writing task: rows that are on disk and not visible before the publish.

Each attempt of a task has a new stage. The stage of a killed task is never published and expires
with its lease; a task that fails discards its stage. The lease is long, because a finished task
waits for the slowest task of its job and does not renew it. A running task renews it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Thread
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from polybus.errors import PolybusError

if TYPE_CHECKING:
    from polybus.native import Client, Stage

LEASE_S = 86_400.0  # the longest time between the end of a task and the end of its job
QUERY_ID = "sql.streaming.queryId"


@dataclass(frozen=True, slots=True)
class StagedRows(WriterCommitMessage):
    """Result of a task, sent to the driver. `stage` is None if there were no rows.

    `query` is the query's id, which Spark does not pass to the driver's commit. `fault` is the code
    and text of a permanent error.
    """

    stage: str | None
    query: str | None
    rows: int = 0
    fault: tuple[str, str] | None = None


def query_id() -> str | None:
    """Return the id of the streaming query of this task; None in a batch write."""
    context = TaskContext.get()
    return context.getLocalProperty(QUERY_ID) if context else None


class TaskStage:
    """The stage of one task, opened at the first put."""

    def __init__(self, client: Client, *, lease_s: float = LEASE_S) -> None:
        self._client = client
        self._lease_s = lease_s
        self._stage: Stage | None = None
        self._renewer: LeaseRenewer | None = None
        self.rows = 0

    def put(self, topic: str, rows: pa.RecordBatch) -> None:
        self._open().put_rows_nowait(topic, rows)
        self.rows += rows.num_rows

    def finish(self) -> str | None:
        """Wait until all rows are on disk. Returns the stage's name, None if there were no rows."""
        if self._stage is None:
            return None
        # Waits until the rows are durable: the driver may publish when the task has reported.
        self._stage.flush()
        self._stop_renewal()
        self._stage.close()
        return self._stage.name

    def discard(self) -> None:
        """Discard the rows of a failed task. If the bus does not answer, the lease expires."""
        self._stop_renewal()
        if self._stage is None:
            return
        self._stage.close()
        try:
            self._client.act("stage.discard", stage=self._stage.name)
        except PolybusError:
            pass

    def _open(self) -> Stage:
        if self._stage is None:
            self._stage = self._client.stage(self._lease_s)
            name = self._stage.name
            self._renewer = LeaseRenewer(
                lambda: self._client.act("stage.renew", stage=name, lease_s=self._lease_s),
                self._lease_s / 3,
            )
        return self._stage

    def _stop_renewal(self) -> None:
        if self._renewer is not None:
            self._renewer.end()


class LeaseRenewer:
    """Thread that renews a lease. A failed renewal is ignored: the next one may succeed, and a lost
    stage is reported by the next put or by the publish.
    """

    def __init__(self, renew: Callable[[], object], every_s: float) -> None:
        self._renew = renew
        self._every_s = every_s
        self._over = Event()
        self._thread = Thread(target=self._run, name="polybus-lease", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            try:
                self._renew()
            except PolybusError:
                pass
