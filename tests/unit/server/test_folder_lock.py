"""One bus owns a data folder, and a dead one owns nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from polybus.errors import ConfigError, DataFolderInUse
from polybus.server.folder_lock import FolderLock

HOLD = """
import sys, pathlib
from polybus.server.folder_lock import FolderLock
lock = FolderLock(pathlib.Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def hold_in_child(folder) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "locked\n"
    return child


def test_second_owner_gets_the_pid_of_the_first(tmp_path):
    with hold_in_child(tmp_path) as child:
        with pytest.raises(DataFolderInUse) as caught:
            FolderLock(tmp_path)
        assert f"pid {child.pid}" in str(caught.value)
        assert "polybus://" in str(caught.value)
        assert str(tmp_path) in str(caught.value)
        child.kill()
        child.wait()


def test_killed_owner_releases_the_lock(tmp_path):
    with hold_in_child(tmp_path) as child:
        child.kill()
        child.wait()
    with FolderLock(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_released_lock_can_be_taken_again(tmp_path):
    with FolderLock(tmp_path):
        pass
    with FolderLock(tmp_path), pytest.raises(DataFolderInUse):
        FolderLock(tmp_path)


def test_pid_of_an_earlier_owner_is_not_reported(tmp_path):
    (tmp_path / "lock").write_text("123456789012\n")
    with FolderLock(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_symbolic_link_as_lock_file_is_refused(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match="cannot be locked"):
        FolderLock(tmp_path)
    assert (tmp_path / "precious").read_text() == "precious"


def test_missing_folder_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be locked: No such file"):
        FolderLock(tmp_path / "gone")
