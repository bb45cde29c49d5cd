"""Compaction: small files of a date become one, because many small files are slow to list and read.

A file that is not small is never rewritten, so each row is rewritten a few times at most. Replaced
files are kept for a day, for readers that have begun to read them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from polybus.spark.archive.archive_folder import ArchiveFolder, explain_write_errors
from polybus.spark.archive.manifest import (
    ArchivedFile,
    Manifest,
    OffsetSpan,
    commit_manifest,
    read_manifest,
)
from polybus.spark.archive.parquet_files import (
    ARROW,
    FILE_BYTES,
    GROUP_BYTES,
    GROUP_ROWS,
    make_durable,
    parquet_writer,
)

# During a run MANY small files are merged; at its end already a FEW tiny ones. Spark estimates that
# opening a file costs as much as reading 4 MiB.
SMALL_BYTES, MANY = 32 << 20, 8
TINY_BYTES, FEW = 8 << 20, 2


class FileMerge(NamedTuple):
    """Contiguous files of one date, to be merged."""

    topic: str
    files: tuple[ArchivedFile, ...]


def compact(
    spark: SparkSession,
    folder: ArchiveFolder,
    topics: Sequence[str],
    least: int = MANY,
    small_bytes: int = SMALL_BYTES,
) -> None:
    """Merge files where a date has at least `least` neighbours below `small_bytes`."""
    manifests = [read_manifest(folder, topic) for topic in topics]
    merges = [
        merge for manifest in manifests for merge in choose_merges(manifest, least, small_bytes)
    ]
    if not merges:
        return
    # One task per merge: each needs the memory of one row group.
    work = spark.sparkContext.parallelize(merges, len(merges))
    files = work.map(lambda merge: write_merged(folder, merge)).collect()
    for merge, file in zip(merges, files, strict=True):
        with explain_write_errors(folder.path):
            newest = read_manifest(folder, merge.topic)
            commit_manifest(folder, newest.compacted(merge.files, file, time.time()))


def choose_merges(
    manifest: Manifest, least: int, small_bytes: int = SMALL_BYTES
) -> list[FileMerge]:
    """Return runs of small neighbours of a date whose sum is at most FILE_BYTES."""
    runs: list[tuple[ArchivedFile, ...]] = []
    by_date = attrgetter("date")
    for _, files in groupby(sorted(manifest.files, key=by_date), by_date):
        run: list[ArchivedFile] = []
        for file in files:
            is_small = file.size_bytes < small_bytes
            total = sum(neighbour.size_bytes for neighbour in run) + file.size_bytes
            if run and not (is_small and total <= FILE_BYTES and is_contiguous(run, file)):
                runs.append(tuple(run))
                run = []
            if is_small:
                run.append(file)
        runs.append(tuple(run))
    return [FileMerge(manifest.topic, files) for files in runs if len(files) >= least]


def is_contiguous(run: Sequence[ArchivedFile], file: ArchivedFile) -> bool:
    """Return whether a file continues the run in each shard: a file must not have gaps."""
    ends = {shard: span.end for before in run for shard, span in before.shards.items()}
    return all(ends.get(shard, span.start) == span.start for shard, span in file.shards.items())


def write_merged(folder: ArchiveFolder, merge: FileMerge) -> ArchivedFile:
    """Write the rows of all files to a new one, in order. Runs in a task, with one row group in
    memory.
    """
    first = merge.files[0]
    path = (folder.path / first.path).with_name(f"{uuid.uuid4().hex}.zstd.parquet")
    with explain_write_errors(path):
        try:
            with pa.OSFile(str(path), "wb") as sink:
                _copy(folder, merge.files, sink)
            make_durable(path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    shards: dict[int, OffsetSpan] = {}
    for file in merge.files:
        for shard, span in file.shards.items():
            known = shards.get(shard, span)
            shards[shard] = OffsetSpan(min(known.start, span.start), max(known.end, span.end))
    return replace(
        first,
        path=str(path.relative_to(folder.path)),
        size_bytes=path.stat().st_size,
        first_ns=min(file.first_ns for file in merge.files),
        last_ns=max(file.last_ns for file in merge.files),
        shards=shards,
    )


def _copy(folder: ArchiveFolder, files: Sequence[ArchivedFile], sink: pa.NativeFile) -> None:
    with parquet_writer(sink) as writer:
        pending: list[pa.Table] = []
        for file in files:
            source = pq.ParquetFile(folder.path / file.path)
            for number in range(source.num_row_groups):
                pending.append(source.read_row_group(number))
                rows = sum(table.num_rows for table in pending)
                size_bytes = sum(table.nbytes for table in pending)
                if rows >= GROUP_ROWS or size_bytes >= GROUP_BYTES:
                    writer.write_table(_as_written(pending), GROUP_ROWS)
                    pending = []
        if pending:
            writer.write_table(_as_written(pending), GROUP_ROWS)


def _as_written(tables: list[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables).cast(ARROW)
