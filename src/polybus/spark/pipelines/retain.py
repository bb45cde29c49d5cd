"""`retain`: trims the log up to the offset archived, acked by every group, read by subscribers.

Before a trim, Spark reads the offsets from the files of the archive and compares them with the
log, so the trimmed messages were in the archive a moment ago. The pipeline needs no checkpoint: a
trimmed message is gone from the log, and a restarted run continues with the rest.

A topic with retention limits of its own (`polybus topic configure`) keeps what they keep: only
messages beyond a limit are trimmed. The bus trims those itself, too, whether archived or not, so
the limits must leave the archive enough time.

A group counts from its first member, a Pirate subscriber from its subscription, and both until they
are removed. A group or subscriber that is no longer in use therefore holds the log forever, on
purpose.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any, NamedTuple

import typer
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from polybus.errors import Damaged, UsageError
from polybus.native import Client
from polybus.spark.archive.archive_committer import check_same_log
from polybus.spark.archive.archive_folder import ArchiveFolder
from polybus.spark.archive.manifest import (
    Manifest,
    OffsetSpan,
    list_archived_topics,
    read_manifest,
)
from polybus.spark.archive.parquet_files import ROWS
from polybus.spark.pipelines import pipeline_arguments, preflight
from polybus.spark.pipelines.query_run import (
    OnProgress,
    Progress,
    Summary,
    ignore_progress,
    stop_on_signals,
)
from polybus.spark.pipelines.requeue import MARKED, find_needed_markers
from polybus.spark.pipelines.spark_errors import raise_own_errors
from polybus.spark.source.log_access import (
    RECONNECT_OPTIONS,
    BusLogAccess,
    LogAccess,
    ShardOffsets,
    first_with_id,
)
from polybus.spark.source.read_bounds import TopicSelection
from polybus.store.engine_registry import is_store_url

EVERY_S = 60.0
RETENTION_LIMITS = ("age_ms", "bytes", "messages")  # of `topic.info`

Source = Annotated[str, typer.Argument(metavar="FOLDER", help="The archive.")]
Topics = Annotated[
    str,
    typer.Argument(
        metavar="[TOPIC]", help="Only these topics of the archive: names and patterns with *."
    ),
]
Unused = Annotated[
    str | None,
    typer.Option("--checkpoint", metavar="FOLDER", help="Ignored: retain needs no checkpoint."),
]


def retain(
    spark: SparkSession,
    folder: Source,
    topic: Topics = "*",
    *,
    bus: pipeline_arguments.Bus = None,
    once: pipeline_arguments.Once = False,
    every: pipeline_arguments.Every = EVERY_S,
    checkpoint: Unused = None,
    tell: OnProgress = ignore_progress,
) -> Summary:
    """Trim topics up to the offset archived, acked by every group, read by every subscriber."""
    place, wanted = ArchiveFolder(folder), TopicSelection(topic)
    place.check()
    url = preflight.check_bus(bus)
    if is_store_url(url):
        raise UsageError(
            f"cannot trim {url}: only a running bus can trim its topics; give polybus://…"
        )
    began_s, trimmer = time.monotonic(), LogTrimmer(spark, place, url)
    with stop_on_signals() as stop, raise_own_errors():
        while not stop:
            trimmer.trim_topics(wanted, tell)
            if once or stop.wait(every):
                break
    holders = sorted(set().union(*trimmer.holders.values())) or ["none"]
    facts = {"topics": len(trimmer.topics), "held back by": holders}
    return Summary(trimmer.rows, time.monotonic() - began_s, facts, stop.by)


class LogTrimmer:
    """Trims the archived topics of a bus."""

    def __init__(self, spark: SparkSession, folder: ArchiveFolder, bus: str) -> None:
        self._spark, self._folder = spark, folder
        self._client = Client(bus, RECONNECT_OPTIONS)
        self._log = BusLogAccess(bus)
        self.holders: dict[str, set[str]] = {}  # topic → what holds archived messages in its log
        self._kept: dict[str, int] = {}  # archived rows that are not trimmed
        self.topics: set[str] = set()
        self.rows = 0

    def trim_topics(self, wanted: TopicSelection, tell: OnProgress) -> None:
        """Trim each archived topic once."""
        began_s, before = time.monotonic(), self.rows
        existing = set(self._log.list_topics("*"))
        for topic in list_archived_topics(self._folder):
            if topic in existing and wanted.covers(topic):
                self._trim(read_manifest(self._folder, topic))
                rate = (self.rows - before) / max(time.monotonic() - began_s, 1e-3)
                tell(Progress(self.rows, rate, sum(self._kept.values())))

    def _trim(self, manifest: Manifest) -> None:
        """Trim one topic, after its rows were found in the archive."""
        topic = manifest.topic
        check_same_log(self._log, manifest)
        stats = self._client.topic_stats(topic)
        log = self._log.shards(topic)
        markers = find_needed_markers(self._log, topic, log)
        retention = self._client.topic(topic).get("retention", {})  # older buses do not send it
        trimmable = find_trimmable(self._log, manifest, log, stats, markers, retention)
        kept = [((manifest.end(n) or 0) - span.end, by) for n, (span, by) in trimmable.items()]
        self.holders[topic] = {by for rows, by in kept if rows > 0}
        self._kept[topic] = sum(max(0, rows) for rows, _ in kept)
        spans = {shard: span for shard, (span, _) in trimmable.items() if span.rows}
        if not spans:
            return
        # The files are read before each trim: the log may be the only other copy.
        self._check(manifest, spans)
        self._client.trim(topic, {shard: span.end for shard, span in spans.items()})
        self.topics.add(topic)
        self.rows += sum(span.rows for span in spans.values())

    def _check(self, manifest: Manifest, spans: dict[int, OffsetSpan]) -> None:
        """Raise `Damaged` unless the files have each of these rows exactly once.

        Spark computes count, first, last and sum of the offsets that the files have of each shard.
        """
        files = {file.path for n, span in spans.items() for file in manifest.find_files(n, *span)}
        paths = {name: self._folder.path / name for name in sorted(files)}
        missing = [name for name, path in paths.items() if not path.is_file()]
        counted: dict[int, tuple[int, ...]] = {}
        if not missing:
            rows = self._spark.read.schema(ROWS).parquet(*map(str, paths.values()))
            shard_column, offset = f.col("shard"), f.col("offset")
            within = [
                (shard_column == n) & (offset >= span.start) & (offset < span.end)
                for n, span in spans.items()
            ]
            numbers = f.count("*"), f.min(offset), f.max(offset), f.sum(offset)
            counts = rows.where(reduce(or_, within)).groupBy("shard").agg(*numbers).collect()
            counted = {shard: tuple(values) for shard, *values in counts}
        for shard, span in spans.items():
            total = (span.start + span.end - 1) * span.rows // 2
            if counted.get(shard) != (span.rows, span.start, span.end - 1, total):
                why = f"{missing[0]} is missing" if missing else f"found {counted.get(shard)}"
                raise Damaged(
                    f"nothing was trimmed of topic {manifest.topic!r}: its archive must have "
                    f"offsets {span.start} to {span.end - 1} of shard {shard}, and does not "
                    f"({why}); restore its files"
                )


class TrimHold(NamedTuple):
    """The first offset that must be kept, and what it is kept for."""

    offset: int
    by: str


def find_trimmable(
    access: LogAccess,
    manifest: Manifest,
    log: Mapping[int, ShardOffsets],
    stats: Mapping[str, Any],
    needed_markers: Mapping[int, int],
    retention: Mapping[str, Any],
) -> dict[int, tuple[OffsetSpan, str]]:
    """Return for each shard the offsets that may be trimmed, and the name of the lowest hold."""
    topic = manifest.topic
    has_limits = any(retention.get(limit) is not None for limit in RETENTION_LIMITS)
    trimmable = {}
    for shard, in_log in log.items():
        holds = [TrimHold(manifest.end(shard) or 0, "the archive")]
        if shard in needed_markers:
            letters = topic.removesuffix(MARKED)
            holds.append(TrimHold(needed_markers[shard], f"dead letters of {letters}"))
        if has_limits:
            # The topic's own retention keeps messages in the log although they are archived.
            due_before = retention["due_before"].get(str(shard), in_log.start)
            holds.append(TrimHold(due_before, "retention of the topic"))
        for group in stats["groups"]:
            # A group without a position in a shard will begin at 0.
            lows = {position["shard"]: position["low"] for position in group["shards"]}
            holds.append(TrimHold(lows.get(shard, 0), f"group {group['group']}"))
        for subscriber in stats.get("subscribers", ()):
            offset = first_with_id(access, topic, shard, in_log, subscriber["last"] + 1)
            holds.append(TrimHold(offset, f"subscriber {subscriber['id']}"))
        least = min(holds)  # compares by offset first
        end = max(in_log.start, min(least.offset, in_log.end))
        trimmable[shard] = OffsetSpan(in_log.start, end), least.by
    return trimmable
