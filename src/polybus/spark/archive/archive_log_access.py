"""Archive and log as one: a `LogAccess` whose shards begin where the archive begins.

Archived offsets are read from files, the rest from the log. `retain` trims only archived offsets,
so if the log is trimmed during a read, the newest manifest has the trimmed rows. Each row is read
exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from polybus.errors import Damaged, DoesNotExist, Trimmed
from polybus.model.arrow import HEADERS_TYPE, READ_SCHEMA
from polybus.model.name_pattern import Pattern
from polybus.spark.archive.archive_folder import ArchiveFolder
from polybus.spark.archive.manifest import (
    ArchivedFile,
    Manifest,
    list_archived_topics,
    read_manifest,
)
from polybus.spark.source.log_access import CHUNK_ROWS, LogAccess, ShardOffsets
from polybus.spark.source.read_bounds import trimmed_error

US_PER_MS = 1000
POSITION_COLUMNS = ["shard", "offset"]
STORED_COLUMNS = [
    "id",
    "shard",
    "offset",
    "timestamp_ns",
    "insertion_time",
    "shard_key",
    "body",
    "headers",
]


class ArchiveLogAccess(LogAccess):
    """Access to a log and the archive of its topics."""

    def __init__(self, log: LogAccess, archive: str) -> None:
        self._log = log
        self._folder = ArchiveFolder(archive)
        self._folder.check()

    def list_topics(self, pattern: str) -> list[str]:
        wanted = Pattern(pattern)
        archived = list_archived_topics(self._folder)
        names = {topic for topic in archived if wanted.matches(topic.encode())}
        return sorted(names.union(self._log.list_topics(pattern)))

    def shards(self, topic: str) -> dict[int, ShardOffsets]:
        """Return the offsets that archive and log have together."""
        # The log's bounds before the manifest: rows trimmed in between are in the manifest.
        try:
            shards = dict(self._log.shards(topic))
        except DoesNotExist:
            shards = {}
        archived = read_manifest(self._folder, topic).shards
        if not (shards or archived):
            return self._log.shards(topic)  # raises with the reason
        for shard, span in archived.items():
            in_log = shards.get(shard, span)
            shards[shard] = ShardOffsets(min(span.start, in_log.start), max(span.end, in_log.end))
        return dict(sorted(shards.items()))

    def find_time(self, topic: str, shard: int, timestamp_ns: int) -> int:
        return self._find(topic, shard, "timestamp_ns", timestamp_ns, self._log.find_time)

    def find_id(self, topic: str, shard: int, wanted: int) -> int:
        return self._find(topic, shard, "id", wanted, self._log.find_id)

    def read(
        self, topic: str, shard: int, start: int, end: int, columns: Collection[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        while start < end:
            manifest = read_manifest(self._folder, topic)
            if start < (manifest.end(shard) or 0):
                batches = self._read_files(manifest, shard, start, end)
            else:
                batches = self._read_log(topic, shard, start, end, columns)
            before = start
            for batch in batches:
                start = batch.column("offset")[-1].as_py() + 1
                yield batch
            if start == before and not self._is_archived(topic, shard, start):
                return

    def report_progress(
        self, query: str, name: str, topic: str, offsets: Mapping[int, int]
    ) -> None:
        self._log.report_progress(query, name, topic, offsets)

    def _find(
        self,
        topic: str,
        shard: int,
        column: str,
        least: int,
        find_in_log: Callable[[str, int, int], int],
    ) -> int:
        """Return the first offset where a rising column is >= `least`; the end if there is none."""
        columns = [*POSITION_COLUMNS, column]
        for file in read_manifest(self._folder, topic).files:
            if shard not in file.shards:
                continue
            for group in _row_groups(
                self._folder, file, shard, *file.shards[shard], columns, (column, least)
            ):
                is_of_shard = pc.equal(group.column("shard"), shard)
                is_match = pc.and_(is_of_shard, pc.greater_equal(group.column(column), least))
                offset = pc.min(group.column("offset").filter(is_match)).as_py()
                if offset is not None:
                    return int(offset)
        try:
            return find_in_log(topic, shard, least)
        except DoesNotExist:
            return self.shards(topic)[shard].end

    def _read_log(
        self, topic: str, shard: int, start: int, end: int, columns: Collection[str] | None
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows of the log. Ends at a trimmed offset if the archive has it."""
        try:
            yield from self._log.read(topic, shard, start, end, columns)
        except Trimmed:
            if not self._is_archived(topic, shard, start):
                raise trimmed_error(
                    topic, shard, start, self._log.shards(topic)[shard].start
                ) from None

    def _read_files(
        self, manifest: Manifest, shard: int, start: int, end: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows of the archive. Ends at a missing file if a newer manifest replaced it."""
        for file in manifest.find_files(shard, start, end):
            first, last = file.shards[shard]
            if first > start:
                raise trimmed_error(manifest.topic, shard, start, first)
            try:
                yield from _read_file(self._folder, file, shard, start, min(last, end))
            except FileNotFoundError:
                if read_manifest(self._folder, manifest.topic).number == manifest.number:
                    raise Damaged(f"{file.path} is missing from {self._folder.path}") from None
                return
            start = last

    def _is_archived(self, topic: str, shard: int, offset: int) -> bool:
        return offset < (read_manifest(self._folder, topic).end(shard) or 0)


def _read_file(
    folder: ArchiveFolder, file: ArchivedFile, shard: int, start: int, end: int
) -> Iterator[pa.RecordBatch]:
    """Yield rows of a file with the columns and types of the log."""
    for group in _row_groups(folder, file, shard, start, end, STORED_COLUMNS):
        offsets = group.column("offset")
        is_wanted = pc.and_(
            pc.equal(group.column("shard"), shard),
            pc.and_(pc.greater_equal(offsets, start), pc.less(offsets, end)),
        )
        rows = group if pc.all(is_wanted).as_py() else group.filter(is_wanted)
        # The archive stores Spark's types; the log has milliseconds and its own map type.
        times = pc.divide(rows.column("insertion_time").cast(pa.int64()), US_PER_MS)
        made = {"insertion_ms": times, "headers": rows.column("headers").cast(HEADERS_TYPE)}
        columns = [made[name] if name in made else rows.column(name) for name in READ_SCHEMA.names]
        yield from pa.Table.from_arrays(columns, schema=READ_SCHEMA).to_batches(CHUNK_ROWS)


def _row_groups(
    folder: ArchiveFolder,
    file: ArchivedFile,
    shard: int,
    start: int,
    end: int,
    columns: list[str],
    at_least: tuple[str, int] = ("offset", 0),
) -> Iterator[pa.Table]:
    """Yield the row groups that can have matching rows, by the statistics of their columns.

    Raises `Damaged` if the file is not valid Parquet, `FileNotFoundError` if it is missing.
    """
    column, least = at_least
    path = folder.path / file.path
    try:
        with pq.ParquetFile(path) as source:
            for number in range(source.num_row_groups):
                group = source.metadata.row_group(number)
                chunks = map(group.column, range(group.num_columns))
                statistics = {chunk.path_in_schema: chunk.statistics for chunk in chunks}
                shards, offsets = (statistics[name] for name in POSITION_COLUMNS)
                overlaps = shards.min <= shard <= shards.max and offsets.min < end
                if overlaps and start <= offsets.max and statistics[column].max >= least:
                    yield source.read_row_group(number, columns)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:  # Arrow reports a damaged file in several ways
        raise Damaged(f"{path} cannot be read: {error}; restore it") from None
