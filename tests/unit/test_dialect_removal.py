"""A dialect is its folder: without it the rest works; a dialect from elsewhere is added by name.

The copies of the package are made of symbolic links, so nothing is compiled again.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rig.sample import sample

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
DIALECTS = ("fdq", "freud", "gsb", "pirate", "rqueue")
LISTENERS = {
    "freud": "unix:{}/freud.sock",
    "gsb": "tcp://127.0.0.1:0",
    "native": "grpc://127.0.0.1:0",
    "pirate": "tcp://127.0.0.1:0",
    "rqueue": "tcp://127.0.0.1:0",
}
COMMANDS = {"pirate": ("pirate", "keys")}

# Imports every module but those that need Spark, then prints values that depend on the registry.
IMPORT_ALL = """
import importlib, json, pkgutil, sys
import polybus
import pyarrow.flight  # its libraries: the Flight port is linked to them
from pathlib import Path
for module in pkgutil.walk_packages(polybus.__path__, "polybus."):
    if not module.name.startswith(("polybus.spark", "polybus.__main__")):
        importlib.import_module(module.name)
from polybus.server.config import load, section_types
from polybus.server.listener_plan import plan_listeners
plan = plan_listeners(load(), Path("/run/polybus"))
print(json.dumps({
    "names": dir(polybus), "all": polybus.__all__, "sections": list(section_types()),
    "listeners": sorted({one.dialect for one in plan}), "file": polybus.__file__,
}))
"""

TOY = """
from dataclasses import dataclass

from polybus.bus.dialect import Command, Dialect


@dataclass(frozen=True)
class ToyLimits:
    max_echo_bytes: int = 5


class EchoSession:
    def __init__(self, pipe, limits):
        self.pipe, self.limits = pipe, limits

    def receive(self, buffer, start, end):
        self.pipe.write(bytes(memoryview(buffer)[start:end])[: self.limits.max_echo_bytes])
        return end - start

    def on_stalled(self): ...
    def on_writable(self): ...
    def on_half_closed(self): return False
    def on_ended(self): ...


async def open_server(context):
    return context.serve_streams(lambda pipe: EchoSession(pipe, context.section))


def register(root, name, help_line):
    @root.command(name, help=help_line)
    def toy():
        print("hello from toy")


DIALECT = Dialect(
    name="toy",
    default_addresses=("tcp://127.0.0.1:6599",),
    schemes=("tcp",),
    limits=ToyLimits,
    bounds={"max_echo_bytes": (1, 100)},
    commands=(Command("toy", "toy_dialect", "Echo a few bytes."),),
    open_server=open_server,
)
"""
TOY_ENTRY_POINTS = """
[polybus.dialects]
toy = toy_dialect:DIALECT
gone = module_that_is_gone:DIALECT
"""


def environment(folder: Path, tmp_path: Path) -> dict[str, str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith("POLYBUS_")}
    runtime = {"XDG_RUNTIME_DIR": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    return {**own, **runtime, "PYTHONPATH": str(folder)}


def run(env: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env=env,
        cwd=env["XDG_RUNTIME_DIR"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@contextmanager
def serving(env: dict[str, str], *flags: str) -> Iterator[tuple[dict[str, str], Path]]:
    """Run a bus. Yields its addresses by dialect, and the file of its log."""
    folder = Path(env["XDG_RUNTIME_DIR"])
    log = folder / "log"
    flags = ("--data", str(folder / "data"), "--listen", f"admin=unix:{folder}/admin.sock", *flags)
    command = [sys.executable, "-m", "polybus", "serve", *flags]
    with log.open("w") as stderr:
        bus = subprocess.Popen(
            command, env=env, cwd=log.parent, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    try:
        assert bus.stdout is not None
        addresses = {}
        for line in bus.stdout:
            if line == "ready\n":
                break
            _, dialect, address = line.split()
            addresses[dialect] = address
        else:
            pytest.fail(f"the bus did not start: {log.read_text()}")
        yield addresses, log
    finally:
        bus.send_signal(signal.SIGTERM)
        status = bus.wait(20)
        assert bus.stdout is not None
        bus.stdout.close()
    assert status == 0, log.read_text()


def copy_without(dialect: str, folder: Path) -> Path:
    """Return the path of a copy of the package without the dialect's folder."""
    copy = folder / "src"
    shutil.copytree(
        SOURCE / "polybus",
        copy / "polybus",
        copy_function=os.symlink,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.rmtree(copy / "polybus" / "dialects" / dialect)
    return copy


@pytest.fixture(params=DIALECTS, scope="module")
def removed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, str]]:
    """A copy of the package without one dialect: its name, and the environment of the copy."""
    tmp_path = tmp_path_factory.mktemp(request.param)
    return request.param, environment(copy_without(request.param, tmp_path), tmp_path)


