"""`polybus pipeline archive`: each message exactly once, in listed files, also after errors."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

import polybus.spark
from polybus.errors import Conflict, DataFolderInUse, DoesNotExist, StoreFull, Trimmed, WrongFormat
from polybus.model.arrow import PRODUCE_SCHEMA
from polybus.spark.archive import file_compaction
from polybus.spark.archive.archive_folder import CHECKPOINTS, MARK, OWN, ArchiveFolder, TopicLocks
from polybus.spark.archive.manifest import LastRow, commit_manifest, read_manifest
from polybus.spark.pipelines import archive

PATIENCE_S = 60.0
DISK_BYTES = 1 << 20


def fill(client, topic, numbers):
    """Produce numbered messages, some without a key, some with headers."""
    columns = {
        "shard_key": [f"k{n % 7}" if n % 5 else None for n in numbers],
        "body": [b"%d" % n for n in numbers],
        "insertion_ms": [n * 1000 for n in numbers],
        "headers": [[("n", b"%d" % n)] if n % 3 else None for n in numbers],
    }
    batch = pa.RecordBatch.from_pydict(columns, PRODUCE_SCHEMA)
    with client.producer() as producer:
        producer.produce_rows(topic, batch).result(PATIENCE_S)


def rows_of(frame):
    return sorted(frame.collect(), key=lambda row: (row.topic, row.shard, row.offset))


@pytest.fixture
def made(client, topic):
    client.create_topic(topic, shards=3)
    fill(client, topic, range(200))
    return topic


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "archive"


@pytest.fixture
def once(spark, bus, folder):
    """Archive all messages that exist now."""
    return lambda topic, **more: archive(spark, topic, str(folder), bus=bus.url, once=True, **more)


@pytest.fixture
def archived(spark, bus, folder):
    """Read the rows of the archive without those of the log."""

    def read(topic):
        ends = read_manifest(ArchiveFolder(folder), topic).shards
        offsets = {topic: {str(n): span.end for n, span in ends.items()}}
        options = {"bus": bus.url, "archive": str(folder), "endingOffsets": _json(offsets)}
        return rows_of(polybus.spark.table(spark, topic, **options))

    return read


def _json(value):
    return str(value).replace("'", '"')


def log_of(spark, bus, topic):
    return rows_of(polybus.spark.table(spark, topic, bus=bus.url))


def test_archive_has_the_rows_of_the_log(spark, bus, made, once, archived):
    assert once(made).rows == 200
    assert archived(made) == log_of(spark, bus, made)
    assert once(made).rows == 0


def test_files_of_small_batches_are_merged(spark, bus, made, once, archived, folder):
    summary = once(made, rows_per_batch=20)
    manifest = read_manifest(ArchiveFolder(folder), made)
    assert summary.facts["files in all"] == len(manifest.files) == 1
    assert len(manifest.replaced) > 8
    assert all((folder / file.path).is_file() for file in manifest.replaced)
    assert archived(made) == log_of(spark, bus, made)


def test_run_compacts_only_topics_that_it_has_locked(client, topic, once, folder, monkeypatch):
    for name in ("a", "b"):
        client.create_topic(f"{topic}.{name}", shards=1)
    with monkeypatch.context() as never:
        never.setattr(file_compaction, "FEW", 99)
        for first in (0, 10):
            fill(client, f"{topic}.b", range(first, first + 10))
            once(f"{topic}.b")
    before = read_manifest(ArchiveFolder(folder), f"{topic}.b")
    assert len(before.files) == 2
    fill(client, f"{topic}.a", range(10))
    assert once(f"{topic}.a").facts["files in all"] == 1
    assert read_manifest(ArchiveFolder(folder), f"{topic}.b") == before
    assert once(f"{topic}.b").facts["files in all"] == 1


def test_lost_or_other_checkpoint_changes_nothing(
    spark, bus, client, made, once, archived, folder, tmp_path
):
    once(made)
    shutil.rmtree(folder / OWN / CHECKPOINTS)
    fill(client, made, range(200, 240))
    assert once(made).rows == 40
    fill(client, made, range(240, 250))
    assert once(made, checkpoint=str(tmp_path / "other")).rows == 10
    assert once(made).rows == 0
    assert archived(made) == log_of(spark, bus, made)


def test_checkpoint_of_another_archive_is_refused(made, once, folder, client, tmp_path):
    once(made, checkpoint=str(tmp_path / "kept"))
    shutil.rmtree(folder)
    fill(client, made, range(200, 210))
    with pytest.raises(Conflict, match="this checkpoint belongs to another archive"):
        once(made, checkpoint=str(tmp_path / "kept"))


def test_topics_of_a_pattern_are_archived_separately(spark, bus, client, topic, once, archived):
    for name in ("a", "b"):
        client.create_topic(f"{topic}.{name}", shards=1)
        fill(client, f"{topic}.{name}", range(20))
    assert once(f"{topic}.*").rows == 40
    client.create_topic(f"{topic}.c", shards=1)
    fill(client, f"{topic}.c", range(5))
    assert once(f"{topic}.*").rows == 5
    for name in "abc":
        assert archived(f"{topic}.{name}") == log_of(spark, bus, f"{topic}.{name}")


# --- errors


def test_trimmed_messages_are_reported_and_skipped_with_accept_loss(
    spark, bus, client, made, once, archived, folder
):
    once(made)
    fill(client, made, range(200, 260))
    before = log_of(spark, bus, made)
    ends = {n: span.end for n, span in read_manifest(ArchiveFolder(folder), made).shards.items()}
    client.trim(made, {n: end + 2 for n, end in ends.items()})
    with pytest.raises(Trimmed, match="trimmed away before they were read; --accept-loss"):
        once(made)
    left = [row for row in before if not 0 <= row.offset - ends[row.shard] < 2]
    assert once(made, accept_loss=True).rows == len(left) - 200
    both = {"bus": bus.url, "archive": str(folder)}
    with pytest.raises(Exception, match="were trimmed away before they were read"):
        spark.read.format("polybus").options(topic=made, **both).load().count()
    with pytest.raises(Trimmed, match=rf"'{made}', shard \d: offsets \d+ to \d+ were trimmed"):
        polybus.spark.table(spark, made, **both)
    since = _json({made: {str(n): end + 2 for n, end in ends.items()}})
    assert (
        polybus.spark.table(spark, made, startingOffsets=since, **both).count() == len(left) - 200
    )
    loose = spark.read.format("polybus").options(topic=made, failOnDataLoss=False, **both)
    assert rows_of(loose.load()) == left
    assert rows_of(polybus.spark.table(spark, made, failOnDataLoss=False, **both)) == left


def test_second_run_on_a_topic_is_refused(made, once, folder):
    once(made)
    other = TopicLocks(ArchiveFolder(folder))
    other.take(made)
    try:
        with pytest.raises(DataFolderInUse, match=r"is being archived to .* by process"):
            once(made)
    finally:
        other.release()
    assert once(made).rows == 0


def test_topic_of_another_bus_is_refused(made, once, folder):
    once(made)
    manifest = read_manifest(ArchiveFolder(folder), made)
    other = replace(manifest, number=2, lasts={n: LastRow(1, 1) for n in manifest.lasts})
    commit_manifest(ArchiveFolder(folder), other)
    with pytest.raises(Conflict, match="is not the archived topic"):
        once(made)
    assert read_manifest(ArchiveFolder(folder), made) == other


def test_missing_topic_creates_no_archive(once, folder, topic):
    with pytest.raises(DoesNotExist, match="there is no durable topic"):
        once(topic)
    assert not folder.exists()


def test_folder_that_is_not_an_archive_is_not_changed(made, once, folder, spark, bus):
    folder.mkdir()
    (folder / "letter").touch()
    for way in (once, lambda topic: _read(spark, bus, topic, folder)):
        with pytest.raises(WrongFormat, match="is not an archive"):
            way(made)
    with pytest.raises(Exception, match="is not an archive"):
        spark.read.format("polybus").options(topic=made, bus=bus.url, archive=folder).load().count()
    assert [path.name for path in folder.iterdir()] == ["letter"]


def test_archive_of_another_version_is_not_changed(made, once, folder, spark, bus):
    once(made)
    (folder / MARK).write_text('{"format": "polybus archive", "version": 99}')
    before = read_manifest(ArchiveFolder(folder), made)
    for way in (once, lambda topic: _read(spark, bus, topic, folder)):
        with pytest.raises(WrongFormat, match="version 99"):
            way(made)
    assert read_manifest(ArchiveFolder(folder), made) == before


def _read(spark, bus, topic, folder):
    return polybus.spark.table(spark, topic, bus=bus.url, archive=folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small file system, which only root can do."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "polybus", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_archiving_continues_after_a_full_disk(spark, bus, client, made, small_disk, tmp_path):
    place, options = small_disk / "archive", {"bus": bus.url, "once": True}
    checkpoint = str(tmp_path / "checkpoint")
    archive(spark, made, str(place), checkpoint=checkpoint, **options)
    with client.producer() as producer:
        noise = [random.Random(n).randbytes(40_000) for n in range(50)]
        producer.produce(made, noise).result(PATIENCE_S)
    with pytest.raises(StoreFull, match=r"the disk of .* is full"):
        archive(spark, made, str(place), checkpoint=checkpoint, **options)
    assert read_manifest(ArchiveFolder(place), made).rows == 200
    both = {"bus": bus.url, "archive": str(place)}
    assert rows_of(polybus.spark.table(spark, made, **both)) == log_of(spark, bus, made)
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    assert archive(spark, made, str(place), checkpoint=checkpoint, **options).rows == 50
    assert rows_of(polybus.spark.table(spark, made, **both)) == log_of(spark, bus, made)
