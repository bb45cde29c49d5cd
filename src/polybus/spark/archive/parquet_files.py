"""The archiving task: writes rows of its ranges to Parquet files, each with rows of one date.

A file is not part of the archive before a manifest lists it. A task that runs again or twice writes
files with other names, and a task that fails removes its unfinished files. A file is synced to disk
before its task reports it.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.types import StructType

from polybus.spark.archive.archive_folder import ArchiveFolder, explain_write_errors, sync_folder
from polybus.spark.archive.manifest import ArchivedFile, LastRow, OffsetSpan
from polybus.spark.source.partitions import OffsetRange
from polybus.spark.source.read_bounds import MAX_TIME_NS
from polybus.spark.source.topic_schema import COLUMNS, SCHEMA, BatchBuilder

# A row group is in memory until it is full: large enough for long runs in a column, small enough
# for several tasks on a machine.
GROUP_ROWS = 131_072
GROUP_BYTES = 32 << 20
# A file is closed at this size. Larger ones are not faster to read.
FILE_BYTES = 256 << 20
NS_PER_DAY = 86_400 * 10**9
# Neighbouring rows have close numbers and few keys. Bodies are left to zstd.
NUMBERS = ["offset", "id", "timestamp", "timestamp_ns", "insertion_time"]
DELTAS = dict.fromkeys(NUMBERS, "DELTA_BINARY_PACKED")
FEW_VALUES = ["shard", "shard_key"]
BOUNDED = [*NUMBERS, *FEW_VALUES]  # columns with statistics
ROWS = StructType([field for field in SCHEMA.fields if field.name != "topic"])
ARROW = pa.schema(
    pa.field(field.name, COLUMNS[field.name], field.nullable) for field in ROWS.fields
)


class WrittenFile(NamedTuple):
    """A file with the last row of each of its shards, sent from a task to the driver."""

    topic: str
    file: ArchivedFile
    lasts: dict[int, LastRow]

    def as_text(self) -> str:
        """Return the file as JSON, the value of Spark's row."""
        lasts = {str(shard): list(last) for shard, last in self.lasts.items()}
        return json.dumps({"topic": self.topic, "file": self.file.as_json(), "lasts": lasts})

    @classmethod
    def parse(cls, text: str) -> WrittenFile:
        given = json.loads(text)
        lasts = {int(shard): LastRow(*last) for shard, last in given["lasts"].items()}
        return cls(given["topic"], ArchivedFile.parse(given["file"]), lasts)


class TopicFileWriter:
    """Writes the files of one topic in one task."""

    def __init__(self, folder: ArchiveFolder, topic: str) -> None:
        self._folder = folder
        self._topic = topic
        self._open: dict[str, ParquetFileWriter] = {}
        self._builder = BatchBuilder(ROWS)

    def add(self, wanted: OffsetRange, batches: Iterator[pa.RecordBatch]) -> Iterator[WrittenFile]:
        """Write the rows of a range, given in order. Yields files that are full."""
        for batch in batches:
            for date, piece in by_date(batch):
                # A manifest stores one range per file and shard, so a gap needs another file.
                if date in self._open and not self._open[date].is_contiguous(wanted.shard, piece):
                    yield self._open.pop(date).close()
                if date not in self._open:
                    self._open[date] = ParquetFileWriter(self._folder, self._topic, date)
                shaped = self._builder.build_batch(self._topic, piece)
                self._open[date].add(wanted.shard, piece, shaped)
                if self._open[date].is_full:
                    yield self._open.pop(date).close()

    def finish(self) -> Iterator[WrittenFile]:
        while self._open:
            yield self._open.pop(next(iter(self._open))).close()

    def discard(self) -> None:
        for file in self._open.values():
            file.discard()


class ParquetFileWriter:
    """A file that is being written."""

    def __init__(self, folder: ArchiveFolder, topic: str, date: str) -> None:
        self._topic, self._date = topic, date
        place = folder.data(topic) / f"date={date}"
        self._path = place / f"{uuid.uuid4().hex}.zstd.parquet"
        self._relative = str(self._path.relative_to(folder.path))
        self._pending: list[pa.RecordBatch] = []
        self._bytes = self._rows = 0
        self._shards: dict[int, OffsetSpan] = {}
        self._lasts: dict[int, LastRow] = {}
        self._first_ns, self._last_ns = MAX_TIME_NS, 0
        with explain_write_errors(self._path):
            place.mkdir(parents=True, exist_ok=True)
            self._sink = pa.OSFile(str(self._path), "wb")
            self._writer = parquet_writer(self._sink)

    @property
    def is_full(self) -> bool:
        return bool(self._sink.tell() >= FILE_BYTES)

    def is_contiguous(self, shard: int, rows: pa.RecordBatch) -> bool:
        """Return whether rows follow those of the file. After a gap another file begins."""
        known = self._shards.get(shard)
        return known is None or known.end == rows.column("offset")[0].as_py()

    def add(self, shard: int, rows: pa.RecordBatch, shaped: pa.RecordBatch) -> None:
        """Append rows, given as in the log and as they are written."""
        first, last = rows.column("offset")[0].as_py(), rows.column("offset")[-1].as_py()
        known = self._shards.get(shard, OffsetSpan(first, first))
        self._shards[shard] = OffsetSpan(known.start, last + 1)
        self._lasts[shard] = LastRow(
            rows.column("id")[-1].as_py(), rows.column("timestamp_ns")[-1].as_py()
        )
        times = rows.column("timestamp_ns")
        self._first_ns = min(self._first_ns, times[0].as_py())
        self._last_ns = max(self._last_ns, times[-1].as_py())
        self._pending.append(shaped)
        self._rows += shaped.num_rows
        self._bytes += shaped.nbytes
        if self._rows >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
            self._flush()

    def close(self) -> WrittenFile:
        with explain_write_errors(self._path):
            self._flush()
            self._writer.close()
            self._sink.close()
            make_durable(self._path)
        file = ArchivedFile(
            self._relative,
            self._date,
            self._path.stat().st_size,
            self._first_ns,
            self._last_ns,
            self._shards,
        )
        return WrittenFile(self._topic, file, self._lasts)

    def discard(self) -> None:
        self._sink.close()
        self._path.unlink(missing_ok=True)

    def _flush(self) -> None:
        if not self._pending:
            return
        with explain_write_errors(self._path):
            self._writer.write_table(pa.Table.from_batches(self._pending), GROUP_ROWS)
        self._pending, self._bytes, self._rows = [], 0, 0


def parquet_writer(sink: pa.NativeFile) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        sink,
        ARROW,
        compression="zstd",
        compression_level=3,
        use_dictionary=FEW_VALUES,
        column_encoding=DELTAS,
        write_statistics=BOUNDED,
        store_schema=False,
    )


def make_durable(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    sync_folder(path.parent)


def by_date(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield pieces of one date each. Times of a shard never go back."""
    times = batch.column("timestamp_ns")
    at = 0
    while at < batch.num_rows:
        day = times[at].as_py() // NS_PER_DAY
        end = batch.num_rows
        if times[-1].as_py() // NS_PER_DAY != day:
            later = pc.greater_equal(times, pa.scalar((day + 1) * NS_PER_DAY, pa.int64()))
            end = pc.index(later, True).as_py()
        date = datetime.fromtimestamp(day * 86_400, UTC).date().isoformat()
        yield date, batch.slice(at, end - at)
        at = end
