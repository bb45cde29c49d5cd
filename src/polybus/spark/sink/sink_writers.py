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

from polybus.errors import Denied, UsageError, WrongKind, from_code
from polybus.native import Client, ClientOptions
from polybus.spark import python_worker
from polybus.spark.sink import epoch_publication, message_batches
from polybus.spark.sink.task_stage import Staged, Staging, query_id
from polybus.spark.spark_options import FILES, Options
from polybus.spark.worker_errors import told_plainly

if TYPE_CHECKING:
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

REFUSE, CONTINUE = "refuse", "continue"
PERMANENT = (UsageError, Denied, WrongKind)  # another try would end in the same way
PATIENCE = ClientOptions()  # with a bus that is started again
MAX_NAME_BYTES = 220  # of producerId and transactionId; the bus's names are a little longer


@dataclass(frozen=True, slots=True)
class Settings:
    bus: str
    topic: str | None
    producer: str | None
    transaction: str | None
    on_new: str
    number: int = 1  # of the transaction, in a series of the same name


def batch_writer(options: Options, schema: StructType) -> DataSourceArrowWriter:
    settings = _settings(options, schema)
    if options.text("onNewCheckpoint") is not None:
        raise UsageError("leave option onNewCheckpoint out: a batch write has no checkpoint")
    return BatchWriter(settings)


def stream_writer(options: Options, schema: StructType) -> DataSourceStreamArrowWriter:
    settings = _settings(options, schema)
    if settings.transaction is not None:
        raise UsageError(
            "leave option transactionId out: each epoch of a stream is a transaction of its own; "
            "producerId is the name that outlives a checkpoint"
        )
    return StreamWriter(settings)


def _settings(options: Options, schema: StructType) -> Settings:
    python_worker.asked()
    bus, topic = options.bus, options.text("topic")
    if bus.startswith(FILES):
        raise UsageError(
            f"write through the running bus, polybus://HOST:PORT: {bus} belongs to one bus, "
            "and only reading works beside it"
        )
    message_batches.check(schema, topic)
    client_of(bus)
    producer, transaction = options.text("producerId"), options.text("transactionId")
    if len(f"{producer or ''}{transaction or ''}".encode()) > MAX_NAME_BYTES:
        raise UsageError(
            f"shorten producerId or transactionId: they have at most {MAX_NAME_BYTES} bytes"
        )
    on_new = options.choice("onNewCheckpoint", (REFUSE, CONTINUE), REFUSE)
    number = options.count("transactionNumber")
    if number is not None and transaction is None:
        raise UsageError("transactionNumber needs transactionId: the name of the series it is of")
    return Settings(bus, topic, producer, transaction, on_new, number or 1)


# --- the writers


class BatchWriter(DataSourceArrowWriter):
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @told_plainly()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        return staged(self._settings, iterator)

    @told_plainly()
    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        settings = self._settings
        epoch_publication.publish_batch(
            client_of(settings.bus), _all(messages), _transaction(settings), settings.number
        )

    @told_plainly()
    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        epoch_publication.discard(client_of(self._settings.bus), cast("Sequence[Staged]", messages))


class StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @told_plainly()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        return staged(self._settings, iterator)

    @told_plainly()
    def commit(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803
    ) -> None:
        settings, client = self._settings, client_of(self._settings.bus)
        epoch_publication.publish_epoch(
            client, _all(messages), batchId, settings.producer, settings.on_new
        )

    @told_plainly()
    def abort(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803
    ) -> None:
        epoch_publication.discard(client_of(self._settings.bus), cast("Sequence[Staged]", messages))


def staged(settings: Settings, rows: Iterator[pa.RecordBatch]) -> Staged:
    """All rows of a task, staged.

    Rows that cannot be written are told to the driver, which raises it: Spark would try the
    task again, in vain, and put a line of its own before ours.
    """
    python_worker.asked()
    staging = Staging(client_of(settings.bus))
    try:
        for batch in rows:
            for topic, messages in message_batches.batches(batch, settings.topic):
                staging.put(topic, messages)
        return Staged(staging.finish(), query_id(), staging.rows)
    except PERMANENT as error:
        staging.discard()
        advice = "write to another topic: " if isinstance(error, WrongKind) else ""
        return Staged(None, query_id(), fault=(error.code, f"{advice}{error}"))
    except BaseException:
        staging.discard()
        raise


def _transaction(settings: Settings) -> str | None:
    """A transaction is one of its producer's, if that is named."""
    if settings.transaction is None or settings.producer is None:
        return settings.transaction
    return f"{settings.producer}/{settings.transaction}"


def _all(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    found = [one for one in messages if isinstance(one, Staged)]
    assert len(found) == len(messages), "Spark commits only if every task has succeeded"
    for one in found:
        if one.fault is not None:
            raise from_code(*one.fault)
    return found


# --- one client a process and bus

_clients: dict[tuple[int, str], Client] = {}


def client_of(bus: str) -> Client:
    """Of this process: a connection does not outlive a fork."""
    key = os.getpid(), bus
    if key not in _clients:
        client = Client(bus, PATIENCE)
        client.act("topic.list", pattern="")  # says at once, and plainly, if nobody is there
        _clients[key] = client
    return _clients[key]
