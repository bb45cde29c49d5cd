"""Power cuts: every disk that a client's writes and syncs may leave has all confirmed events.

A child changes its state folder under a recorder of writes and syncs. Images of the disk are
made from the record, cut at random places, with unsynced writes lost, kept, reordered or torn.
Unlike kill -9, after which the kernel still writes dirty pages, this detects a missing sync.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polybus.dialects.pirate.client.state_folder import ClientFolder
from polybus.errors import PolybusError
from tests.rig.power import recorder
from tests.rig.power.images import Image, images
from tests.rig.power.recorder import Kind
from tests.unit.pirate.conftest import in_memory
from tests.unit.pirate.test_folder import CHANGES, check, confirmed

IMAGES, SOAK_IMAGES = 150, 5000
CHILD = f"""
import sys
from pathlib import Path
from polybus.dialects.pirate.client import client_journal
from polybus.dialects.pirate.client.journal_state import EpochOpened, RequestAnswered
from polybus.dialects.pirate.client.state_folder import ClientFolder
from tests.rig.power.recorder import Marks

client_journal.GROWTH_BYTES = 300  # rewritten often
mark = Marks()
folder = ClientFolder(Path(sys.argv[1]), b"me")

def note(text):
    mark(text)
{CHANGES}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return recorder.build_library(tmp_path_factory.mktemp("library"))


@pytest.fixture
def images_in() -> Iterator[Path]:
    with in_memory() as folder:
        yield folder


@pytest.fixture
def record(library, tmp_path) -> Path:
    """The record of a child that has changed its folder many times."""
    watched, log = tmp_path / "watched", tmp_path / "log"
    watched.mkdir()
    env = os.environ | recorder.recording(library, watched, log)
    state = watched / "clients" / "state"
    subprocess.run([sys.executable, "-c", CHILD, str(state)], env=env, check=True, timeout=60)
    renames = sum(one.kind == Kind.RENAMED for one in recorder.records(log))
    assert renames > 3, "it was never rewritten"
    return log


def look(log: Path, images_in: Path, count: int) -> None:
    seed = random.randrange(1 << 32)
    made = images(recorder.records(log), log.with_name("watched"), random.Random(seed), count)
    lost = marked = 0
    for number, image in enumerate(made):
        judge(image, images_in / str(number), f"seed {seed}, image {number}: {image}")
        lost += image.lost
        marked += bool(image.marks)
    assert lost > 0, "nothing was at risk in any image"
    assert marked > count // 4, "few events were confirmed before the cuts"


def judge(image: Image, folder: Path, which: str) -> None:
    image.write(folder)
    try:
        found = ClientFolder(folder / "clients" / "state")
    except PolybusError as error:
        raise AssertionError(f"{which}: {error}") from None
    if image.marks or found.state.id == b"me":
        check(found.state, confirmed(b"\n".join(image.marks).decode()), which)
    found.close()
    shutil.rmtree(folder)


@pytest.mark.sabotage(
    "journal-sync-off", "journal-rename-unsynced", expects=r"image \d+: cut at record \d+"
)
def test_disk_after_a_power_cut_has_all_confirmed_events(record, images_in):
    look(record, images_in, IMAGES)


@pytest.mark.soak
@pytest.mark.sabotage(
    "journal-sync-off", "journal-rename-unsynced", expects=r"image \d+: cut at record \d+"
)
def test_thousands_of_disks_after_a_power_cut(record, images_in):
    look(record, images_in, SOAK_IMAGES)
