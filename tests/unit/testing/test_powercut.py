"""The power-cut model, on small programs whose possible disks are known, and on LMDB."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.rig.fork_server import ChildServer
from tests.rig.power import recorder
from tests.rig.power.images import PAGE, Change, Disk, File, Tree, images, parts
from tests.rig.power.recorder import Kind, Record

ROOT = Path("/watched")


def opened(handle: int, path: str, flags: int = os.O_CREAT) -> Record:
    return Record(Kind.OPENED, flags, handle, 0, f"/watched/{path}".encode())


def written(handle: int, offset: int, data: bytes) -> Record:
    return Record(Kind.WRITTEN, 0, handle, offset, data)


def sync(handle: int, number: int = 1) -> list[Record]:
    return [Record(kind, 0, handle, number, b"") for kind in (Kind.SYNCING, Kind.SYNCED)]


def renamed(old: str, new: str) -> Record:
    return Record(Kind.RENAMED, 0, 0, 0, f"/watched/{old}\0/watched/{new}".encode())


def folder(path: str) -> Record:
    return Record(Kind.FOLDER, 0, 0, 0, f"/watched/{path}".encode())


def disks(*record: Record) -> list[Any]:
    """Every different disk that a hundred cuts at the end of the record give."""
    disk, choices = Disk(ROOT), random.Random(1)
    found: list[Any] = []
    for one in record:
        disk.apply(one)
    for _ in range(100):
        tree = disk.image(0, choices).tree
        if tree not in found:
            found.append(tree)
    return found


NAMED = [opened(9, "", os.O_RDONLY), opened(1, "a"), *sync(9)]


def test_synced_writes_are_on_every_disk():
    assert disks(*NAMED, written(1, 0, b"ab"), *sync(1)) == [{"a": b"ab"}]


def test_unsynced_writes_may_be_on_disk_or_not():
    found = disks(*NAMED, written(1, 0, b"ab"), *sync(1), written(1, 1, b"c"))
    assert sorted(tree["a"] for tree in found) == [b"ab", b"ac"]


def test_a_later_write_may_be_there_without_an_earlier_one():
    found = disks(*NAMED, written(1, 0, b"a"), written(1, 1, b"b"))
    assert sorted(tree["a"] for tree in found) == [b"", b"\0b", b"a", b"ab"]


def test_a_write_is_torn_at_pages():
    found = disks(*NAMED, written(1, 0, b"a" * PAGE + b"b" * PAGE))
    assert {"a": bytes(PAGE) + b"b" * PAGE} in found


def test_a_sync_covers_writes_before_its_start():
    begun, ended = sync(1)
    found = disks(*NAMED, written(1, 0, b"a"), begun, written(1, 1, b"b"), ended)
    assert sorted(tree["a"] for tree in found) == [b"a", b"ab"]


def test_a_sync_that_has_not_ended_covers_nothing():
    assert {"a": b""} in disks(*NAMED, written(1, 0, b"a"), sync(1)[0])


def test_a_file_opened_for_safe_writes_needs_no_sync():
    record = [opened(2, "a", os.O_DSYNC), written(1, 0, b"old"), written(2, 1, b"N")]
    assert sorted(tree["a"] for tree in disks(*NAMED, *record)) == [b"\0N", b"oNd"]


def test_a_cut_file_may_still_be_long():
    cut = Record(Kind.CUT, 0, 1, 1, b"")
    found = disks(*NAMED, written(1, 0, b"abc"), *sync(1), cut)
    assert sorted(tree["a"] for tree in found) == [b"a", b"abc"]


def test_a_name_needs_a_sync_of_its_folder():
    found = disks(opened(1, "a"), written(1, 0, b"a"), *sync(1))
    assert {} in found
    assert {"a": b"a"} in found


def test_a_renamed_file_goes_by_one_of_its_names():
    found = disks(*NAMED, written(1, 0, b"new"), *sync(1), renamed("a", "b"))
    assert found == [{"a": b"new"}, {"b": b"new"}] or found == [{"b": b"new"}, {"a": b"new"}]


def test_a_rename_before_a_sync_gives_an_empty_file():
    assert {"b": b""} in disks(*NAMED, written(1, 0, b"new"), renamed("a", "b"))


def test_names_in_a_folder_that_was_not_synced_are_lost_with_it():
    inside = [folder("f"), opened(2, "f", os.O_RDONLY), opened(1, "f/a"), *sync(2)]
    assert {"f": {"a": b""}} in disks(*inside)
    assert {} in disks(*inside)
    root = [opened(9, "", os.O_RDONLY), *sync(9, 2)]
    assert disks(*inside, *root) == [{"f": {"a": b""}}]


def test_a_removed_file_may_still_be_there():
    removed = Record(Kind.REMOVED, 0, 0, 0, b"/watched/a")
    found = disks(*NAMED, removed)
    assert {} in found
    assert {"a": b""} in found


def test_parts_end_where_the_disks_own_do():
    pieces = list(parts(Change(500, b"x" * 600), 512))
    assert [(piece.offset, len(piece.data or b"")) for piece in pieces] == [
        (500, 12),
        (512, 512),
        (1024, 76),
    ]


def test_settling_never_counts_a_change_twice():
    file = File(pending=[Change(0, b"a"), Change(1, b"b")])
    file.settle(1)
    file.settle(1)
    assert (bytes(file.content), len(file.pending), file.changes) == (b"a", 1, 2)


# --- a real process, and LMDB as it is

COMMITS = 40


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return recorder.build_library(tmp_path_factory.mktemp("library"))


def record_of(library: Path, tmp_path: Path, act: str, *args: object) -> tuple[Path, Path]:
    watched, log = tmp_path / "watched", tmp_path / "log"
    watched.mkdir()
    env = recorder.recording(library, watched, log)
    with ChildServer("tests.rig.power.plain_lmdb", env) as server:
        server.ask(act, str(watched), *args)
    return watched, log


def test_the_replayed_record_equals_the_disk(library, tmp_path):
    watched, log = record_of(library, tmp_path, "shuffle_files")
    disk = Disk(watched)
    for record in recorder.records(log):
        disk.apply(record)
    (tree,) = [
        image.tree
        for image in (disk.image(0, random.Random(seed)) for seed in range(50))
        if image.how == "all that was written"
    ][:1]
    assert tree == on_disk(watched)


def on_disk(folder: Path) -> Tree:
    return {
        path.name: on_disk(path) if path.is_dir() else path.read_bytes()
        for path in folder.iterdir()
    }


@pytest.mark.parametrize("sync", [True, False])
def test_lmdb_keeps_acknowledged_commits_only_with_sync(library, tmp_path, sync):
    watched, log = record_of(library, tmp_path, "write", COMMITS, sync)
    choices, lost, at_risk = random.Random(7), 0, 0
    with ChildServer("tests.rig.power.plain_lmdb") as server:
        for number, image in enumerate(images(recorder.records(log), watched, choices, 40)):
            target = tmp_path / f"image{number}"
            image.write(target)
            at_risk += image.lost
            ended = server.run("count", str(target))
            lost += bool(image.marks) and (ended.answer or 0) < int(image.marks[-1])
    assert at_risk > 0
    assert (lost == 0) == sync


def test_a_writable_map_makes_the_record_worthless(library, tmp_path):
    _, log = record_of(library, tmp_path, "map_a_file")
    with pytest.raises(recorder.UnseenWrite, match="mmap"):
        list(recorder.records(log))
