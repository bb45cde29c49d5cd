"""Freud's socket file, and ephemeral messages that are never written to disk."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from polybus.testing.bus_process import POLYBUS, BusProcess, StartFailed, serve
from tests.faults.freud_live import connect
from tests.faults.strangers import STRANGERS
from tests.rig import freud_client, rqueue_client
from tests.rig.freud_client import OK, create, delete, get, list_topics, produce, subscribe
from tests.rig.observer import check_unharmed

ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="only root can change its uid")
MAX_PATH = 107  # bytes of a Unix socket's path
STRANGER = 4242


@contextmanager
def short_folder() -> Iterator[Path]:
    """Make a folder with a short path, because socket paths are limited."""
    made = Path(tempfile.mkdtemp(prefix="pb-s-", dir="/tmp"))
    made.chmod(0o755)
    try:
        yield made
    finally:
        shutil.rmtree(made)


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as made:
        yield made


@pytest.fixture(scope="module")
def bus() -> Iterator[BusProcess]:
    """A bus that listens at the longest path, in a new folder, and in an existing one."""
    with short_folder() as folder:
        there = folder / "there"
        there.mkdir()
        there.chmod(0o751)
        longest = folder / ("s" * (MAX_PATH - len(str(folder)) - 1))
        paths = (longest, folder / "new" / "freud.sock", there / "freud.sock")
        listen = ["rqueue=tcp://127.0.0.1:0", *(f"freud=unix:{path}" for path in paths)]
        with serve(listen=listen, folder=folder, env={"POLYBUS_LOG_LEVEL": "error"}) as running:
            yield running
            check_unharmed(running)


def paths_of(bus: BusProcess) -> list[Path]:
    return [Path(address.path) for dialect, address in bus.listeners if dialect == "freud"]


def refused(path: Path, folder: Path) -> str:
    """Return the line of a bus that cannot start."""
    with pytest.raises(StartFailed) as caught:
        serve(listen=(f"freud=unix:{path}",), folder=folder).close()
    assert (caught.value.code, caught.value.stdout) == (2, "")
    assert re.fullmatch(r"polybus: [^\n]+\n", caught.value.stderr), caught.value.stderr
    return caught.value.stderr


def speaks(bus: BusProcess, path: Path) -> bool:
    place = next(address for _, address in bus.listeners if address.path == str(path))
    with freud_client.connect(place) as client:
        return client.ask(list_topics()).code == OK


# --- the path ----------------------------------------------------------------


def test_longest_path_is_accepted_and_a_longer_one_rejected(bus: BusProcess, folder: Path):
    longest = paths_of(bus)[0]
    assert len(str(longest)) == MAX_PATH
    assert speaks(bus, longest)
    said = refused(Path(f"{longest}s"), folder)
    assert f"{longest}s" in said
    assert "too long" in said
    assert str(MAX_PATH) in said


def test_path_of_a_running_bus_is_rejected(bus: BusProcess, folder: Path):
    path = paths_of(bus)[1]
    said = refused(path, folder)
    assert str(path) in said
    assert "running bus" in said
    assert speaks(bus, path)  # and it was not disturbed


def test_stale_socket_of_a_killed_bus_is_replaced(folder: Path):
    path = folder / "freud.sock"
    listen = [f"freud=unix:{path}"]
    with serve(listen=listen, folder=folder) as dead:
        dead.signal(signal.SIGKILL)
        dead.wait()
    assert stat.S_ISSOCK(path.stat().st_mode)
    with serve(listen=listen, folder=folder) as bus:
        assert speaks(bus, path)
        assert bus.stop() == 0
    assert not path.exists()


def test_datagram_socket_at_the_path_is_not_removed(folder: Path):
    """The socket of another program rejects connections, but is not stale."""
    path = folder / "freud.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        assert str(path) in refused(path, folder)
    assert path.exists()


# --- modes -------------------------------------------------------------------


@ROOT_ONLY
def test_sockets_of_root_have_mode_666(bus: BusProcess):
    longest, new, there = paths_of(bus)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (longest, new, there)} == {0o666}
    assert stat.S_IMODE(new.parent.stat().st_mode) == 0o755
    assert stat.S_IMODE(there.parent.stat().st_mode) == 0o751  # left as it was
    assert speaks(bus, there)


@STRANGERS
def test_socket_of_an_unprivileged_bus_is_private(folder: Path):
    os.chown(folder, STRANGER, STRANGER)
    path = folder / "freud.sock"
    env = {"POLYBUS_DATA": str(folder / "data"), "XDG_RUNTIME_DIR": "", "TMPDIR": str(folder)}
    as_user = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"]
    command = [*as_user, *POLYBUS, "serve", "--listen", f"freud=unix:{path}"]
    with BusProcess(command, folder=folder, env=env) as bus:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.stat().st_uid == STRANGER
        assert speaks(bus, path)


# --- nothing on disk ---------------------------------------------------------

MESSAGES, SIZE = 2000, 4096


def traffic(bus: BusProcess) -> None:
    """Send messages of every kind that the bus might write to disk."""
    with connect(bus) as client, rqueue_client.connect(bus.address("rqueue")) as pusher:
        client.send(create(b"t"), subscribe(b"t"))
        key = client.answers(2)[1].payload
        pusher.send(
            rqueue_client.subscribe(b"t"), *(rqueue_client.publish(b"t", b"x") for _ in range(10))
        )
        assert pusher.messages(10)
        client.send(*(produce(b"t", bytes(SIZE)) for _ in range(MESSAGES)))
        client.answers(MESSAGES)
        client.send(*(get(key) for _ in range(MESSAGES // 2)))
        client.answers(MESSAGES // 2)
        client.send(delete(b"t"), create(b"t"), produce(b"t", bytes(SIZE)), freud_client.frame(99))
        client.answers(4)


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    """Each file with its size and the time of its last change; the log aside."""
    found = {str(path): path.lstat() for path in folder.rglob("*") if path.name != "stderr.log"}
    return {path: (info.st_size, info.st_mtime_ns) for path, info in found.items()}


def open_for_writing(pid: int) -> set[str]:
    """Regular files that a process could write to."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            text = Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text()
        except FileNotFoundError:  # a connection that has just ended
            continue
        flags = re.search(r"flags:\s+(\d+)", text)
        assert flags is not None
        if entry.is_file() and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY:
            found.add(str(entry.readlink()))
    return found


