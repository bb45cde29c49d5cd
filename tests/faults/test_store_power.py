"""Power cuts: a store must open from every disk state that its writes and syncs allow.

A child works under the recorder (`recorder`). Images are made from its record, cut at random
places, in which unsynced writes are lost, kept, reordered or torn at random (`images`).
Each image must open for an owner, hold everything that was acknowledged before the cut, and
no part of a commit without the rest. kill -9 cannot detect a missing sync, because the
kernel still writes the data of a dead process; this test can.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.fork_server import ChildServer
from tests.rig.power import recorder
from tests.rig.power.images import Image, images
from tests.rig.power.recorder import Kind

CHILD = "tests.rig.store.child"
COMMITS = 100
IMAGES = 100
SOAK_IMAGES = 1000


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return recorder.build_library(tmp_path_factory.mktemp("library"))


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """Return a folder in memory for the images, if the machine has one."""
    where = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="pb-power-", dir=where) as name:
        yield Path(name)


def acknowledged(marks: list[bytes]) -> list[str]:
    return [mark.decode() for mark in marks]


def judge(server: ChildServer, image: Image, folder: Path, strict: bool) -> list[str]:
    """Return the faults of an image; the death of the child is a fault, too."""
    image.write(folder)
    ended = server.run("look", str(folder / "store"), acknowledged(image.marks), strict)
    shutil.rmtree(folder)
    if ended.signal:
        return [f"the process that opened it was killed by signal {ended.signal}"]
    return [ended.failure] if ended.failure else ended.answer


class PowerCuts:
    """Records one run, and checks some of the disk states that it may have left."""

    def __init__(self, library: Path, tmp_path: Path, images_in: Path, child: str = CHILD):
        self._child = child
        self._watched, self._log = tmp_path / "watched", tmp_path / "log"
        self._watched.mkdir()
        self._images_in = images_in
        self._recorder = recorder.recording(library, self._watched, self._log)
        self.at_risk = self.lost = self.marked = 0

    def record(self, act: str, *args: object) -> None:
        with ChildServer(self._child, self._recorder) as server:
            server.ask(act, str(self._watched / "store"), *args)

    @property
    def renames(self) -> int:
        return sum(record.kind == Kind.RENAMED for record in recorder.records(self._log))

    def look(self, count: int, *, strict: bool = True) -> None:
        seed = random.randrange(1 << 32)
        made = images(recorder.records(self._log), self._watched, random.Random(seed), count)
        with ChildServer(self._child) as server:
            for number, image in enumerate(made):
                faults = judge(server, image, self._images_in / f"{number}", strict)
                self.at_risk += image.at_risk
                self.lost += image.lost
                self.marked += bool(image.marks)
                assert not faults, "\n".join([f"seed {seed}, image {number}: {image}", *faults])
        assert self.lost > 0, "nothing was at risk in any image"
        assert self.at_risk > self.lost, "nothing that was at risk was ever kept"
        assert self.marked > count // 4, "hardly anything was acknowledged before the cuts"


@pytest.fixture
def cuts(library, tmp_path, memory_folder) -> PowerCuts:
    return PowerCuts(library, tmp_path, memory_folder)


@pytest.mark.sabotage("sync-off", "torn-commits", expects=r"image \d+: cut at record \d+")
def test_power_cut_keeps_acknowledged_commits_and_tears_none(cuts):
    cuts.record("record", "fsync", COMMITS)
    cuts.look(IMAGES)


# The sabotage torn-commits shows too seldom here: a cut must fall between two transactions of one
# interval. The test above has it, and the kills of test_store_kill.py with intervals.
@pytest.mark.sabotage("sync-off", expects=r"image \d+: cut at record \d+", tries=3)
def test_interval_power_cut_keeps_a_prefix_of_the_commits(cuts):
    cuts.record("record", "interval", COMMITS)
    cuts.look(IMAGES // 2, strict=False)


@pytest.mark.sabotage("compact-sync-off", expects=r"image \d+: cut at record \d+")
def test_power_cut_during_compaction_is_atomic(cuts):
    cuts.record("record", "fsync", COMMITS, True)
    assert cuts.renames > 2, "there was no compaction"
    cuts.look(IMAGES // 2)


@pytest.mark.soak
@pytest.mark.parametrize("durability", ["fsync", "interval"])
@pytest.mark.parametrize("compact", [False, True])
def test_many_power_cuts(cuts, durability, compact):
    cuts.record("record", durability, 5 * COMMITS, compact)
    cuts.look(SOAK_IMAGES, strict=durability == "fsync")
