"""The fuzz driver finds planted bugs that blind chance would not.

Four nested tests of a byte guard each bug. A blind fuzzer needs about four thousand million
tries, one that observes branches a few thousand.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rig.fuzz.coverage import FLAGS
from tests.rig.fuzz.driver import CANNOT, FOUND, FOUND_NOTHING

MAGIC = b"\xc0\x1d\xbe\xef"

PLANTED = """
#include <stddef.h>
#include <stdlib.h>
int planted(const unsigned char *data, size_t size) {
    if (size >= 4)
        if (data[0] == 0xc0)
            if (data[1] == 0x1d)
                if (data[2] == 0xbe)
                    if (data[3] == 0xef)
                        BUG;
    return 0;
}
"""

TARGET = """
import ctypes
library = ctypes.CDLL({library!r})
SEEDS = [b"hello, world"]
def target(data):
    assert not library.planted(data, ctypes.c_size_t(len(data))), "found"
"""

# Enough for the driver many times over, and nothing for chance.
RUNS = 100_000


def plant(folder: Path, bug: str, flags: str = FLAGS) -> Path:
    """Write a target whose compiled code runs the given statement after the magic bytes."""
    source, library, target = folder / "planted.c", folder / "planted.so", folder / "planted.py"
    source.write_text(PLANTED.replace("BUG", bug))
    command = ["gcc", "-O1", "-shared", "-fPIC", *flags.split(), "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    target.write_text(TARGET.format(library=str(library)))
    return target


def drive(target: Path, *options: str) -> subprocess.CompletedProcess[str]:
    folder = target.parent
    command = [sys.executable, "-m", "tests.rig.fuzz.driver", str(target), "--runs", str(RUNS)]
    command += ["--crashes", f"{folder}/crashes", "--build", f"{folder}/build", *options]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)


def crashes(target: Path) -> list[bytes]:
    return [path.read_bytes() for path in (target.parent / "crashes").glob("*.crash")]


def test_a_broken_invariant_is_found_and_its_input_saved(tmp_path: Path) -> None:
    target = plant(tmp_path, "return 1")
    done = drive(target)
    assert done.returncode == FOUND, done.stderr
    assert "AssertionError: found" in done.stderr
    (found,) = crashes(target)
    assert found.startswith(MAGIC)


def test_a_crash_of_the_process_is_found_and_its_input_saved(tmp_path: Path) -> None:
    target = plant(tmp_path, "abort()")
    done = drive(target)
    assert done.returncode == FOUND, done.stderr
    (found,) = crashes(target)
    assert found.startswith(MAGIC)


def test_a_hang_is_found_and_its_input_saved(tmp_path: Path) -> None:
    target = plant(tmp_path, "for (volatile int forever = 1; forever;)")
    done = drive(target, "--hang-seconds", "1")
    assert done.returncode == FOUND, done.stderr
    assert "hangs" in done.stderr
    (found,) = crashes(target)
    assert found.startswith(MAGIC)


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    target = plant(tmp_path, "return 1")
    first, second = drive(target, "--seed", "7"), drive(target, "--seed", "7")
    assert "runs=" in first.stdout
    assert first.stdout == second.stdout


def test_code_without_the_bug_is_found_innocent(tmp_path: Path) -> None:
    target = plant(tmp_path, "return 0")
    done = drive(target, "--runs", "2000")
    assert done.returncode == FOUND_NOTHING, done.stderr
    assert "runs=2000" in done.stdout
    assert crashes(target) == []


def test_code_without_instruments_is_refused(tmp_path: Path) -> None:
    done = drive(plant(tmp_path, "return 1", flags=""))
    assert done.returncode == CANNOT
    assert "no branch is watched" in done.stderr


@pytest.mark.parametrize(("data", "holds"), [(MAGIC, False), (b"harmless", True)])
def test_a_saved_input_is_shown_again(tmp_path: Path, data: bytes, holds: bool) -> None:
    target = plant(tmp_path, "return 1", flags="")
    saved = tmp_path / "saved"
    saved.write_bytes(data)
    done = drive(target, "--replay", str(saved))
    assert (done.returncode == FOUND_NOTHING) == holds
