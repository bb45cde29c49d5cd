"""The sink of `format("polybus")`: exactly once, by staging and one publish.

    tasks       stage their rows (`task_stage.py`), converted by column (`message_batches.py`)
    driver      publishes all stages of the epoch in one commit (`epoch_publication.py`)

Spark pickles a writer and sends it to other processes, so a writer holds only settings. Each
process keeps one client per bus, because Spark reuses its processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter

from polybus.errors import Denied, UsageError, WrongKind, error_from_code
from polybus.native import Client, ClientOptions
from polybus.spark import python_worker
from polybus.spark.python_worker import hide_traceback
from polybus.spark.sink import epoch_publication, message_batches
from polybus.spark.sink.task_stage import StagedRows, TaskStage, query_id
from polybus.spark.spark_options import SparkOptions
from polybus.store.engine_registry import is_store_url

if TYPE_CHECKING:
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

REFUSE, CONTINUE = "refuse", "continue"
PERMANENT = (UsageError, Denied, WrongKind)  # a retry would fail the same way
CLIENT_OPTIONS = ClientOptions()  # waits for a restart of the bus
# of producerId and transactionId together; the store's limit is a little higher
MAX_NAME_BYTES = 220


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Checked options of a sink."""

    bus: str
    topic: str | None
    producer: str | None
    transaction: str | None
    on_new: str
    number: int = 1  # of the transaction, in a series of the same name


def batch_writer(options: SparkOptions, schema: StructType) -> DataSourceArrowWriter:
    settings = _parse_options(options, schema)
    if options.text("onNewCheckpoint") is not None:
        raise UsageError(
            "option onNewCheckpoint is not allowed for a batch write, which has no checkpoint; "
            "leave it out"
        )
    return BatchWriter(settings)


def stream_writer(options: SparkOptions, schema: StructType) -> DataSourceStreamArrowWriter:
    settings = _parse_options(options, schema)
    if settings.transaction is not None:
        raise UsageError(
            "option transactionId is not allowed for a stream, whose epochs are transactions; "
            "leave it out, or use producerId for a name that outlives a checkpoint"
        )
    return StreamWriter(settings)


def _parse_options(options: SparkOptions, schema: StructType) -> SinkOptions:
    python_worker.note_request()
    bus, topic = options.bus, options.text("topic")
    if is_store_url(bus):
        raise UsageError(
            f"cannot write to {bus}: its bus is the only writer; give polybus://HOST:PORT"
        )
    # Fail before any task starts.
    message_batches.check_schema(schema, topic)
    get_client(bus)
    producer, transaction = options.text("producerId"), options.text("transactionId")
    if len(f"{producer or ''}{transaction or ''}".encode()) > MAX_NAME_BYTES:
        raise UsageError(
            f"producerId and transactionId must have at most {MAX_NAME_BYTES} bytes together"
        )
    on_new = options.choice("onNewCheckpoint", (REFUSE, CONTINUE), REFUSE)
    number = options.count("transactionNumber")
    if number is not None and transaction is None:
        raise UsageError("transactionNumber needs transactionId, the name of its series")
    return SinkOptions(bus, topic, producer, transaction, on_new, number or 1)


# --- writers


class BatchWriter(DataSourceArrowWriter):
    """Writer of `df.write`."""

    def __init__(self, settings: SinkOptions) -> None:
        self._settings = settings

    @hide_traceback()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        return stage_rows(self._settings, iterator)

    @hide_traceback()
    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        settings = self._settings
        epoch_publication.publish_batch(
            get_client(settings.bus),
            _successful_parts(messages),
            _transaction(settings),
            settings.number,
        )

    @hide_traceback()
    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        epoch_publication.discard(
            get_client(self._settings.bus), cast("Sequence[StagedRows]", messages)
        )


class StreamWriter(DataSourceStreamArrowWriter):
    """Writer of `df.writeStream`."""

    def __init__(self, settings: SinkOptions) -> None:
        self._settings = settings

    @hide_traceback()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        return stage_rows(self._settings, iterator)

    @hide_traceback()
    def commit(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803
    ) -> None:
        settings, client = self._settings, get_client(self._settings.bus)
        epoch_publication.publish_epoch(
            client, _successful_parts(messages), batchId, settings.producer, settings.on_new
        )

    @hide_traceback()
    def abort(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803
    ) -> None:
        epoch_publication.discard(
            get_client(self._settings.bus), cast("Sequence[StagedRows]", messages)
        )


def stage_rows(settings: SinkOptions, rows: Iterator[pa.RecordBatch]) -> StagedRows:
    """Stage all rows of a task.

    A permanent error is returned to the driver, which raises it. If the task raised it, Spark would
    retry the task in vain and put its own message before ours.
    """
    python_worker.note_request()
    stage = TaskStage(get_client(settings.bus))
    try:
        for batch in rows:
            for topic, messages in message_batches.build_batches(batch, settings.topic):
                stage.put(topic, messages)
        return StagedRows(stage.finish(), query_id(), stage.rows)
    except PERMANENT as error:
        stage.discard()
        advice = "write to another topic: " if isinstance(error, WrongKind) else ""
        return StagedRows(None, query_id(), fault=(error.code, f"{advice}{error}"))
    except BaseException:
        stage.discard()
        raise


def _transaction(settings: SinkOptions) -> str | None:
    """Return the transaction's name, within the namespace of the producer if one is named."""
    if settings.transaction is None or settings.producer is None:
        return settings.transaction
    return f"{settings.producer}/{settings.transaction}"


def _successful_parts(messages: Sequence[WriterCommitMessage | None]) -> list[StagedRows]:
    """Return the results of all tasks; raises the error of a task that could not write its rows."""
    parts = [one for one in messages if isinstance(one, StagedRows)]
    assert len(parts) == len(messages), "Spark commits only if every task has succeeded"
    for part in parts:
        if part.fault is not None:
            raise error_from_code(*part.fault)
    return parts


# --- one client per process and bus

_clients: dict[tuple[int, str], Client] = {}


def get_client(bus: str) -> Client:
    """Return the client of this process. A connection does not survive a fork."""
    key = os.getpid(), bus
    if key not in _clients:
        client = Client(bus, CLIENT_OPTIONS)
        client.act("topic.list", pattern="")  # fails now if no bus answers
        _clients[key] = client
    return _clients[key]
