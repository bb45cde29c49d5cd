"""`stats`: rates, sizes, latency and key skew of topics over time, as tables and a report.

Each batch of a stream is counted into partial sums (`partial_sums.py`) under the batch's number. A
batch that is counted again after a kill replaces the same files. Tables and report are made of all
sums at intervals and at the end (`stats_tables.py`, `report_page.py`).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr

from polybus.errors import UsageError
from polybus.spark.archive.archive_folder import explain_write_errors, write_durably
from polybus.spark.pipelines import pipeline_arguments, preflight
from polybus.spark.pipelines.query_run import (
    OnProgress,
    Progress,
    Summary,
    activate_session,
    ignore_progress,
    run_query,
)
from polybus.spark.pipelines.stats.partial_sums import PartialSums
from polybus.spark.pipelines.stats.report_page import page
from polybus.spark.pipelines.stats.stats_tables import append_samples, sample_groups, write_tables
from polybus.spark.pipelines.stats.topic_figures import TopicFigures, bucket_sql

MARK, REPORT, CHECKPOINT = "stats.json", "report.html", "_checkpoint"
VERSION = 1
EVERY_S, WINDOW_S = 10.0, 10
ROWS_PER_BATCH = 4_000_000
READ = "topic string, shard int, timestamp_ns long, insertion_time timestamp, "
READ += "shard_key string, body binary"
LATENCY_US = "greatest(0, timestamp_ns div 1000 - unix_micros(insertion_time))"


def stats(
    spark: SparkSession,
    topic: pipeline_arguments.Topics,
    *,
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FOLDER", help="Folder for tables and report.html."),
    ] = None,
    window: Annotated[
        int, typer.Option("--window", metavar="SECONDS", min=1, help="Width of a time window.")
    ] = WINDOW_S,
    archive: Annotated[
        str | None,
        typer.Option("--archive", metavar="FOLDER", help="Also count messages of this archive."),
    ] = None,
    checkpoint: pipeline_arguments.Checkpoint = None,
    bus: pipeline_arguments.Bus = None,
    every: pipeline_arguments.Every = EVERY_S,
    rows_per_batch: pipeline_arguments.RowsPerBatch = ROWS_PER_BATCH,
    accept_loss: pipeline_arguments.AcceptLoss = False,
    once: pipeline_arguments.Once = False,
    tell: OnProgress = ignore_progress,
) -> Summary:
    """Count messages over time: rates, sizes, latency, keys, groups; Parquet and a report."""
    activate_session(spark)
    folder = preflight.check_folder(out, "--out", "stats writes tables and report there")
    url = preflight.check_bus(bus)
    if archive is None:
        preflight.find_topics(url, topic)
    place = preflight.check_checkpoint(checkpoint or str(folder / CHECKPOINT))
    _mark(folder, {"TOPIC": topic, "--window": window, "--checkpoint": checkpoint})
    _check_checkpoint(folder, place)
    counter = StatsCounter(spark, folder, url, window)
    options = {"bus": url, "topic": topic, "maxRowsPerBatch": str(rows_per_batch)}
    options["failOnDataLoss"] = str(not accept_loss).lower()
    if archive is not None:
        options["archive"] = archive
    rows = spark.readStream.format("polybus").schema(READ).options(**options).load()
    writer = (
        rows.writeStream.foreachBatch(counter.count)
        .queryName(f"stats {topic}")
        .option("checkpointLocation", place)
    )
    written_s = time.monotonic()

    def report_progress(progress: Progress) -> None:
        nonlocal written_s
        tell(progress)
        if not once and time.monotonic() - written_s >= every:
            counter.write()
            written_s = time.monotonic()

    summary = run_query(writer, once=once, every_s=every, tell=report_progress)
    topics = counter.write()
    summary.facts = {
        "topics": len(topics),
        "messages in all": sum(topic_figures.messages for topic_figures in topics),
        "report": folder / REPORT,
    }
    return summary


def _mark(folder: Path, given: dict[str, object]) -> None:
    """Store the arguments in the folder. Raises `UsageError` if the folder has other ones."""
    path, arguments = folder / MARK, {"version": VERSION, **given}
    try:
        before = json.loads(path.read_text())
    except FileNotFoundError:
        with explain_write_errors(folder):
            write_durably(path, json.dumps(arguments))
        return
    except (OSError, ValueError):
        raise UsageError(f"{path} was not written by polybus: give another --out") from None
    for argument, value in arguments.items():
        was = before.get(argument) if isinstance(before, dict) else before
        if was != value:
            raise UsageError(
                f"{folder} has stats with other arguments ({argument} was {was!r}, got {value!r}): "
                "give another --out"
            )


def _check_checkpoint(folder: Path, checkpoint: str) -> None:
    """Check that folder and checkpoint belong together: a new checkpoint restarts batch numbers."""
    if "://" in checkpoint:
        return  # only Spark can read it
    begun, done = (any((Path(checkpoint) / log).glob("[0-9]*")) for log in ("offsets", "commits"))
    has_counted = PartialSums(folder).has_sums
    if has_counted and not begun:
        raise UsageError(
            f"the checkpoint of {folder} is missing ({checkpoint}): give another --out"
        )
    if done and not has_counted:
        raise UsageError(f"{checkpoint} belongs to other stats: give another --checkpoint")


class StatsCounter:
    """Counts batches, and writes tables and report."""

    def __init__(self, spark: SparkSession, folder: Path, bus: str, window_s: int) -> None:
        self._spark, self._folder = spark, folder
        self._bus, self._window_s = bus, window_s
        self._parts = PartialSums(folder)

    def count(self, batch: DataFrame, number: int) -> None:
        """Count a batch. Spark calls this once per batch, and again after a kill."""
        measured = batch.selectExpr(
            *("topic", "shard", "shard_key"),
            f"timestamp_ns div 1000000000 div {self._window_s} * {self._window_s} AS start_s",
            "length(body) AS size",
            f"{LATENCY_US} AS latency_us",
        ).persist()
        total = (expr("count(*) AS messages"), expr("sum(size) AS bytes"))
        most = (expr("max(size) AS size_max"), expr("max(latency_us) AS latency_us_max"))
        kinds = ", ".join(
            f"named_struct('kind', '{kind}', 'bucket', {bucket_sql(column)})"
            for kind, column in (("size", "size"), ("latency", "latency_us"))
        )
        buckets = measured.selectExpr("topic", "start_s", f"inline(array({kinds}))")
        sums = {
            "windows": measured.groupBy("topic", "start_s").agg(*total, *most),
            "buckets": buckets.groupBy("topic", "start_s", "kind", "bucket").agg(total[0]),
            "keys": measured.groupBy("topic", "shard", "shard_key").agg(*total),
        }
        try:
            self._parts.write(number, {kind: table.toArrow() for kind, table in sums.items()})
        finally:
            measured.unpersist()

    def write(self) -> list[TopicFigures]:
        """Write tables and report of all batches that were counted. Returns the figures."""
        self._parts.compact()
        now_s = time.time()
        names = set(self._parts.read("windows").column("topic").to_pylist())
        samples = append_samples(self._folder, sample_groups(self._bus, sorted(names), now_s))
        topics = write_tables(self._folder, self._parts, self._window_s, samples)
        with explain_write_errors(self._folder):
            write_durably(self._folder / REPORT, page(topics, self._bus, now_s))
        return topics
