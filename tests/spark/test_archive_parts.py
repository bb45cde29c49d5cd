"""The parts of an archive, without Spark: manifests, locks, files by date, compaction."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from polybus.errors import ConfigError, Conflict, Damaged, DataFolderInUse, WrongFormat
from polybus.model.arrow import READ_SCHEMA
from polybus.spark.archive.archive_committer import KEEP_S, remove_unlisted
from polybus.spark.archive.archive_folder import MARK, ArchiveFolder, TopicLocks, quote_name
from polybus.spark.archive.archive_source import FEW_ROWS, MOST_ROWS, plan_tasks
from polybus.spark.archive.file_compaction import SMALL_BYTES, choose_merges
from polybus.spark.archive.manifest import (
    KEPT_MANIFESTS,
    ArchivedFile,
    LastRow,
    Manifest,
    OffsetSpan,
    ReplacedFile,
    commit_manifest,
    list_archived_topics,
    read_manifest,
)
from polybus.spark.archive.parquet_files import FILE_BYTES, NS_PER_DAY, by_date
from polybus.spark.source.partitions import OffsetRange


def file(path, spans, date="2026-01-31", size_bytes=100):
    shards = {n: OffsetSpan(*span) for n, span in spans.items()}
    return ArchivedFile(path, date, size_bytes, 1, 2, shards)


def lasts(files):
    return {n: LastRow(span.end, 2) for added in files for n, span in added.shards.items()}


def manifest_of(*files):
    return Manifest("t").added(files, lasts(files))


@pytest.fixture
def folder(tmp_path):
    made = ArchiveFolder(tmp_path / "archive")
    made.prepare()
    return made


# --- manifests


def test_added_files_continue_at_the_end_of_the_archive():
    manifest = manifest_of(file("b", {1: (5, 9)}), file("a", {0: (0, 4), 1: (0, 5)}))
    assert [each.path for each in manifest.files] == ["a", "b"]
    assert manifest.shards == {0: OffsetSpan(0, 4), 1: OffsetSpan(0, 9)}
    assert (manifest.number, manifest.rows) == (1, 13)


def test_files_are_sorted_by_day_before_shard():
    """Shard 0 has messages of the second day only, so the task's file of that day begins with a
    lower shard than its file of the first day.
    """
    second = file("second", {0: (0, 9), 1: (3, 9)}, date="2026-02-01")
    manifest = manifest_of(second, file("first", {1: (0, 3)}))
    assert [each.path for each in manifest.files] == ["first", "second"]
    assert manifest.shards == {0: OffsetSpan(0, 9), 1: OffsetSpan(0, 9)}


@pytest.mark.parametrize("start", [3, 5])
def test_file_that_overlaps_or_leaves_a_gap_is_refused(start):
    manifest = manifest_of(file("a", {0: (0, 4)}))
    with pytest.raises(Conflict, match=f"archived up to 4, and the batch begins at {start}"):
        manifest.added([file("b", {0: (start, 9)})], {})


def test_gap_is_accepted_if_gaps_are_allowed():
    manifest = manifest_of(file("a", {0: (0, 4)}))
    new = [file("b", {0: (6, 9)})]
    assert manifest.added(new, lasts(new), gaps=True).shards == {0: OffsetSpan(0, 9)}
    with pytest.raises(Conflict):
        manifest.added([file("b", {0: (3, 9)})], {}, gaps=True)


def test_manifest_round_trip(folder):
    manifest = replace(manifest_of(file("a", {0: (0, 4)})), replaced=(ReplacedFile("x", 17),))
    commit_manifest(folder, manifest)
    assert read_manifest(folder, "t") == manifest
    assert list_archived_topics(folder) == ["t"]


def test_unknown_fields_of_a_manifest_are_ignored():
    manifest = replace(manifest_of(file("a", {0: (0, 4)})), replaced=(ReplacedFile("x", 17),))
    content = manifest.as_json()
    for part in (content, *content["files"], *content["replaced"], *content["shards"].values()):
        part["new"] = 1
    assert Manifest.parse(content) == manifest


def test_two_writers_cannot_commit_the_same_manifest_number(folder):
    manifest = manifest_of(file("a", {0: (0, 4)}))
    commit_manifest(folder, manifest)
    with pytest.raises(Conflict, match="another process adds"):
        commit_manifest(folder, manifest)
    assert read_manifest(folder, "t") == manifest


def test_newest_manifest_is_read_and_few_old_ones_are_kept(folder):
    for number in range(1, 21):
        commit_manifest(folder, Manifest("t", number))
    assert read_manifest(folder, "t").number == 20
    assert len(list(folder.manifests("t").glob("*.json"))) == KEPT_MANIFESTS


@pytest.mark.parametrize("text", ["{", "[]", '{"topic": "t"}', '{"shards": {"0": 5}}'])
def test_invalid_manifest_raises_damaged(folder, text):
    folder.manifests("t").mkdir(parents=True)
    (folder.manifests("t") / f"{1:020}.json").write_text(text)
    with pytest.raises(Damaged):
        read_manifest(folder, "t")


# --- the folder


def test_empty_folder_becomes_an_archive(folder):
    folder.prepare()
    folder.check()
    assert list_archived_topics(folder) == []


def test_folder_with_other_files_is_not_an_archive(tmp_path):
    (tmp_path / "letter").touch()
    for way in (ArchiveFolder(tmp_path).prepare, ArchiveFolder(tmp_path).check):
        with pytest.raises(WrongFormat, match="is not an archive"):
            way()
    assert [path.name for path in tmp_path.iterdir()] == ["letter"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"format": "polybus archive", "version": 2}), "version 2, this polybus"),
        (json.dumps({"format": "another"}), "has another format"),
        ("[]", "has another format"),
        ("{", "is not an archive"),
    ],
)
def test_archive_of_another_version_is_refused(folder, text, message):
    (folder.path / MARK).write_text(text)
    for way in (folder.prepare, folder.check):
        with pytest.raises(WrongFormat, match=message):
            way()


def test_folder_must_be_a_writable_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        ArchiveFolder(tmp_path / "file").prepare()
    with pytest.raises(ConfigError, match="is not a folder"):
        ArchiveFolder(tmp_path / "file" / "archive").prepare()
    with pytest.raises(ConfigError, match="not writable"):
        ArchiveFolder("/sys/archive").prepare()


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "ü" * 100, "checkpoints", "x~y", "a b%"])
def test_each_topic_has_its_own_folder(folder, name):
    assert folder.manifests(name).parent == folder.manifests("plain").parent
    assert len(quote_name(name)) <= 200
    assert len({quote_name(topic) for topic in (name, name + "x", "x" + name)}) == 3
    commit_manifest(folder, Manifest(name, 1))
    assert list_archived_topics(folder) == [name]


def test_topic_lock_is_exclusive(folder):
    first, second = TopicLocks(folder), TopicLocks(folder)
    first.take("t")
    first.take("t")
    second.take("other")
    with pytest.raises(DataFolderInUse, match=r"'t' is being archived .* by process"):
        second.take("t")
    first.release()
    second.take("t")
    second.release()


def test_lock_that_cannot_be_created_is_reported(folder):
    (folder.path / "_polybus").mkdir(exist_ok=True)
    (folder.path / "_polybus" / "topics").touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        TopicLocks(folder).take("t")


def test_only_old_unlisted_files_are_removed(folder):
    place = folder.data("t") / "date=2026-01-31"
    place.mkdir(parents=True)
    names = ["counts", "new-replaced", "old-replaced", "stray"]
    paths = {name: f"{place.relative_to(folder.path)}/{name}.parquet" for name in names}
    for path in paths.values():
        (folder.path / path).touch()
    now_s = (folder.path / paths["stray"]).stat().st_mtime
    one = manifest_of(file(paths["counts"], {0: (0, 4)}))
    gone = (
        ReplacedFile(paths["new-replaced"], int(now_s + KEEP_S)),
        ReplacedFile(paths["old-replaced"], int(now_s - 1)),
    )
    commit_manifest(folder, replace(one, replaced=gone))
    remove_unlisted(folder, "t", now_s + 10)
    assert len(list(place.iterdir())) == 4
    remove_unlisted(folder, "t", now_s + KEEP_S + 10)
    left = sorted(one.name for one in place.iterdir())
    assert left == ["counts.parquet", "new-replaced.parquet"]
    assert read_manifest(folder, "t").replaced == gone[:1]


# --- files


def batch_of(times):
    columns: dict[str, list[Any]] = {name: [None] * len(times) for name in READ_SCHEMA.names}
    columns |= {"timestamp_ns": times, "offset": list(range(len(times)))}
    schema = pa.schema(column.with_nullable(True) for column in READ_SCHEMA)
    return pa.RecordBatch.from_pydict(columns, schema)


def test_rows_are_split_by_utc_date():
    day = 20_000 * NS_PER_DAY
    batch = batch_of([day, day + NS_PER_DAY - 1, day + NS_PER_DAY, day + 3 * NS_PER_DAY])
    pieces = [(date, piece.column("offset").to_pylist()) for date, piece in by_date(batch)]
    assert pieces == [("2024-10-04", [0, 1]), ("2024-10-05", [2]), ("2024-10-07", [3])]


def test_number_of_tasks_follows_the_number_of_rows():
    assert [part.ranges for part in plan_tasks([OffsetRange("t", 0, 5, 9)], 8)] == [
        ((OffsetRange("t", 0, 5, 9)),)
    ]
    total = 4 * FEW_ROWS
    parts = plan_tasks([OffsetRange("t", 1, 0, total // 2), OffsetRange("t", 0, 0, total // 2)], 3)
    assert [part.rows for part in parts] == pytest.approx([total / 3] * 3, abs=1)
    assert [piece for part in parts for piece in part.ranges] == sorted(
        piece for part in parts for piece in part.ranges
    )
    assert sum(part.rows for part in parts) == total
    assert (
        max(part.rows for part in plan_tasks([OffsetRange("t", 0, 0, 5 * MOST_ROWS)], 2))
        <= MOST_ROWS
    )


def test_small_neighbours_of_a_date_are_merged():
    small = [file(f"s{n}", {0: (n, n + 1)}) for n in range(4)]
    large = file("large", {0: (4, 100)}, size_bytes=SMALL_BYTES)
    later = [file(f"l{n}", {0: (n, n + 1)}, date="2026-02-01") for n in (100, 101)]
    manifest = manifest_of(*small, large, *later)
    assert [[each.path for each in merge.files] for merge in choose_merges(manifest, 2)] == [
        ["s0", "s1", "s2", "s3"],
        ["l100", "l101"],
    ]
    assert [len(merge.files) for merge in choose_merges(manifest, 3)] == [4]
    assert choose_merges(manifest, 8) == []


def test_files_are_not_merged_over_a_gap():
    files = [file("a", {0: (0, 4)}), file("b", {0: (6, 9)}), file("c", {0: (9, 10), 1: (0, 2)})]
    manifest = Manifest("t").added(files, lasts(files), gaps=True)
    assert [[each.path for each in merge.files] for merge in choose_merges(manifest, 2)] == [
        ["b", "c"]
    ]
    assert [(gap.shard, gap.lost) for gap in manifest.gaps()] == [(0, OffsetSpan(4, 6))]


def test_merged_file_is_at_most_file_bytes():
    size = SMALL_BYTES - 1
    files = [file(f"s{n:02}", {0: (n, n + 1)}, size_bytes=size) for n in range(20)]
    merges = choose_merges(manifest_of(*files), 2)
    assert max(sum(small.size_bytes for small in merge.files) for merge in merges) <= FILE_BYTES
    assert sum(len(merge.files) for merge in merges) >= 19


def test_merged_file_takes_the_place_of_the_small_ones():
    small = [file(f"s{n}", {0: (n, n + 1)}) for n in range(3)]
    before = manifest_of(*small, file("next", {0: (3, 9)}))
    after = before.compacted(small[:2], file("merged", {0: (0, 2)}), 17.9)
    assert [each.path for each in after.files] == ["merged", "s2", "next"]
    assert after.replaced == (ReplacedFile("s0", 17), ReplacedFile("s1", 17))
    assert (after.number, after.shards, after.rows) == (2, before.shards, before.rows)
    assert after.without_replaced({"s1"}).replaced == (ReplacedFile("s1", 17),)
