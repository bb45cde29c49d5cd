"""`polybus fdq produce` and `replay` on a running bus and on a folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from polybus import fdq
from polybus.cli import main
from polybus.testing.bus_process import POLYBUS
from tests.rig.native_bus import NativeBus
from tests.rig.observer import until

PATIENCE_S = 60


@pytest.fixture(scope="module")
def bus() -> Iterator[NativeBus]:
    with NativeBus() as running:
        yield running


@pytest.fixture(params=["native", "lmdb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "lmdb":
        return f"lmdb:{tmp_path / 'store'}"
    return str(request.getfixturevalue("bus").url)


@contextmanager
def typed(data: bytes, folder: Path) -> Iterator[None]:
    """Replace stdin."""
    (folder / "stdin").write_bytes(data)
    kept = os.dup(0)
    with (folder / "stdin").open("rb") as file:
        os.dup2(file.fileno(), 0)
    try:
        yield
    finally:
        os.dup2(kept, 0)
        os.close(kept)


class Done(NamedTuple):
    out: bytes
    err: bytes


@pytest.fixture
def polybus(
    url: str, tmp_path: Path, capfdbinary: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Done]:
    """Run the command in this process, because starting one takes longer than the command."""
    monkeypatch.setenv("POLYBUS_URL", url)

    def call(*args: str, stdin: bytes = b"", code: int = 0) -> Done:
        capfdbinary.readouterr()
        with typed(stdin, tmp_path):
            found = main.run(["fdq", *args])
        done = Done(*capfdbinary.readouterr())
        assert found == code, done.err
        return done

    return call


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return str(request.node.name).replace("[", "-").replace("]", "")


def test_produce_lines_and_arguments(polybus: Callable[..., Done], topic: str, url: str) -> None:
    done = polybus("produce", topic, "--key-sep", ":", stdin=b"a:one\nb:two\nno key\n")
    assert done.err.startswith(b"3 messages")
    polybus(
        "produce", topic, "x y", "--key", "k", "--header", "from=shell", "--header", "n=1", "-q"
    )
    found = {one.message: (one.shard_key, one.headers) for one in fdq.replay(url, topic)}
    headers = {"from": b"shell", "n": b"1"}
    assert found == {
        b"one": ("a", {}),
        b"two": ("b", {}),
        b"no key": (None, {}),
        b"x y": ("k", headers),
    }


def test_produce_atomic(polybus: Callable[..., Done], topic: str, url: str) -> None:
    lines = b"".join(b"k%d:%d\n" % (n % 10, n) for n in range(40_000))
    polybus("produce", topic, "--atomic", "--key-sep", ":", stdin=lines)
    times = {one.timestamp_ns for one in fdq.replay(url, topic)}
    assert len(times) == 1
    bad = lines + b"k" * 1025 + b":too long a key\n"
    done = polybus("produce", topic, "--atomic", "--key-sep", ":", stdin=bad, code=2)
    assert b"at most 1024" in done.err
    assert fdq.stats(url, topic)["all"]["inserted"] == 40_000


def test_replay_ranges_and_formats(polybus: Callable[..., Done], topic: str) -> None:
    polybus("produce", topic, *map(str, range(10)), "--key", "k", "--name", "importer")
    assert polybus("replay", topic).out == b"".join(b"%d\n" % n for n in range(10))
    done = polybus("replay", topic, "--from", "3", "--to", "5", "-f", "%i %k %s\\n")
    assert done.out == b"3 k 2\n4 k 3\n"
    assert polybus("replay", topic, "--from", "9", "-n", "1").out == b"8\n"
    assert polybus("replay", topic, "--from", "latest").out == b""
    assert polybus("replay", topic, "--from", "@2000-01-01", "--to", "@2000-01-02").out == b""
    rows = [json.loads(line) for line in polybus("replay", topic, "--json").out.splitlines()]
    assert [(row["id"], row["key"]) for row in rows] == [(n, "k") for n in range(1, 11)]


def test_errors_have_an_exit_code_and_one_line(polybus: Callable[..., Done], topic: str) -> None:
    mistakes = [
        (("replay", topic), 4, b"no durable topic"),
        (("produce", topic, "x", "--no-create"), 4, b"no durable topic"),
        (("produce", "a,b", "x"), 2, b"topic name"),
        (("produce", topic, "x", "--key", "a", "--key-sep", ":"), 2, b"exclude"),
        (("produce", topic, "x", "--header", "nothing"), 2, b"NAME=VALUE"),
        (("replay", topic, "--from", "somewhere"), 2, b"invalid start position"),
        (("replay", topic, "--json", "-f", "%s"), 2, b"exclude"),
        (("produce", topic, "x", "--bus", "polybus://127.0.0.1:1"), 3, b"no bus answers"),
        (("produce", topic, "x", "--bus", "nonsense"), 2, b"nonsense"),
    ]
    for args, code, words in mistakes:
        done = polybus(*args, code=code)
        assert words in done.err, args
        assert b"Traceback" not in done.err


def test_folder_in_use_names_the_process(tmp_path: Path) -> None:
    url = f"lmdb:{tmp_path / 'store'}"
    with fdq.Producer(url) as producer:
        producer.produce("t", "k", b"x")
        done = subprocess.run(
            [*POLYBUS, "fdq", "replay", "t", "--bus", url], capture_output=True, timeout=PATIENCE_S
        )
    assert done.returncode == 2
    assert f"pid {os.getpid()}".encode() in done.stderr


def test_follow_ends_with_ctrl_c(bus: NativeBus, topic: str, tmp_path: Path) -> None:
    said = tmp_path / "said"
    with fdq.Producer(bus.url) as producer, said.open("wb") as out:
        producer.produce(topic, "k", b"first")
        child = subprocess.Popen(
            [*POLYBUS, "fdq", "replay", topic, "--follow", "--bus", bus.url], stdout=out
        )
        until(lambda: said.read_bytes() == b"first\n", "the first")
        producer.produce(topic, "k", b"second")
        until(lambda: said.read_bytes() == b"first\nsecond\n", "the second")
        child.send_signal(signal.SIGINT)
        assert child.wait(PATIENCE_S) == 130


def test_help_imports_no_heavy_module() -> None:
    """Printing the help loads neither Arrow nor compiled modules."""
    program = (
        "import sys; from polybus.cli.main import run; code = run(['fdq', 'replay', '--help']);"
        "print(code, [name for name in ('pyarrow', 'lmdb', 'uvloop') if name in sys.modules])"
    )
    done = subprocess.run(
        [POLYBUS[0], "-c", program], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.splitlines()[-1] == "0 []"
