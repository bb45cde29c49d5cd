"""`retain`: trims the log up to the offset archived, acked by every group, read by subscribers.

Before a trim, Spark reads the offsets from the files of the archive and compares them with the
log, so the trimmed messages were in the archive a moment ago. The pipeline needs no checkpoint: a
trimmed message is gone from the log, and a restarted run continues with the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated

import typer
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from polybus.errors import Damaged, UsageError
from polybus.native import Client
from polybus.spark.archive.archive_committer import check_same_log
from polybus.spark.archive.archive_folder import ArchiveFolder
from polybus.spark.archive.manifest import list_archived_topics, read_manifest
from polybus.spark.archive.parquet_files import ROWS
from polybus.spark.archive.trim_bounds import find_trimmable
from polybus.spark.pipelines import pipeline_arguments, preflight
from polybus.spark.pipelines.dead_letters import requeue
from polybus.spark.pipelines.query_run import (
    OnProgress,
    Progress,
    Summary,
    ignore_progress,
    raise_own_errors,
    stop_on_signals,
)
from polybus.spark.source.log_access import RECONNECT_OPTIONS, BusLogAccess
from polybus.spark.source.read_bounds import TopicSelection
from polybus.store.engine_registry import is_store_url

if TYPE_CHECKING:
    from polybus.spark.archive.manifest import Manifest, OffsetSpan

EVERY_S = 60.0

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
    facts = {"topics": len(trimmer.topics), "held back by": trimmer.list_holders()}
    return Summary(trimmer.rows, time.monotonic() - began_s, facts, stop.by)


class LogTrimmer:
    """Trims the archived topics of a bus."""

    def __init__(self, spark: SparkSession, folder: ArchiveFolder, bus: str) -> None:
        self._spark, self._folder = spark, folder
        self._client = Client(bus, RECONNECT_OPTIONS)
        self._log = BusLogAccess(bus)
        self._holders: dict[str, set[str]] = {}
        self._kept: dict[str, int] = {}  # archived rows that are not trimmed
        self.topics: set[str] = set()
        self.rows = 0

    def trim_topics(self, wanted: TopicSelection, tell: OnProgress) -> None:
        """Trim each archived topic once."""
        began_s, before = time.monotonic(), self.rows
        existing = set(self._log.list_topics("*"))
        for topic in (one for one in list_archived_topics(self._folder) if wanted.covers(one)):
            if topic in existing:
                self._trim(read_manifest(self._folder, topic))
                rate = (self.rows - before) / max(time.monotonic() - began_s, 1e-3)
                tell(Progress(self.rows, rate, sum(self._kept.values())))

    def list_holders(self) -> list[str]:
        """Return what holds archived messages in the log."""
        return sorted(set().union(*self._holders.values())) or ["none"]

    def _trim(self, manifest: Manifest) -> None:
        """Trim one topic, after its rows were found in the archive."""
        topic = manifest.topic
        check_same_log(self._log, manifest)
        stats = self._client.topic_stats(topic)
        log = self._log.shards(topic)
        markers = requeue.find_holds(self._log, topic, log)
        found = find_trimmable(self._log, manifest, log, stats, markers)
        kept = [((manifest.end(n) or 0) - span.end, by) for n, (span, by) in found.items()]
        self._holders[topic] = {by for rows, by in kept if rows > 0}
        self._kept[topic] = sum(max(0, rows) for rows, _ in kept)
        spans = {shard: span for shard, (span, _) in found.items() if span.rows}
        if not spans:
            return
        # The files are read before each trim: the log may be the only other copy.
        self._check(manifest, spans)
        self._client.trim(topic, {shard: span.end for shard, span in spans.items()})
        self.topics.add(topic)
        self.rows += sum(span.rows for span in spans.values())

    def _check(self, manifest: Manifest, spans: dict[int, OffsetSpan]) -> None:
        """Raise `Damaged` unless the files have each of these rows exactly once."""
        files = {one for n, span in spans.items() for one in manifest.paths(n, *span)}
        missing = [one for one in sorted(files) if not (self._folder.path / one).is_file()]
        rows = {} if missing else self._count_offsets(files, spans)
        for shard, span in spans.items():
            if rows.get(shard) != (span.rows, span.start, span.end - 1, _sum_offsets(span)):
                why = f"{missing[0]} is missing" if missing else f"found {rows.get(shard)}"
                raise Damaged(
                    f"nothing was trimmed of topic {manifest.topic!r}: its archive must have "
                    f"offsets {span.start} to {span.end - 1} of shard {shard}, and does not "
                    f"({why}); restore its files"
                )

    def _count_offsets(
        self, files: Iterable[str], spans: dict[int, OffsetSpan]
    ) -> dict[int, tuple[int, int, int, int]]:
        """Return count, first, last and sum of the offsets that the files have of each shard."""
        rows = self._spark.read.schema(ROWS).parquet(
            *(str(self._folder.path / one) for one in files)
        )
        place, offset = f.col("shard"), f.col("offset")
        within = [
            (place == n) & (offset >= span.start) & (offset < span.end) for n, span in spans.items()
        ]
        numbers = f.count("*"), f.min(offset), f.max(offset), f.sum(offset)
        found = rows.where(reduce(or_, within)).groupBy("shard").agg(*numbers).collect()
        return {row[0]: (row[1], row[2], row[3], row[4]) for row in found}


def _sum_offsets(span: OffsetSpan) -> int:
    """Return the sum of all offsets of a span."""
    return (span.start + span.end - 1) * span.rows // 2
