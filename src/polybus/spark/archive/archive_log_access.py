"""Archive and log as one: a `LogAccess` whose shards begin where the archive begins.

Archived offsets are read from files, the rest from the log. `retain` trims only archived offsets,
so if the log is trimmed during a read, the newest manifest has the trimmed rows. Each row is read
exactly once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from polybus.errors import Damaged, DoesNotExist, Trimmed
from polybus.model.arrow import HEADERS_TYPE, READ_SCHEMA
from polybus.model.name_pattern import Pattern
from polybus.spark.archive.archive_folder import ArchiveFolder
from polybus.spark.archive.manifest import list_archived_topics, read_manifest
from polybus.spark.source.log_access import CHUNK_ROWS, NO_BOUND, LogAccess, ShardOffsets
from polybus.spark.source.read_bounds import trimmed_error

if TYPE_CHECKING:
    from polybus.spark.archive.manifest import ArchivedFile, Manifest

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


class ArchiveLogAccess:
    """Access to a log and the archive of its topics."""

    def __init__(self, log: LogAccess, archive: str) -> None:
        self._log = log
        self._folder = ArchiveFolder(archive)
        self._folder.check()

    def list_topics(self, pattern: str) -> list[str]:
        wanted = Pattern(pattern)
        archived = [
            one for one in list_archived_topics(self._folder) if wanted.matches(one.encode())
        ]
        return sorted({*self._log.list_topics(pattern), *archived})

    def shards(self, topic: str) -> dict[int, ShardOffsets]:
        """Return the offsets that archive and log have together.

        Reads the log's bounds before the manifest: rows trimmed in between are in the manifest.
        """
        try:
            found = dict(self._log.shards(topic))
        except DoesNotExist:
            found = {}
        archived = read_manifest(self._folder, topic).shards
        if not (found or archived):
            return self._log.shards(topic)  # raises with the reason
        for shard, span in archived.items():
            log = found.get(shard, span)
            found[shard] = ShardOffsets(min(span.start, log.start), max(span.end, log.end))
        return dict(sorted(found.items()))

    def find_time(self, topic: str, shard: int, timestamp_ns: int) -> int:
        found = self._first(topic, shard, "timestamp_ns", timestamp_ns)
        if found is not None:
            return found
        try:
            return self._log.find_time(topic, shard, timestamp_ns)
        except DoesNotExist:
            return self.shards(topic)[shard].end

    def find_id(self, topic: str, shard: int, wanted: int) -> int:
        found = self._first(topic, shard, "id", wanted)
        if found is not None:
            return found
        try:
            return self._log.find_id(topic, shard, wanted)
        except DoesNotExist:
            return self.shards(topic)[shard].end

    def read(
        self,
        topic: str,
        shard: int,
        start: int,
        end: int,
        max_rows: int = NO_BOUND,
        columns: Collection[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        end = min(end, start + max_rows) if max_rows else end
        while start < end:
            manifest = read_manifest(self._folder, topic)
            if start < (manifest.end(shard) or 0):
                batches = self._from_files(manifest, shard, start, end)
            else:
                batches = self._from_log(topic, shard, start, end, columns)
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

    def _from_log(
        self, topic: str, shard: int, start: int, end: int, columns: Collection[str] | None
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows of the log. Ends at a trimmed offset if the archive has it."""
        try:
            yield from self._log.read(topic, shard, start, end, columns=columns)
        except Trimmed:
            if not self._is_archived(topic, shard, start):
                raise trimmed_error(
                    topic, shard, start, self._log.shards(topic)[shard].start
                ) from None

    def _from_files(
        self, manifest: Manifest, shard: int, start: int, end: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows of the archive. Ends at a missing file if a newer manifest replaced it."""
        for file in manifest.find_files(shard, start, end):
            first, last = file.shards[shard]
            if first > start:
                raise trimmed_error(manifest.topic, shard, start, first)
            try:
                yield from read_rows(self._folder, file, shard, start, min(last, end))
            except FileNotFoundError:
                if read_manifest(self._folder, manifest.topic).number == manifest.number:
                    raise Damaged(f"{file.path} is missing from {self._folder.path}") from None
                return
            start = last

    def _first(self, topic: str, shard: int, column: str, least: int) -> int | None:
        """Return the first offset in the archive where `column` is >= `least`; None if there is
        none.
        """
        for file in read_manifest(self._folder, topic).files:
            if shard in file.shards:
                found = _first_from(self._folder, file, shard, column, least)
                if found is not None:
                    return found
        return None

    def _is_archived(self, topic: str, shard: int, offset: int) -> bool:
        return offset < (read_manifest(self._folder, topic).end(shard) or 0)


def read_rows(
    folder: ArchiveFolder, file: ArchivedFile, shard: int, start: int, end: int
) -> Iterator[pa.RecordBatch]:
    """Yield rows of a file with the columns and types of the log."""
    for group in _groups(folder, file, shard, start, end, STORED_COLUMNS):
        place = group.column("shard"), group.column("offset")
        wanted = pc.and_(
            pc.equal(place[0], shard),
            pc.and_(pc.greater_equal(place[1], start), pc.less(place[1], end)),
        )
        found = group if pc.all(wanted).as_py() else group.filter(wanted)
        yield from _as_read(found).to_batches(CHUNK_ROWS)


def _as_read(stored: pa.Table) -> pa.Table:
    """Convert stored columns to READ_SCHEMA."""
    times = pc.divide(stored.column("insertion_time").cast(pa.int64()), US_PER_MS)
    made = {"insertion_ms": times, "headers": stored.column("headers").cast(HEADERS_TYPE)}
    columns = [made[name] if name in made else stored.column(name) for name in READ_SCHEMA.names]
    return pa.Table.from_arrays(columns, schema=READ_SCHEMA)


def _first_from(
    folder: ArchiveFolder, file: ArchivedFile, shard: int, column: str, least: int
) -> int | None:
    """Return the first offset of a shard in a file where a rising column is >= `least`."""
    start, end = file.shards[shard]
    for group in _groups(
        folder, file, shard, start, end, [*POSITION_COLUMNS, column], (column, least)
    ):
        wanted = pc.and_(
            pc.equal(group.column("shard"), shard), pc.greater_equal(group.column(column), least)
        )
        found = pc.min(group.column("offset").filter(wanted)).as_py()
        if found is not None:
            return int(found)
    return None


def _groups(
    folder: ArchiveFolder,
    file: ArchivedFile,
    shard: int,
    start: int,
    end: int,
    columns: list[str],
    at_least: tuple[str, int] = ("offset", 0),
) -> Iterator[pa.Table]:
    """Yield the row groups that can have matching rows, by the statistics of their columns."""
    column, least = at_least
    with _readable(folder, file), pq.ParquetFile(folder.path / file.path) as source:
        for number in range(source.num_row_groups):
            statistics = _statistics(source.metadata.row_group(number))
            shards, offsets = (statistics[name] for name in POSITION_COLUMNS)
            overlaps = shards.min <= shard <= shards.max and offsets.min < end
            if overlaps and start <= offsets.max and statistics[column].max >= least:
                yield source.read_row_group(number, columns)


@contextmanager
def _readable(folder: ArchiveFolder, file: ArchivedFile) -> Iterator[None]:
    """Raise `Damaged` for a file that is not valid Parquet. Arrow reports that in several ways."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise Damaged(f"{folder.path / file.path} cannot be read: {error}; restore it") from None


def _statistics(group: pq.RowGroupMetaData) -> dict[str, pq.Statistics]:
    columns = [group.column(n) for n in range(group.num_columns)]
    return {one.path_in_schema: one.statistics for one in columns}
