"""Topics as one table, their history by Spark's own Parquet reader.

A data source in Python hands rows to Spark; it cannot make Spark read Parquet by itself, with
its pruned columns and pushed filters. So `format("polybus")` with option `archive` reads the
archive through Arrow, and this function puts the two together that Spark is fastest at: the
files of the archive by Spark's reader, and what is not archived from the log.
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
    """The table of a topic, of several, or of patterns; `options` are those of the source.

    With `archive` its rows are those of the archive and of the log, each once, as they are
    now: also if the archive grows and the log is trimmed before it is computed. `Trimmed` if
    something between them was lost before it was archived, unless `failOnDataLoss` is false.
    """
    given = {name: _text(value) for name, value in {"topic": topic, **options}.items()}
    asked = SparkOptions(given, SOURCE_OPTIONS)
    if asked.archive is None:
        return spark.read.format(FORMAT).options(**given).load()
    start = ReadBound.parse(asked, "starting", EARLIEST)
    end = ReadBound.parse(asked, "ending", LATEST)
    folder = ArchiveFolder(asked.archive)
    folder.check()
    wanted = TopicSelection(asked.required("topic", "orders"))
    topics = wanted.find_topics(open_log_access(asked.bus, asked.archive))
    manifests = [read_manifest(folder, name) for name in topics]
    strict = asked.flag("failOnDataLoss", default=True)
    parts = [
        _archived(spark, folder, one, start, end, strict=strict) for one in manifests if one.files
    ]
    return reduce(DataFrame.unionByName, [*parts, _rest(spark, given, manifests, start)])


def _archived(
    spark: SparkSession,
    folder: ArchiveFolder,
    manifest: Manifest,
    start: ReadBound,
    end: ReadBound,
    *,
    strict: bool,
) -> DataFrame:
    """What Spark reads by itself."""
    files = [one for one in manifest.files if _may_have(one, manifest.topic, start, end)]
    if start.default == LATEST or not files:
        return spark.createDataFrame([], SCHEMA)
    if strict:
        _check_whole(manifest, start, end)
    rows = spark.read.schema(ROWS).parquet(*(str(folder.path / one.path) for one in files))
    rows = rows.withColumn("topic", f.lit(manifest.topic))
    for condition in (*_bounded(start, manifest.topic), *_bounded(end, manifest.topic)):
        rows = rows.where(condition)
    return rows.select(*SCHEMA.names)


def _check_whole(manifest: Manifest, start: ReadBound, end: ReadBound) -> None:
    """Between two points of a shard; by times, between two files that have some of them."""
    topic = manifest.topic
    first, last = start.offsets.get(topic, {}), end.offsets.get(topic, {})
    by_time = (start.timestamp_ns, end.timestamp_ns) != (None, None)
    for shard, lost, between in manifest.gaps():
        if by_time and not all(_may_have(one, topic, start, end) for one in between):
            continue
        if lost.end > first.get(shard, 0) and lost.start < last.get(shard, lost.end):
            raise trimmed_error(topic, shard, *lost)


def _may_have(file: ArchivedFile, topic: str, start: ReadBound, end: ReadBound) -> bool:
    """By its times and offsets, whether it is worth opening."""
    if start.timestamp_ns is not None and file.last_ns < start.timestamp_ns:
        return False
    if end.timestamp_ns is not None and file.first_ns >= end.timestamp_ns:
        return False
    first, last = start.offsets.get(topic, {}), end.offsets.get(topic, {})
    return any(
        span.end > first.get(shard, 0) and span.start < last.get(shard, span.end)
        for shard, span in file.shards.items()
    )


def _bounded(bound: ReadBound, topic: str) -> list[Column]:
    """Conditions that rows must meet."""
    is_start = bound.edge == "starting"
    if bound.timestamp_ns is not None:
        time = f.col("timestamp_ns")
        return [time >= bound.timestamp_ns if is_start else time < bound.timestamp_ns]
    return [
        (f.col("shard") != shard)
        | (f.col("offset") >= offset if is_start else f.col("offset") < offset)
        for shard, offset in bound.offsets.get(topic, {}).items()
    ]


def _rest(
    spark: SparkSession, given: dict[str, str], manifests: list[Manifest], start: ReadBound
) -> DataFrame:
    """The log, from where the archive ends."""
    own = {"startingoffsets", "startingtimestamp"}
    options = {name: value for name, value in given.items() if name.lower() not in own}
    if start.default == LATEST:
        options["startingOffsets"] = LATEST
    elif offsets := _starts(manifests, start):
        options["startingOffsets"] = json.dumps(offsets)
    rows = spark.read.format(FORMAT).options(**options).load()
    for condition in _bounded(start, "") if start.timestamp_ns is not None else ():
        rows = rows.where(condition)
    return rows


def _starts(manifests: list[Manifest], start: ReadBound) -> Offsets:
    found = {one.topic: {n: span.end for n, span in one.shards.items()} for one in manifests}
    for topic, shards in start.offsets.items():
        ends = found.setdefault(topic, {})
        ends.update({n: max(offset, ends.get(n, 0)) for n, offset in shards.items()})
    return {topic: shards for topic, shards in found.items() if shards}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
