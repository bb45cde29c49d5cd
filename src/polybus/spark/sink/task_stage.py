"""The stage of a writing task: rows that are on disk and not visible before the publish.

Each attempt of a task has a new stage. The stage of a killed task is never published and expires
with its lease; a task that fails discards its stage. The lease is long, because a finished task
waits for the slowest task of its job and does not renew it. A running task renews it.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Event, Thread

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from polybus.errors import PolybusError
from polybus.native import Client, Stage
from polybus.native.protocol.requests import StageDiscard, StageRenew

LEASE_S = 86_400.0  # the longest time between the end of a task and the end of its job


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


class TaskStage:
    """The stage of one task, opened at the first put. A thread renews its lease until the end."""

    def __init__(self, client: Client, *, lease_s: float = LEASE_S) -> None:
        self._client = client
        self._lease_s = lease_s
        self._stage: Stage | None = None
        self._renewer: Thread | None = None
        self._has_ended = Event()
        self.rows = 0

    def put(self, topic: str, rows: pa.RecordBatch) -> None:
        if self._stage is None:
            self._stage = self._client.stage(self._lease_s)
            self._renewer = Thread(target=self._renew_lease, name="polybus-lease", daemon=True)
            self._renewer.start()
        self._stage.put_rows_nowait(topic, rows)
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
            self._client.call(StageDiscard(stage=self._stage.name))
        except PolybusError:
            pass

    def _stop_renewal(self) -> None:
        self._has_ended.set()
        if self._renewer is not None:
            self._renewer.join()

    def _renew_lease(self) -> None:
        assert self._stage is not None
        while not self._has_ended.wait(self._lease_s / 3):
            try:
                self._client.call(StageRenew(stage=self._stage.name, lease_s=self._lease_s))
            except PolybusError:
                pass  # the next one may succeed; the next put or the publish reports a lost stage
