"""Topics as one table, with archived rows read by Spark's own Parquet reader.

A Python data source sends rows to Spark; it cannot make Spark read Parquet files with pruned
columns and pushed filters. `format("polybus")` with option `archive` therefore reads the archive
through Arrow. `table` is faster: Spark reads the files of the archive, and the rest comes from
the log.
"""

from __future__ import annotations

import json
from functools import reduce

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from polybus.spark.archive.archive_folder import ArchiveFolder
from polybus.spark.archive.manifest import ArchivedFile, Manifest, read_manifest
from polybus.spark.archive.parquet_files import ROWS
from polybus.spark.source.log_access import open_log_access
from polybus.spark.source.read_bounds import (
    EARLIEST,
    LATEST,
    Offsets,
    ReadBound,
    TopicSelection,
    trimmed_error,
)
from polybus.spark.source.topic_schema import SCHEMA
from polybus.spark.spark_options import SOURCE_OPTIONS, SparkOptions

FORMAT = "polybus"


def table(spark: SparkSession, topic: str, **options: object) -> DataFrame:
    """Return the table of topics, given as names and patterns; `options` are those of the source.

    With `archive` the table has the rows of archive and log, each once, as of now. They stay the
    same if the archive grows and the log is trimmed before the table is computed.

    Raises `Trimmed` if messages between archive and log are lost, unless `failOnDataLoss` is false.
    """
    given = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in {"topic": topic, **options}.items()
    }
    source_options = SparkOptions(given, SOURCE_OPTIONS)
    if source_options.archive is None:
        return spark.read.format(FORMAT).options(**given).load()
    start = ReadBound.parse(source_options, "starting", EARLIEST)
    end = ReadBound.parse(source_options, "ending", LATEST)
    folder = ArchiveFolder(source_options.archive)
    folder.check()
    wanted = TopicSelection(source_options.required("topic", "orders"))
    topics = wanted.find_topics(open_log_access(source_options.bus, source_options.archive))
    manifests = [read_manifest(folder, name) for name in topics]
    strict = source_options.flag("failOnDataLoss", default=True)
    archived = [
        _rows_from_archive(spark, folder, manifest, start, end, strict=strict)
        for manifest in manifests
        if manifest.files
    ]
    rows_in_log = _rows_from_log(spark, given, manifests, start)
    return reduce(DataFrame.unionByName, [*archived, rows_in_log])


def _rows_from_archive(
    spark: SparkSession,
    folder: ArchiveFolder,
    manifest: Manifest,
    start: ReadBound,
    end: ReadBound,
    *,
    strict: bool,
) -> DataFrame:
    """Return the archived rows between the bounds, read by Spark.

    Raises `Trimmed` if `strict` and the archive lacks some of them.
    """
    topic = manifest.topic
    files = [file for file in manifest.files if _may_have(file, topic, start, end)]
    if start.default == LATEST or not files:
        return spark.createDataFrame([], SCHEMA)
    first, last = start.offsets.get(topic, {}), end.offsets.get(topic, {})
    by_time = (start.timestamp_ns, end.timestamp_ns) != (None, None)
    for shard, lost, between in manifest.gaps() if strict else ():
        # With bounds by time, only gaps between two files that overlap the bounds count.
        if by_time and not all(_may_have(file, topic, start, end) for file in between):
            continue
        if lost.end > first.get(shard, 0) and lost.start < last.get(shard, lost.end):
            raise trimmed_error(topic, shard, *lost)
    rows = spark.read.schema(ROWS).parquet(*(str(folder.path / file.path) for file in files))
    rows = rows.withColumn("topic", f.lit(topic))
    for condition in (*_bound_conditions(start, topic), *_bound_conditions(end, topic)):
        rows = rows.where(condition)
    return rows.select(*SCHEMA.names)


def _may_have(file: ArchivedFile, topic: str, start: ReadBound, end: ReadBound) -> bool:
    """Return whether a file can have rows between the bounds, by its times and offsets."""
    if start.timestamp_ns is not None and file.last_ns < start.timestamp_ns:
        return False
    if end.timestamp_ns is not None and file.first_ns >= end.timestamp_ns:
        return False
    first, last = start.offsets.get(topic, {}), end.offsets.get(topic, {})
    return any(
        span.end > first.get(shard, 0) and span.start < last.get(shard, span.end)
        for shard, span in file.shards.items()
    )


def _bound_conditions(bound: ReadBound, topic: str) -> list[Column]:
    """Return the conditions of a bound on rows."""
    is_start = bound.edge == "starting"
    if bound.timestamp_ns is not None:
        time = f.col("timestamp_ns")
        return [time >= bound.timestamp_ns if is_start else time < bound.timestamp_ns]
    return [
        (f.col("shard") != shard)
        | (f.col("offset") >= offset if is_start else f.col("offset") < offset)
        for shard, offset in bound.offsets.get(topic, {}).items()
    ]


def _rows_from_log(
    spark: SparkSession, given: dict[str, str], manifests: list[Manifest], start: ReadBound
) -> DataFrame:
    """Return the rows of the log after the end of the archive."""
    own = {"startingoffsets", "startingtimestamp"}
    options = {name: value for name, value in given.items() if name.lower() not in own}
    if start.default == LATEST:
        options["startingOffsets"] = LATEST
    else:
        # The later one of the archive's end and the given start.
        starts: Offsets = {
            manifest.topic: {n: span.end for n, span in manifest.shards.items()}
            for manifest in manifests
        }
        for topic, shards in start.offsets.items():
            ends = starts.setdefault(topic, {})
            ends.update({n: max(offset, ends.get(n, 0)) for n, offset in shards.items()})
        starts = {topic: shards for topic, shards in starts.items() if shards}
        if starts:
            options["startingOffsets"] = json.dumps(starts)
    rows = spark.read.format(FORMAT).options(**options).load()
    # The log is read from the archive's end, which may be before the starting time.
    for condition in _bound_conditions(start, "") if start.timestamp_ns is not None else ():
        rows = rows.where(condition)
    return rows
