"""The folders of a bus: their paths, modes and owners."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from polybus.errors import ConfigError
from polybus.model import socket_path
from polybus.server import folders

ME = os.getuid()
SOMEONE = 54321


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.fixture
def sticky(tmp_path: Path) -> Path:
    """A folder like /tmp."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def test_runtime_folder(tmp_path):
    assert socket_path.runtime_folder({"XDG_RUNTIME_DIR": "/run/user/7"}, 7) == Path(
        "/run/user/7/polybus"
    )
    assert socket_path.runtime_folder({"XDG_RUNTIME_DIR": "/run/user/0"}, 0) == Path(
        "/run/user/0/polybus"
    )
    assert socket_path.runtime_folder({}, 0) == Path("/run/polybus")
    assert socket_path.runtime_folder({"TMPDIR": str(tmp_path)}, 7) == tmp_path / "polybus-7"
    assert socket_path.runtime_folder({"XDG_RUNTIME_DIR": ""}, 0) == Path("/run/polybus")


def test_data_folder():
    assert folders.data_folder({"XDG_STATE_HOME": "/s", "HOME": "/h"}, 7) == Path("/s/polybus")
    assert folders.data_folder({"HOME": "/h"}, 7) == Path("/h/.local/state/polybus")
    assert folders.data_folder({"HOME": "/root"}, 0) == Path("/var/lib/polybus")
    with pytest.raises(ConfigError, match="--data"):
        folders.data_folder({}, 7)


def test_modes_depend_on_the_bus_user():
    assert folders.socket_mode(0) == 0o666
    assert folders.socket_mode(7) == 0o600
    assert folders.socket_folder_mode(0) == 0o755
    assert folders.socket_folder_mode(7) == 0o700


def test_data_folder_is_created_private_with_parents(tmp_path):
    folder = tmp_path / "a" / "b" / "data"
    before = os.umask(0o000)
    try:
        (tmp_path / "a").mkdir(0o755)
        (tmp_path / "a" / "b").mkdir(0o755)
        folders.prepare_data(folder, ME)
    finally:
        os.umask(before)
    assert mode(folder) == 0o700


def test_umask_does_not_change_folder_modes(tmp_path):
    before = os.umask(0o777)
    try:
        folders.prepare_runtime(tmp_path / "run", ME)
    finally:
        os.umask(before)
    assert mode(tmp_path / "run") == folders.socket_folder_mode(ME)


def test_valid_folder_is_unchanged(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(0o750)
    folders.prepare_data(folder, ME)
    assert mode(folder) == 0o750


@pytest.mark.parametrize("bits", [0o770, 0o707, 0o722])
def test_folder_writable_by_others_is_refused(tmp_path, bits):
    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(bits)
    with pytest.raises(ConfigError, match=f"others may write in it: chmod go-w {folder}"):
        folders.prepare_data(folder, ME)
    folder.chmod(0o700)


def test_folder_of_another_user_is_refused(tmp_path):
    (tmp_path / "run").mkdir(0o700)
    with pytest.raises(ConfigError, match=f"belongs to uid {ME}, and this bus runs as uid 54321"):
        folders.prepare_runtime(tmp_path / "run", SOMEONE)


def test_sticky_parent_is_accepted(sticky):
    folders.prepare_runtime(sticky / "polybus-7", ME)
    assert (sticky / "polybus-7").is_dir()


def test_world_writable_parent_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"anyone may replace it: chmod \+t"):
        folders.prepare_runtime(tmp_path / "polybus-7", ME)


def test_link_to_an_own_folder_is_accepted(tmp_path):
    (tmp_path / "disk").mkdir(0o700)
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    folders.prepare_data(tmp_path / "data", ME)


@pytest.mark.skipif(ME != 0, reason="only root can give files away")
def test_link_of_another_user_is_refused(sticky, tmp_path):
    (tmp_path / "ours").mkdir(0o700)
    link = sticky / "polybus-0"
    link.symlink_to(tmp_path / "ours")
    os.chown(link, SOMEONE, SOMEONE, follow_symlinks=False)
    with pytest.raises(ConfigError, match="belongs to uid 54321"):
        folders.prepare_runtime(link, ME)


def test_dangling_link_and_file_are_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("precious")
    for name in ("link", "file"):
        with pytest.raises(ConfigError, match="something else has that name"):
            folders.prepare_data(tmp_path / name, ME)
    with pytest.raises(ConfigError, match=r"cannot be made: (Not a directory|File exists)"):
        folders.prepare_data(tmp_path / "file" / "data", ME)
    assert (tmp_path / "file").read_text() == "precious"


def test_runtime_folder_needs_its_parent(tmp_path):
    with pytest.raises(ConfigError, match="XDG_RUNTIME_DIR"):
        folders.prepare_runtime(tmp_path / "gone" / "polybus", ME)
    assert not (tmp_path / "gone").exists()


def test_folder_of_a_configured_socket_is_created_or_unchanged(tmp_path):
    folders.prepare_listed(tmp_path / "new", ME)
    assert mode(tmp_path / "new") == folders.socket_folder_mode(ME)
    (tmp_path / "old").mkdir()
    (tmp_path / "old").chmod(0o777)
    folders.prepare_listed(tmp_path / "old", ME)
    assert mode(tmp_path / "old") == 0o777
    with pytest.raises(ConfigError, match="cannot be made"):
        folders.prepare_listed(tmp_path / "gone" / "deeper", ME)
