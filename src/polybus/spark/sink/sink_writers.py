"""The sink of `format("polybus")`: exactly once, by staging and one publish.

    tasks       stage their rows (`task_stage.py`), converted by column (`message_batches.py`)
    driver      publishes all stages of the epoch in one commit, all or nothing

The epoch of a stream has a stamp: the producer is `producerId` or the query's id, the counter is
Spark's batch id + 1. If the driver dies after the publish and before it writes Spark's commit log,
Spark runs the epoch again. It has the same stamp, so the second publish changes nothing.

A batch write uses `transactionId` as its stamp if it is given, and repeating it publishes nothing.
Without it the write opens a producer for the duration of the publish, so that the request can be
repeated if its response is lost.

Spark pickles a writer and sends it to other processes, so a writer holds only settings. Each
process keeps one client per bus, because Spark reuses its processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from polybus.errors import (
    Denied,
    PolybusError,
    StageGone,
    Stale,
    TooLarge,
    UsageError,
    WrongKind,
    error_from_code,
)
from polybus.native import Client, ClientOptions
from polybus.native.protocol import requests
from polybus.spark import python_worker
from polybus.spark.python_worker import QUERY_ID, hide_traceback
from polybus.spark.sink import message_batches
from polybus.spark.sink.task_stage import StagedRows, TaskStage
from polybus.spark.spark_options import SparkOptions
from polybus.store.engine_registry import is_store_url

PERMANENT = (UsageError, Denied, WrongKind)  # a retry would fail the same way
CLIENT_OPTIONS = ClientOptions()  # waits for a restart of the bus
# Of producerId and transactionId together; the store's limit is a little higher.
MAX_NAME_BYTES = 220
# A commit changes at most 900 records of the store; each stage is one.
MAX_STAGES = 890


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Checked options of a sink."""

    bus: str
    topic: str | None
    producer: str | None
    transaction: str | None
    on_new: str
    number: int = 1  # of the transaction, in a series of the same name


def parse_options(options: SparkOptions, schema: StructType, *, is_stream: bool) -> SinkOptions:
    """Return the checked options. Fails now, before any task starts, if no bus answers."""
    python_worker.note_request()
    bus, topic = options.bus, options.text("topic")
    if is_store_url(bus):
        raise UsageError(
            f"cannot write to {bus}: its bus is the only writer; give polybus://HOST:PORT"
        )
    message_batches.check_schema(schema, topic)
    get_client(bus)
    producer, transaction = options.text("producerId"), options.text("transactionId")
    if is_stream and transaction is not None:
        raise UsageError(
            "option transactionId is not allowed for a stream, whose epochs are transactions; "
            "leave it out, or use producerId for a name that outlives a checkpoint"
        )
    if not is_stream and options.text("onNewCheckpoint") is not None:
        raise UsageError(
            "option onNewCheckpoint is not allowed for a batch write, which has no checkpoint; "
            "leave it out"
        )
    if len(f"{producer or ''}{transaction or ''}".encode()) > MAX_NAME_BYTES:
        raise UsageError(
            f"producerId and transactionId must have at most {MAX_NAME_BYTES} bytes together"
        )
    on_new = options.choice("onNewCheckpoint", ("refuse", "continue"), "refuse")
    number = options.count("transactionNumber")
    if number is not None and transaction is None:
        raise UsageError("transactionNumber needs transactionId, the name of its series")
    return SinkOptions(bus, topic, producer, transaction, on_new, number or 1)


class SinkWriter:
    """The part of a write that batches and epochs share: staging, and its end without a publish."""

    def __init__(self, settings: SinkOptions) -> None:
        self._settings = settings

    @hide_traceback()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        """Stage all rows of a task.

        A permanent error is returned to the driver, which raises it. If the task raised it, Spark
        would retry the task in vain and put its own message before ours.
        """
        python_worker.note_request()
        stage = TaskStage(get_client(self._settings.bus))
        context = TaskContext.get()
        query = context.getLocalProperty(QUERY_ID) if context else None  # None in a batch write
        try:
            for batch in iterator:
                for topic, rows in message_batches.build_batches(batch, self._settings.topic):
                    stage.put(topic, rows)
            return StagedRows(stage.finish(), query, stage.rows)
        except PERMANENT as error:
            stage.discard()
            advice = "write to another topic: " if isinstance(error, WrongKind) else ""
            return StagedRows(None, query, fault=(error.code, f"{advice}{error}"))
        except BaseException:
            stage.discard()
            raise

    @hide_traceback()
    def abort(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int | None = None,  # noqa: N803  # Spark's name
    ) -> None:
        """Discard the stages of a failed job. If the bus does not answer, their leases expire."""
        client = get_client(self._settings.bus)
        for part in messages:
            if isinstance(part, StagedRows) and part.stage is not None:
                try:
                    client.call(requests.StageDiscard(stage=part.stage))
                except PolybusError:
                    return