def test_nothing_is_written_to_disk(bus: BusProcess):
    """No file changes, no file is open for writing, and the kernel counts no write."""
    traffic(bus)  # writes that happen only once are done
    before, written = everything(bus.folder), bytes_written(bus.pid)
    for _ in range(3):
        traffic(bus)
    assert everything(bus.folder) == before
    assert bytes_written(bus.pid) == written
    kept = ("lock", ".mdb")  # the store's, in which nothing has changed
    ours = {str(bus.log_path)} | {path for path in before if path.endswith(kept)}
    assert open_for_writing(bus.pid) <= ours


def bytes_written(pid: int) -> int:
    """Return the bytes that the kernel counts as written to filesystems."""
    found = re.search(r"^write_bytes: (\d+)$", Path(f"/proc/{pid}/io").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


# System calls that make, change or remove a file.
CHANGING = "creat,mkdir,mkdirat,mknod,mknodat,rename,renameat,renameat2,link,linkat,symlink"
CHANGING += ",symlinkat,truncate,ftruncate,fallocate,unlink,unlinkat,msync,fsync,fdatasync"
WRITING = "write,writev,pwrite64,pwritev,pwritev2,sendfile,splice,copy_file_range,sendto"
NO_FILE = r"<(socket|pipe|anon_inode|UNIX|TCP)[:\-]"


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_no_system_call_writes_a_file(bus: BusProcess, folder: Path):
    traffic(bus)
    with traced(bus.pid, folder / "trace") as trace:
        traffic(bus)
    calls = trace.read_text(errors="replace").splitlines()
    assert any(" sendto" in call for call in calls), "the bus was watched"
    assert [call for call in calls if changes_a_file(call)] == []


@contextmanager
def traced(pid: int, trace: Path) -> Iterator[Path]:
    """Record the write calls of the process inside the block."""
    command = ["strace", "-f", "-y", "-o", str(trace), "-p", str(pid)]
    command += ["-e", f"trace=open,openat,openat2,{CHANGING},{WRITING}"]
    watching = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert watching.stderr is not None
        assert "attached" in watching.stderr.readline()
        yield trace
    finally:
        watching.terminate()
        watching.communicate()


def changes_a_file(call: str) -> bool:
    name, _, arguments = call.partition(" ")[2].strip().partition("(")
    if name in CHANGING.split(","):
        return True
    if name in WRITING.split(","):
        return re.match(r"\d+" + NO_FILE, arguments) is None
    return (
        name.startswith("open")
        and re.search(r"O_WRONLY|O_RDWR|O_CREAT|O_TMPFILE", call) is not None
    )
