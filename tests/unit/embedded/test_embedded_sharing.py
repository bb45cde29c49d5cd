"""A store URL has one bus per process, which all its clients share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polybus.errors import AddressError, ConnectionLost, DataFolderInUse, StoreClosed, StoreFault
from polybus.native import Client
from polybus.native.inprocess import open_bus

OPENER = """
import os, sys
from polybus.native.inprocess import open_bus
with open_bus(sys.argv[1]) as bus:
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"lmdb:{tmp_path / 'store'}"


def bodies(bus: Client, topic: str) -> list[bytes]:
    return [body for batch in bus.read(topic) for body in batch.column("body").to_pylist()]


def put(bus: Client, body: bytes) -> None:
    bus.producer().produce("t", [body]).result()


@pytest.mark.parametrize("name", ["memory:", "memory:shared", "lmdb"])
def test_clients_of_a_url_share_a_bus(name: str, url: str) -> None:
    where = url if name == "lmdb" else name
    with open_bus(where) as one, open_bus(where) as other:
        put(one, b"seen by both")
        assert bodies(other, "t") == [b"seen by both"]


def test_folder_is_one_bus_for_all_forms_of_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    ways = ["lmdb:store", f"lmdb:{tmp_path}/store", "lmdb:./store", "lmdb:link/store/"]
    opened = [open_bus(way) for way in ways]
    put(opened[0], b"x")
    assert [bodies(bus, "t") for bus in opened] == [[b"x"]] * len(ways)
    for bus in opened:
        bus.close()


def test_buses_in_memory_are_separate_by_name() -> None:
    with (
        open_bus("memory:one") as one,
        open_bus("memory:other") as other,
        open_bus("memory:") as no,
    ):
        put(one, b"x")
        assert one.act("topic.list")["topics"]
        assert not other.act("topic.list")["topics"]
        assert not no.act("topic.list")["topics"]


def test_bus_closes_with_its_last_client(url: str) -> None:
    first, second = open_bus(url), open_bus(url)
    put(first, b"x")
    first.close()
    first.close()  # counts once
    put(second, b"y")
    second.close()
    with open_bus(url) as again:
        assert bodies(again, "t") == [b"x", b"y"]


def test_bus_in_memory_is_dropped_with_its_last_client() -> None:
    with open_bus("memory:brief") as bus:
        put(bus, b"x")
    with open_bus("memory:brief") as bus:
        assert bus.act("topic.list")["topics"] == []


def test_closed_client_raises_and_others_go_on() -> None:
    with open_bus("memory:") as other:
        closed = open_bus("memory:")
        closed.close()
        for call in (
            lambda: closed.act("topic.list"),
            lambda: closed.read("t"),
            closed.producer,
            lambda: closed.fetch(topic="t"),
        ):
            with pytest.raises(ConnectionLost, match="closed"):
                call()
        assert other.act("topic.list")["topics"] == []


@pytest.mark.parametrize("bad", ["lmdb:", "polybus://127.0.0.1:1", "nats://x", "orders", ""])
def test_url_without_a_store_is_refused(bad: str) -> None:
    with pytest.raises(AddressError):
        open_bus(bad)


def test_the_data_folder_of_a_bus_is_its_store(tmp_path: Path) -> None:
    with open_bus(f"lmdb:{tmp_path / 'data' / 'store'}") as bus:
        put(bus, b"x")
    with open_bus(f"lmdb:{tmp_path / 'data'}") as bus:
        assert bodies(bus, "t") == [b"x"]


def test_error_in_another_process_names_the_owner(url: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", OPENER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        pid = int(child.stdout.readline())
        with pytest.raises(DataFolderInUse, match=rf"pid {pid}.*polybus serve"):
            open_bus(url)
    finally:
        child.communicate()
    with open_bus(url) as bus:  # free again
        put(bus, b"x")


def test_failed_open_can_be_retried(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("no folder")
    for _ in range(2):
        with pytest.raises(StoreFault, match="file"):
            open_bus(f"lmdb:{taken}")
    taken.unlink()
    open_bus(f"lmdb:{taken}").close()


def run_in_child(work: object) -> list[str]:
    """Return the lines that `work` returns in a forked child."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(write, "\n".join(work()).encode())  # type: ignore[operator]
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        lines = pipe.read().splitlines()
    os.waitpid(pid, 0)
    return lines


def test_inherited_producer_raises_in_a_forked_child(url: str) -> None:
    with open_bus(url) as bus, bus.producer() as producer:
        producer.produce("t", [b"x"]).result(10)

        def child() -> list[str]:
            try:
                producer.produce("t", [b"y"])
            except StoreClosed as error:
                return [str(error)]
            return ["no error"]

        (line,) = run_in_child(child)
        assert f"process {os.getpid()}" in line
        assert bodies(bus, "t") == [b"x"]


def test_inherited_client_raises_in_a_forked_child(url: str) -> None:
    owner = os.getpid()
    with open_bus(url) as bus, open_bus("memory:") as memory:
        put(bus, b"x")

        def child() -> list[str]:
            lines = []
            for call in (bus.act, memory.act):
                try:
                    call("topic.list")
                except StoreClosed as error:
                    lines.append(str(error))
            try:
                open_bus(url)
            except DataFolderInUse as error:
                lines.append(str(error))
            bus.close()  # leaves the parent's alone
            with open_bus("memory:") as fresh:
                lines.append(str(fresh.act("topic.list")["topics"]))
            return lines

        lines = run_in_child(child)
        assert len(lines) == 4
        assert all(f"process {owner}" in line for line in lines[:2])
        assert f"pid {owner}" in lines[2]
        assert lines[3] == "[]"
        assert bodies(bus, "t") == [b"x"]


def test_program_without_close_ends(url: str) -> None:
    program = (
        "import sys; from polybus.native.inprocess import open_bus\n"
        "for where in (sys.argv[1], 'memory:'):\n"
        "    open_bus(where).producer().produce('t', [b'x']).result()\n"
    )
    subprocess.run([sys.executable, "-c", program, url], check=True, timeout=60)
    with open_bus(url) as bus:
        assert bodies(bus, "t") == [b"x"]
