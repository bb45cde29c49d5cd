"""Socket files: a dead one is replaced, a living one respected, a stranger's file not touched."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from pathlib import Path

import pytest

from polybus.errors import AddressError, AddressInUse
from polybus.server import socket_files


def bind(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    return sock


def test_free_path(tmp_path):
    with socket_files.claimed_path(tmp_path / "a.sock"):
        bind(tmp_path / "a.sock").close()


def test_stale_socket_is_replaced(tmp_path):
    bind(tmp_path / "a.sock").close()  # the file stays, no process listens
    with socket_files.claimed_path(tmp_path / "a.sock"):
        assert not (tmp_path / "a.sock").exists()


def test_socket_with_a_listener_is_an_error(tmp_path):
    with bind(tmp_path / "a.sock") as owner:
        owner.listen()
        with (
            pytest.raises(AddressInUse, match="a running bus already listens there"),
            socket_files.claimed_path(tmp_path / "a.sock"),
        ):
            pass
    assert (tmp_path / "a.sock").exists()


def test_busy_listener_counts_as_running(tmp_path):
    with bind(tmp_path / "a.sock") as owner, socket.socket(socket.AF_UNIX) as waiting:
        owner.listen(0)
        waiting.connect(str(tmp_path / "a.sock"))  # fills the backlog
        with pytest.raises(AddressInUse), socket_files.claimed_path(tmp_path / "a.sock"):
            pass


def test_file_that_is_not_a_socket_is_kept(tmp_path):
    (tmp_path / "a.sock").write_text("precious")
    with (
        pytest.raises(AddressError, match="exists and is not a socket"),
        socket_files.claimed_path(tmp_path / "a.sock"),
    ):
        pass
    assert (tmp_path / "a.sock").read_text() == "precious"


def test_missing_socket_folder(tmp_path):
    with (
        pytest.raises(AddressError, match="No such file"),
        socket_files.claimed_path(tmp_path / "gone" / "a.sock"),
    ):
        pass


def test_concurrent_starts_do_not_remove_each_others_socket(tmp_path):
    """Eight threads race for one stale socket: exactly one gets it, and keeps it."""
    path = tmp_path / "a.sock"
    bind(path).close()
    barrier = threading.Barrier(8)
    owners: list[socket.socket] = []
    losers: list[AddressInUse] = []

    def start() -> None:
        barrier.wait()
        try:
            with socket_files.claimed_path(path):
                sock = bind(path)
                sock.listen()
                owners.append(sock)
        except AddressInUse as error:
            losers.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(owners), len(losers)) == (1, 7)
    owners[0].close()


def test_locked_folder_times_out(tmp_path, monkeypatch):
    monkeypatch.setattr(socket_files, "CLAIM_TIMEOUT_S", 0.05)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with (
            pytest.raises(AddressInUse, match="keeps its folder locked"),
            socket_files.claimed_path(tmp_path / "a.sock"),
        ):
            pass
    finally:
        os.close(fd)


def test_only_the_own_socket_file_is_removed(tmp_path):
    path = tmp_path / "a.sock"
    bind(path).close()
    ours = socket_files.identify(path)
    path.rename(tmp_path / "kept")  # so that the inode is not used again
    bind(path).close()
    socket_files.remove(path, ours)
    assert path.exists()
    socket_files.remove(path, socket_files.identify(path))
    assert not path.exists()
    socket_files.remove(path, ours)  # gone already: fine
