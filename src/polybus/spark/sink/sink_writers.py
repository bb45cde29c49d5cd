"""`format("polybus")` as a sink: exactly once, by staging and one publish.

    tasks       each stages its rows (`staging.py`), shaped by columns (`shaping.py`)
    driver      publishes all stages of the epoch in one transaction (`publishing.py`)

Spark pickles a writer and hands it to whatever process needs one, so it holds settings and
nothing alive. Each process has one client for a bus: Spark uses its processes again.
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
from polybus.spark.spark_options import STORE_SCHEME, SparkOptions

if TYPE_CHECKING:
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

REFUSE, CONTINUE = "refuse", "continue"
PERMANENT = (UsageError, Denied, WrongKind)  # another try would end in the same way
CLIENT_OPTIONS = ClientOptions()  # with a bus that is started again
MAX_NAME_BYTES = 220  # of producerId and transactionId; the bus's names are a little longer


@dataclass(frozen=True, slots=True)
class SinkOptions:
    bus: str
    topic: str | None
    producer: str | None
    transaction: str | None
    on_new: str
    number: int = 1  # of the transaction, in a series of the same name


def batch_writer(options: SparkOptions, schema: StructType) -> DataSourceArrowWriter:
    settings = _settings(options, schema)
    if options.text("onNewCheckpoint") is not None:
        raise UsageError("leave option onNewCheckpoint out: a batch write has no checkpoint")
    return BatchWriter(settings)


def stream_writer(options: SparkOptions, schema: StructType) -> DataSourceStreamArrowWriter:
    settings = _settings(options, schema)
    if settings.transaction is not None:
        raise UsageError(
            "leave option transactionId out: each epoch of a stream is a transaction of its own; "
            "producerId is the name that outlives a checkpoint"
        )
    return StreamWriter(settings)


def _settings(options: SparkOptions, schema: StructType) -> SinkOptions:
    python_worker.note_request()
    bus, topic = options.bus, options.text("topic")
    if bus.startswith(STORE_SCHEME):
        raise UsageError(
            f"write through the running bus, polybus://HOST:PORT: {bus} belongs to one bus, "
            "and only reading works beside it"
        )
    message_batches.check_schema(schema, topic)
    get_client(bus)
    producer, transaction = options.text("producerId"), options.text("transactionId")
    if len(f"{producer or ''}{transaction or ''}".encode()) > MAX_NAME_BYTES:
        raise UsageError(
            f"shorten producerId or transactionId: they have at most {MAX_NAME_BYTES} bytes"
        )
    on_new = options.choice("onNewCheckpoint", (REFUSE, CONTINUE), REFUSE)
    number = options.count("transactionNumber")
    if number is not None and transaction is None:
        raise UsageError("transactionNumber needs transactionId: the name of the series it is of")
    return SinkOptions(bus, topic, producer, transaction, on_new, number or 1)


# --- the writers


class BatchWriter(DataSourceArrowWriter):
    def __init__(self, settings: SinkOptions) -> None:
        self._settings = settings

    @hide_traceback()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        return stage_rows(self._settings, iterator)

    @hide_traceback()
    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        settings = self._settings
        epoch_publication.publish_batch(
            get_client(settings.bus), _all(messages), _transaction(settings), settings.number
        )

    @hide_traceback()
    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        epoch_publication.discard(
            get_client(self._settings.bus), cast("Sequence[StagedRows]", messages)
        )


class StreamWriter(DataSourceStreamArrowWriter):
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
            client, _all(messages), batchId, settings.producer, settings.on_new
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
    """All rows of a task, staged.

    Rows that cannot be written are told to the driver, which raises it: Spark would try the
    task again, in vain, and put a line of its own before ours.
    """
    python_worker.note_request()
    staging = TaskStage(get_client(settings.bus))
    try:
        for batch in rows:
            for topic, messages in message_batches.build_batches(batch, settings.topic):
                staging.put(topic, messages)
        return StagedRows(staging.finish(), query_id(), staging.rows)
    except PERMANENT as error:
        staging.discard()
        advice = "write to another topic: " if isinstance(error, WrongKind) else ""
        return StagedRows(None, query_id(), fault=(error.code, f"{advice}{error}"))
    except BaseException:
        staging.discard()
        raise


def _transaction(settings: SinkOptions) -> str | None:
    """A transaction is one of its producer's, if that is named."""
    if settings.transaction is None or settings.producer is None:
        return settings.transaction
    return f"{settings.producer}/{settings.transaction}"


def _all(messages: Sequence[WriterCommitMessage | None]) -> list[StagedRows]:
    found = [one for one in messages if isinstance(one, StagedRows)]
    assert len(found) == len(messages), "Spark commits only if every task has succeeded"
    for one in found:
        if one.fault is not None:
            raise error_from_code(*one.fault)
    return found


# --- one client a process and bus

_clients: dict[tuple[int, str], Client] = {}


def get_client(bus: str) -> Client:
    """Of this process: a connection does not outlive a fork."""
    key = os.getpid(), bus
    if key not in _clients:
        client = Client(bus, CLIENT_OPTIONS)
        client.act("topic.list", pattern="")  # says at once, and plainly, if nobody is there
        _clients[key] = client
    return _clients[key]
