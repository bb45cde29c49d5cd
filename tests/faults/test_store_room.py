"""A full disk and a lack of descriptors: clear errors, no torn commit, and recovery."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from polybus.errors import StoreFull
from polybus.store.log.file_log import FileLog
from polybus.testing.conformance.log_kit import Appender, records
from tests.rig.fork_server import ChildResult, ChildServer

ACTS = "tests.rig.store.exhaustion"
DISK_BYTES = 6 << 20
RESERVED_DISK_BYTES = 32 << 20  # large enough for a reserve (disk_reserve.py)
AFTER_DROP = 40  # commits
BALLAST_BYTES = 3 << 20
LIMIT_BYTES = 2 << 20
PATIENCE_S = 60.0


@pytest.fixture
def server() -> Iterator[ChildServer]:
    with ChildServer(ACTS) as server:
        yield server


@pytest.fixture
def disk_bytes() -> int:
    return DISK_BYTES


@pytest.fixture
def small_disk(tmp_path, disk_bytes) -> Iterator[Path]:
    """Mount a small file system, which only root may do."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={disk_bytes}", "polybus", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def demand_that_it_went_on(ended: ChildResult) -> None:
    assert not ended.failure, ended.failure
    found = ended.answer
    assert not found["faults"], "\n".join(found["faults"])
    assert found["before"] > 0
    assert found["refused"] > 0, "there was always room"
    assert found["after"] > 0, "nothing was done after there was room again"
    assert found["late"] == 0, "refused although there was room"


@pytest.mark.sabotage(
    "caches-kept", expects=r"commits acknowledged, \d+ there|offsets are not dense"
)
def test_full_disk_refuses_whole_commits_until_there_is_room(server, small_disk):
    demand_that_it_went_on(fill_disk(server, small_disk, "fsync"))


@pytest.mark.sabotage("failed-batch-dropped", expects=r"producer \d: \d+ of \d+; b'")
def test_interval_commits_before_a_full_disk_are_kept(server, small_disk):
    demand_that_it_went_on(fill_disk(server, small_disk, "interval"))


def fill_disk(server: ChildServer, small_disk: Path, durability: str) -> ChildResult:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(BALLAST_BYTES))
    return server.run("fill_disk", str(small_disk / "store"), durability, str(ballast))


@pytest.mark.sabotage(
    "caches-kept", expects=r"commits acknowledged, \d+ there|offsets are not dense"
)
def test_file_size_limit_refuses_whole_commits(server, tmp_path):
    ended = server.run("fill_limit", str(tmp_path / "store"), "fsync", LIMIT_BYTES)
    demand_that_it_went_on(ended)


@pytest.mark.sabotage("reserve-off", expects="the full disk refused the drop")
@pytest.mark.parametrize("disk_bytes", [RESERVED_DISK_BYTES])
def test_topic_can_be_dropped_on_a_full_disk(server, small_disk):
    ended = server.run("drop_when_full", str(small_disk / "store"))
    assert not ended.failure, ended.failure
    found = ended.answer
    assert found["written"] > 0
    assert found["outcome"] == "dropped", f"the full disk refused the drop: {found}"
    assert found["left"] == 0
    assert found["later"] == AFTER_DROP, "the room of the dropped topic is not used"


def test_refused_drop_on_a_disk_without_reserve_leaves_the_topic_whole(server, small_disk):
    ended = server.run("drop_when_full", str(small_disk / "store"))
    assert not ended.failure, ended.failure
    found = ended.answer
    whole = found["written"] if found["outcome"] == "full" else 0
    assert found["left"] == whole, f"half dropped: {found}"


@pytest.mark.sabotage("log-room-unchecked", expects="No space left|writing the log failed")
def test_full_disk_refuses_appends_to_a_log_until_there_is_room(small_disk):
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(BALLAST_BYTES))
    with FileLog(small_disk / "log", segment_bytes=1 << 20, segment_count=64) as log:
        appender = Appender(log)
        payload = bytes(50_000)

        def append() -> bool:
            error = log.append(appender.record(payload)).exception(30)
            assert error is None or isinstance(error, StoreFull), f"refused with {error!r}"
            appender.number += error is None
            return error is None

        while append():
            pass
        full = appender.number
        assert full > 0
        assert not append()
        ballast.unlink()
        deadline = time.monotonic() + PATIENCE_S
        while not append():
            assert time.monotonic() < deadline, "there is room, and it is not used"
        while append():
            pass
        assert appender.number > full + (BALLAST_BYTES >> 20) * 10
    with FileLog(small_disk / "log") as log:
        assert [record.number for record in records(log)] == list(range(1, appender.number + 1))


@pytest.mark.sabotage("descriptor-a-commit", expects="Too many open files")
def test_store_works_without_free_descriptors_and_a_second_open_fails_clearly(server, tmp_path):
    stores = tmp_path / "first", tmp_path / "second"
    ended = server.run("without_descriptors", *map(str, stores))
    assert not ended.failure, ended.failure
    found = ended.answer
    assert not found["faults"], "\n".join(found["faults"])
    assert found["done"] > 0
    assert os.strerror(24) in found["refusal"] or "open file" in found["refusal"]
