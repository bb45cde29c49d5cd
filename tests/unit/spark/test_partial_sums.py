"""Partial sums of batches add up, also if a batch is counted again or a merge is interrupted."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from polybus.spark.pipelines.stats.partial_sums import MOST_FILES, SCHEMAS, PartialSums


def counted(key: str, messages: int) -> dict[str, pa.Table]:
    rows = {
        "windows": {
            "topic": "t",
            "start_s": 10,
            "messages": messages,
            "bytes": 2 * messages,
            "size_max": messages,
            "latency_us_max": 7,
        },
        "buckets": {"topic": "t", "start_s": 10, "kind": "size", "bucket": 3, "messages": messages},
        "keys": {"topic": "t", "shard": 0, "shard_key": key, "messages": messages, "bytes": 0},
    }
    strict = {
        kind: pa.schema([field.with_nullable(False) for field in schema])
        for kind, schema in SCHEMAS.items()
    }
    return {kind: pa.Table.from_pylist([row], strict[kind]) for kind, row in rows.items()}


def keys(parts: PartialSums) -> dict[str, int]:
    return {row["shard_key"]: row["messages"] for row in parts.read("keys").to_pylist()}


def test_repeated_batch_is_counted_once(tmp_path: Path):
    parts = PartialSums(tmp_path)
    assert keys(parts) == {}
    for number, (key, messages) in enumerate([("a", 1), ("b", 2), ("a", 4)]):
        parts.write(number, counted(key, messages))
    parts.write(2, counted("a", 4))
    assert keys(PartialSums(tmp_path)) == {"a": 5, "b": 2}
    assert parts.read("windows").to_pylist() == [
        {
            "topic": "t",
            "start_s": 10,
            "messages": 7,
            "bytes": 14,
            "size_max": 4,
            "latency_us_max": 7,
        }
    ]


def test_all_files_but_the_newest_are_merged(tmp_path: Path):
    parts = PartialSums(tmp_path)
    for number in range(MOST_FILES + 1):
        parts.write(number, counted(f"k{number % 2}", 1))
    before = keys(parts)
    parts.compact()
    files = sorted(path.name for path in (tmp_path / "_parts").glob("*.keys.parquet"))
    assert files == [
        f"00000000-{MOST_FILES - 1:08}.keys.parquet",
        f"{MOST_FILES:08}-{MOST_FILES:08}.keys.parquet",
    ]
    assert keys(parts) == before
    parts.write(MOST_FILES, counted("k0", 1))
    assert keys(parts) == before


def test_interrupted_merge_counts_nothing_twice(tmp_path: Path):
    """The merged file exists, and so do the files that it replaces."""
    parts = PartialSums(tmp_path)
    for number in range(3):
        parts.write(number, counted("a", 1))
    folder = tmp_path / "_parts"
    for kind in SCHEMAS:
        whole = parts.read(kind)
        other = PartialSums(tmp_path / "other")
        other.write(0, {**counted("a", 2), kind: whole})
        made = tmp_path / "other" / "_parts" / f"00000000-00000000.{kind}.parquet"
        made.rename(folder / f"00000000-00000001.{kind}.parquet")
    assert keys(parts) == {"a": 4}


def test_incomplete_batch_is_not_read(tmp_path: Path):
    """The file of windows exists, the file of keys does not yet."""
    parts = PartialSums(tmp_path)
    parts.write(0, counted("a", 1))
    parts.write(1, counted("a", 1))
    (tmp_path / "_parts" / "00000001-00000001.keys.parquet").unlink()
    assert keys(parts) == {"a": 1}
    assert parts.read("windows").to_pylist()[0]["messages"] == 1
