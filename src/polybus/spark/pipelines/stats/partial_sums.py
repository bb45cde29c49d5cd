"""Partial sums: counts of each batch in files, which add up to the counts of the whole.

    _parts/00000000-00000062.keys.parquet     batches 0 to 62, merged
    _parts/00000063-00000063.keys.parquet     batch 63

A batch that is counted again after a kill writes the same file again. Merged files are removed
after their sum was written. If a kill prevents that, readers ignore a file whose batches lie within
those of another. Spark begins batch n after n - 1 is in its commit log, so all files but the newest
can be merged.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from polybus.spark.archive.archive_folder import explain_write_errors, sync_folder

# Kind of count → the columns that it is grouped by. Other columns are sums and maxima.
BY = {
    "windows": {"topic": pa.utf8(), "start_s": pa.int64()},
    "buckets": {
        "topic": pa.utf8(),
        "start_s": pa.int64(),
        "kind": pa.utf8(),
        "bucket": pa.int32(),
    },
    "keys": {"topic": pa.utf8(), "shard": pa.int32(), "shard_key": pa.utf8()},
}
SUMS = {"windows": ("messages", "bytes"), "buckets": ("messages",), "keys": ("messages", "bytes")}
MOST = {"windows": ("size_max", "latency_us_max"), "buckets": (), "keys": ()}
SCHEMAS = {
    kind: pa.schema([*by.items(), *((name, pa.int64()) for name in (*SUMS[kind], *MOST[kind]))])
    for kind, by in BY.items()
}
WRITTEN_LAST = "keys"  # the batch is complete when this file exists
MOST_FILES = 32  # files of a kind before they are merged
DIGITS = 8


class PartialSum(NamedTuple):
    """The sums of batches `first` to `last`."""

    first: int
    last: int
    path: Path


class PartialSums:
    """The files of partial sums in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "_parts"
        with explain_write_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)

    @property
    def has_sums(self) -> bool:
        return bool(self._all(WRITTEN_LAST))

    def write(self, number: int, counted: Mapping[str, pa.Table]) -> None:
        """Write the sums of a batch."""
        for kind in BY:
            table = counted[kind].select(SCHEMAS[kind].names).cast(SCHEMAS[kind])
            replace_table(self._path(kind, number, number), table)

    def read(self, kind: str) -> pa.Table:
        """Return the sums of all complete batches."""
        whole = max((part.last for part in self._parts(WRITTEN_LAST)), default=-1)
        parts = [part for part in self._parts(kind) if part.last <= whole]
        return _summed(kind, parts)

    def compact(self) -> None:
        """Merge all files of a kind but the newest if there are MOST_FILES."""
        for kind in BY:
            parts = self._parts(kind)
            newest = max((part.last for part in parts), default=0)
            old = [part for part in parts if part.last < newest]
            if len(old) < MOST_FILES:
                continue
            first, last = min(part.first for part in old), max(part.last for part in old)
            path = self._path(kind, first, last)
            replace_table(path, _summed(kind, old))
            for part in self._all(kind):
                if part not in self._parts(kind):
                    part.path.unlink(missing_ok=True)

    def _path(self, kind: str, first: int, last: int) -> Path:
        return self._folder / f"{first:0{DIGITS}}-{last:0{DIGITS}}.{kind}.parquet"

    def _parts(self, kind: str) -> list[PartialSum]:
        """Return the files that do not lie within another."""
        parts = self._all(kind)
        return [
            part
            for part in parts
            if not any(
                other.first <= part.first and part.last <= other.last and other[:2] != part[:2]
                for other in parts
            )
        ]

    def _all(self, kind: str) -> list[PartialSum]:
        parts = []
        for path in sorted(self._folder.glob(f"*.{kind}.parquet")):
            first, _, last = path.name.partition(".")[0].partition("-")
            parts.append(PartialSum(int(first), int(last), path))
        return parts


def _summed(kind: str, parts: Sequence[PartialSum]) -> pa.Table:
    schema, by = SCHEMAS[kind], list(BY[kind])
    kinds = [(name, "sum") for name in SUMS[kind]] + [(name, "max") for name in MOST[kind]]
    tables = [pq.read_table(part.path, schema=schema) for part in parts]
    whole = pa.concat_tables([schema.empty_table(), *tables])
    sums = whole.group_by(by).aggregate(kinds).rename_columns(schema.names)
    return sums.sort_by([(name, "ascending") for name in by])


def replace_table(path: Path, table: pa.Table) -> None:
    """Write a table atomically: also after a power failure the file is the old or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    with explain_write_errors(path.parent):
        try:
            pq.write_table(table, draft, compression="zstd")
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            draft.replace(path)
            sync_folder(path.parent)
        finally:
            draft.unlink(missing_ok=True)