class BatchWriter(SinkWriter, DataSourceArrowWriter):
    """Writer of `df.write`."""

    @hide_traceback()
    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Publish once per transaction and number; always if there is no transaction.

        The numbers of a transaction must rise.
        """
        settings, client = self._settings, get_client(self._settings.bus)
        stages = [part.stage for part in _check_parts(messages) if part.stage is not None]
        if settings.transaction is not None:
            name = settings.transaction
            if settings.producer is not None:  # the namespace of its transactions
                name = f"{settings.producer}/{name}"
            stamp: dict[str, Any] = {"producer": f"transaction/{name}", "counter": settings.number}
            _publish(client, requests.StagePublish(stages=stages, stamp=stamp, run={"id": name}))
        elif stages:
            opened = client.call(requests.ProducerOpen())
            stamp = {"producer": opened["producer"], "epoch": opened["epoch"], "counter": 1}
            _publish(client, requests.StagePublish(stages=stages, stamp=stamp))
            client.call(requests.ProducerClose(producer=opened["producer"], epoch=opened["epoch"]))


class StreamWriter(SinkWriter, DataSourceStreamArrowWriter):
    """Writer of `df.writeStream`."""

    @hide_traceback()
    def commit(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803  # Spark's name
    ) -> None:
        """Publish an epoch. An epoch without rows is skipped: counters may have gaps."""
        settings, client = self._settings, get_client(self._settings.bus)
        parts = _check_parts(messages)
        stages = [part.stage for part in parts if part.stage is not None]
        if not stages:
            return
        queries = {part.query for part in parts if part.query}
        if len(queries) != 1:
            raise UsageError(
                f"tasks of one epoch belong to {len(queries)} queries; use writeStream"
            )
        (query,) = queries
        # Counters start at 1, batch ids at 0.
        stamp = {"producer": settings.producer or query, "counter": batchId + 1}
        run = {"id": query, "on_new": settings.on_new}
        _publish(client, requests.StagePublish(stages=stages, stamp=stamp, run=run))


def _check_parts(messages: Sequence[WriterCommitMessage | None]) -> list[StagedRows]:
    """Return the results of all tasks.

    Raises the error of a task that could not write its rows, and `TooLarge` if one commit cannot
    publish all stages.
    """
    parts = [part for part in messages if isinstance(part, StagedRows)]
    assert len(parts) == len(messages), "Spark commits only if every task has succeeded"
    for part in parts:
        if part.fault is not None:
            raise error_from_code(*part.fault)
    count = sum(part.stage is not None for part in parts)
    if count > MAX_STAGES:
        raise TooLarge(
            f"write with at most {MAX_STAGES} tasks, got {count}: all are published in one "
            f"commit; use .coalesce({MAX_STAGES}) before .write"
        )
    return parts


def _publish(client: Client, request: requests.StagePublish) -> None:
    try:
        client.call(request)
    except StageGone as error:
        raise StageGone(
            f"nothing was published: a stage has expired ({error}); write it again; "
            "stages are kept for a day after their task has ended"
        ) from None
    except Stale:
        raise Stale(
            "use a new checkpointLocation: this one was set back to an epoch that is too old to "
            "check whether its rows were published"
        ) from None


# --- one client per process and bus

_clients: dict[tuple[int, str], Client] = {}


def get_client(bus: str) -> Client:
    """Return the client of this process. A connection does not survive a fork."""
    key = os.getpid(), bus
    if key not in _clients:
        client = Client(bus, CLIENT_OPTIONS)
        client.topics(pattern="")  # fails now if no bus answers
        _clients[key] = client
    return _clients[key]
