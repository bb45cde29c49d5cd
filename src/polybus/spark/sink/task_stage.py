"""What a task does: it stages its rows where nobody sees them, and says where.

Its stage is a fresh one, also when the task is tried again: what a killed task has left is
never published, and goes when its lease ends; one that fails discards it. The lease is long,
since what a task has finished waits for the slowest one of its job, with nobody there to
renew it; while the task works, however long, it is renewed.
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

LEASE_S = 86_400.0  # from the end of a task the rest of its job may take so long
QUERY_ID = "sql.streaming.queryId"


@dataclass(frozen=True, slots=True)
class StagedRows(WriterCommitMessage):
    """What a task tells the driver. Without rows there is no stage.

    The query's id travels here, since the driver's own commit is not told it. `fault` is the
    code and text of an error that no other try can mend.
    """

    stage: str | None
    query: str | None
    rows: int = 0
    fault: tuple[str, str] | None = None


def query_id() -> str | None:
    """Of the stream that this task belongs to; None in a batch write."""
    context = TaskContext.get()
    return context.getLocalProperty(QUERY_ID) if context else None


class TaskStage:
    """One task's stage, made when there is something to put."""

    def __init__(self, client: Client, *, lease_s: float = LEASE_S) -> None:
        self._client = client
        self._lease_s = lease_s
        self._stage: Stage | None = None
        self._renewing: LeaseRenewer | None = None
        self.rows = 0

    def put(self, topic: str, rows: pa.RecordBatch) -> None:
        self._open().put_rows_nowait(topic, rows)
        self.rows += rows.num_rows

    def finish(self) -> str | None:
        """All of it is on disk, and waits; its name."""
        if self._stage is None:
            return None
        self._stage.flush()
        self._end()
        self._stage.close()
        return self._stage.name

    def discard(self) -> None:
        """The task has failed: what it has staged is of no use. A bus that is not there
        collects it by itself."""
        self._end()
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
            self._renewing = LeaseRenewer(
                lambda: self._client.act("stage.renew", stage=name, lease_s=self._lease_s),
                self._lease_s / 3,
            )
        return self._stage

    def _end(self) -> None:
        if self._renewing is not None:
            self._renewing.end()


class LeaseRenewer:
    """Renews a lease now and then on a thread of its own. One that fails is not mourned:
    the next may do better, and if the stage is lost, putting or publishing will say so."""

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
