"""Topics as one table, with archived rows read by Spark's own Parquet reader.

A Python data source sends rows to Spark; it cannot make Spark read Parquet files with pruned
columns and pushed filters. `format("polybus")` with option `archive` therefore reads the archive
through Arrow. `table` is faster: Spark reads the files of the archive, and the rest comes from
the log.
"""

from __future__ import annotations

import json
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from polybus.spark.archive.archive_folder import ArchiveFolder
from polybus.spark.archive.manifest import read_manifest
from polybus.spark.archive.parquet_files import ROWS
from polybus.spark.source.log_access import open_log_access
from polybus.spark.source.read_bounds import (
    EARLIEST,
    LATEST,
    ReadBound,
    TopicSelection,
    trimmed_error,
)
from polybus.spark.source.topic_schema import SCHEMA
from polybus.spark.spark_options import SOURCE_OPTIONS, SparkOptions

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

    from polybus.spark.archive.manifest import ArchivedFile, Manifest
    from polybus.spark.source.read_bounds import Offsets

FORMAT = "polybus"


def table(spark: SparkSession, topic: str, **options: object) -> DataFrame:
    """Return the table of topics, given as names and patterns; `options` are those of the source.

    With `archive` the table has the rows of archive and log, each once, as of now. They stay the
    same if the archive grows and the log is trimmed before the table is computed.

    Raises `Trimmed` if messages between archive and log are lost, unless `failOnDataLoss` is false.
    """
    given = {name: _text(value) for name, value in {"topic": topic, **options}.items()}
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
    parts = [
        _rows_from_archive(spark, folder, one, start, end, strict=strict)
        for one in manifests
        if one.files
    ]
    return reduce(DataFrame.unionByName, [*parts, _rows_from_log(spark, given, manifests, start)])


def _rows_from_archive(
    spark: SparkSession,
    folder: ArchiveFolder,
    manifest: Manifest,
    start: ReadBound,
    end: ReadBound,
    *,
    strict: bool,
) -> DataFrame:
    """Return the archived rows between the bounds, read by Spark."""
    files = [one for one in manifest.files if _may_have(one, manifest.topic, start, end)]
    if start.default == LATEST or not files:
        return spark.createDataFrame([], SCHEMA)
    if strict:
        _check_whole(manifest, start, end)
    rows = spark.read.schema(ROWS).parquet(*(str(folder.path / one.path) for one in files))
    rows = rows.withColumn("topic", f.lit(manifest.topic))
    for condition in (
        *_bound_conditions(start, manifest.topic),
        *_bound_conditions(end, manifest.topic),
    ):
        rows = rows.where(condition)
    return rows.select(*SCHEMA.names)


def _check_whole(manifest: Manifest, start: ReadBound, end: ReadBound) -> None:
    """Raise `Trimmed` if the archive lacks rows between the bounds.

    With bounds by time, only gaps between two files that overlap the bounds count.
    """
    topic = manifest.topic
    first, last = start.offsets.get(topic, {}), end.offsets.get(topic, {})
    by_time = (start.timestamp_ns, end.timestamp_ns) != (None, None)
    for shard, lost, between in manifest.gaps():
        if by_time and not all(_may_have(one, topic, start, end) for one in between):
            continue
        if lost.end > first.get(shard, 0) and lost.start < last.get(shard, lost.end):
            raise trimmed_error(topic, shard, *lost)


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
    elif offsets := _log_starts(manifests, start):
        options["startingOffsets"] = json.dumps(offsets)
    rows = spark.read.format(FORMAT).options(**options).load()
    for condition in _bound_conditions(start, "") if start.timestamp_ns is not None else ():
        rows = rows.where(condition)
    return rows


def _log_starts(manifests: list[Manifest], start: ReadBound) -> Offsets:
    starts = {one.topic: {n: span.end for n, span in one.shards.items()} for one in manifests}
    for topic, shards in start.offsets.items():
        ends = starts.setdefault(topic, {})
        ends.update({n: max(offset, ends.get(n, 0)) for n, offset in shards.items()})
    return {topic: shards for topic, shards in starts.items() if shards}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