def test_package_works_without_a_dialect(removed: tuple[str, dict[str, str]]) -> None:
    name, env = removed
    done = run(env, "-c", IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["file"].startswith(env["PYTHONPATH"])  # the copy was imported
    assert name not in seen["names"]
    assert name not in seen["all"]
    assert name not in seen["sections"]
    assert seen["listeners"] == sorted({*LISTENERS, "admin"} - {name})


def test_commands_of_a_removed_dialect_are_gone(removed: tuple[str, dict[str, str]]) -> None:
    name, env = removed
    shown = run(env, "-m", "polybus", "--help")
    assert shown.returncode == 0, shown.stderr
    assert name not in shown.stdout.lower()
    for command in COMMANDS.get(name, (name,)):
        assert command not in shown.stdout.split()
        assert run(env, "-m", "polybus", command, "--help").returncode == 2


def test_listening_for_a_removed_dialect_is_a_usage_error(
    removed: tuple[str, dict[str, str]],
) -> None:
    name, env = removed
    done = run(env, "-m", "polybus", "serve", "--listen", f"{name}=tcp://127.0.0.1:0")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"unknown dialect {name!r}" in done.stderr


def test_bus_serves_the_other_dialects(removed: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    name, env = removed
    others = {one: address.format(tmp_path) for one, address in LISTENERS.items() if one != name}
    flags = [text for one, address in others.items() for text in ("--listen", f"{one}={address}")]
    with serving(env, *flags) as (addresses, log):
        assert set(addresses) == {*others, "admin"}
    skipped = [line for line in log.read_text().splitlines() if "dialect skipped" in line]
    assert len(skipped) == 1
    assert repr(name) in skipped[0]


# Each takes about a minute, so `make test` runs one, chosen by the commit, and `make soak` all.
SAMPLED_DIALECT = sample(DIALECTS, 1, "removed dialect")[0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == SAMPLED_DIALECT else pytest.mark.soak)
        for name in DIALECTS
    ],
)
def test_unit_tests_of_the_other_dialects_pass(name: str, tmp_path: Path) -> None:
    copy = copy_without(name, tmp_path)
    others = [f"tests/unit/{other}" for other in DIALECTS if other != name]
    selected = f'not soak and not needs(dialect="{name}")'
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", selected, *others],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def test_dialect_is_added_by_entry_point_alone(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    info = folder / "toy-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "toy_dialect.py").write_text(TOY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(TOY_ENTRY_POINTS)
    env = environment(folder, tmp_path)

    assert "Echo a few bytes." in run(env, "-m", "polybus", "--help").stdout
    assert run(env, "-m", "polybus", "toy").stdout == "hello from toy\n"
    wrong = run({**env, "POLYBUS_TOY_MAX_ECHO_BYTES": "101"}, "-m", "polybus", "config", "check")
    assert wrong.returncode == 2
    assert "[toy] max_echo_bytes" in wrong.stderr

    with serving(env, "--listen", "toy=tcp://127.0.0.1:0") as (addresses, log):
        host, _, port = addresses["toy"].removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20) as link:
            link.sendall(b"hello world")
            assert link.recv(100) == b"hello"
    skipped = [line for line in log.read_text().splitlines() if "dialect skipped" in line]
    assert len(skipped) == 1
    assert "module_that_is_gone" in skipped[0]
