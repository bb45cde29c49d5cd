"""Archive and log as one: an `Access` whose shards begin where the archive does.

What is archived is read from there, the rest from the log. If the log is trimmed meanwhile,
what it has lost was archived before (`retain` sees to that), and the newest manifest has it:
no row twice, none missing, whatever runs beside it.
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
PLACE = ["shard", "offset"]
STORED = ["id", "shard", "offset", "timestamp_ns", "insertion_time", "shard_key", "body", "headers"]


class ArchiveLogAccess:
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
        """The log is looked at first: what it loses after that, the manifest has by then."""
        try:
            found = dict(self._log.shards(topic))
        except DoesNotExist:
            found = {}
        archived = read_manifest(self._folder, topic).shards
        if not (found or archived):
            return self._log.shards(topic)  # which says why
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
        """Ends where the log was trimmed, if the archive has what it has lost."""
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
        """Ends where a file is gone, if a newer manifest no longer needs it."""
        for file in manifest.find_files(shard, start, end):
            first, last = file.shards[shard]
            if first > start:
                raise trimmed_error(manifest.topic, shard, start, first)
            try:
                yield from rows(self._folder, file, shard, start, min(last, end))
            except FileNotFoundError:
                if read_manifest(self._folder, manifest.topic).number == manifest.number:
                    raise Damaged(f"{file.path} is missing from {self._folder.path}") from None
                return
            start = last

    def _first(self, topic: str, shard: int, column: str, least: int) -> int | None:
        """In the archive; None if nothing there is as late."""
        for file in read_manifest(self._folder, topic).files:
            if shard in file.shards:
                found = _first_from(self._folder, file, shard, column, least)
                if found is not None:
                    return found
        return None

    def _is_archived(self, topic: str, shard: int, offset: int) -> bool:
        return offset < (read_manifest(self._folder, topic).end(shard) or 0)


def rows(
    folder: ArchiveFolder, file: ArchivedFile, shard: int, start: int, end: int
) -> Iterator[pa.RecordBatch]:
    """These rows of a file, as the log has them."""
    for group in _groups(folder, file, shard, start, end, STORED):
        place = group.column("shard"), group.column("offset")
        wanted = pc.and_(
            pc.equal(place[0], shard),
            pc.and_(pc.greater_equal(place[1], start), pc.less(place[1], end)),
        )
        found = group if pc.all(wanted).as_py() else group.filter(wanted)
        yield from _as_read(found).to_batches(CHUNK_ROWS)


def _as_read(stored: pa.Table) -> pa.Table:
    times = pc.divide(stored.column("insertion_time").cast(pa.int64()), US_PER_MS)
    made = {"insertion_ms": times, "headers": stored.column("headers").cast(HEADERS_TYPE)}
    columns = [made[name] if name in made else stored.column(name) for name in READ_SCHEMA.names]
    return pa.Table.from_arrays(columns, schema=READ_SCHEMA)


def _first_from(
    folder: ArchiveFolder, file: ArchivedFile, shard: int, column: str, least: int
) -> int | None:
    """The first offset of a shard where a column that rises has at least this."""
    start, end = file.shards[shard]
    for group in _groups(folder, file, shard, start, end, [*PLACE, column], (column, least)):
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
    """The row groups that can have such rows, by their least and greatest values."""
    column, least = at_least
    with _readable(folder, file), pq.ParquetFile(folder.path / file.path) as source:
        for number in range(source.num_row_groups):
            told = _statistics(source.metadata.row_group(number))
            shards, offsets = (told[name] for name in PLACE)
            is_near = shards.min <= shard <= shards.max and offsets.min < end
            if is_near and start <= offsets.max and told[column].max >= least:
                yield source.read_row_group(number, columns)


@contextmanager
def _readable(folder: ArchiveFolder, file: ArchivedFile) -> Iterator[None]:
    """Arrow tells of bytes that are no Parquet in several ways."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise Damaged(f"{folder.path / file.path} cannot be read: {error}; restore it") from None


def _statistics(group: pq.RowGroupMetaData) -> dict[str, pq.Statistics]:
    columns = [group.column(n) for n in range(group.num_columns)]
    return {one.path_in_schema: one.statistics for one in columns}
