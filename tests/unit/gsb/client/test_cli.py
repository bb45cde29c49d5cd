"""The commands of `polybus gsb`, run as processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from polybus import gsb
from polybus.dialects.gsb.client.program_service import ProgramService
from polybus.testing.bus_process import POLYBUS, run
from tests.rig.observer import stats, until

UPPER = "import sys, json; print(json.dumps(json.load(sys.stdin)['name'].upper()))"


@contextmanager
def service(address: str, name: str, *command: str) -> Iterator[subprocess.Popen[str]]:
    """Run `polybus gsb serve` and wait until it serves."""
    words = [*POLYBUS, "gsb", "serve", name, "--at", address, "--", *command]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline() == f"polybus: serving {name!r}\n"
            yield process
        finally:
            process.kill()


def gsb_command(address: str, *words: str) -> subprocess.CompletedProcess[str]:
    return run("gsb", *words, "--at", address)


def test_serve_runs_a_program_for_each_call(address):
    with service(address, "upper", sys.executable, "-c", UPPER) as process:
        done = gsb_command(address, "call", "upper", '{"name": "Ada"}')
        assert (done.returncode, done.stdout, done.stderr) == (0, '"ADA"\n', "")
        failed = gsb_command(address, "call", "upper", "{}")
        assert (failed.returncode, failed.stdout) == (6, "")
        assert "KeyError: 'name'" in failed.stderr
        listed = gsb_command(address, "ls", "--json")
        assert [(row["id"], row["calls"]) for row in json.loads(listed.stdout)] == [("upper", 2)]
        assert gsb_command(address, "ls").stdout.split()[:5] == [
            *("id", "since", "calls", "pending"),
            "upper",
        ]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143


def test_output_lines_are_a_stream_and_its_end_ends_the_program(address, bus):
    endless = (
        "import itertools, os; [print(n, os.environ['GSB_METHOD']) for n in itertools.count()]"
    )
    with service(address, "endless", sys.executable, "-c", endless):
        with gsb.blocking.connect(address) as client, client.stream("endless/m") as lines:
            assert [next(lines) for _ in range(3)] == ["0 m", "1 m", "2 m"]
        until(lambda: stats(bus)["gsb"]["serving"] == 0, "the call has ended")
        with gsb.blocking.connect(address) as client:
            assert client.call("sys/services")[0]["pending"] == 0


def test_abandoned_call_ends_the_children_of_its_program(address):
    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    with gsb.blocking.connect(address) as client:
        client.register("leaves", ProgramService(["sh", "-c", "sleep 1000 & echo $!"]))
        with client.stream("leaves") as lines:
            pid = next(lines)
            assert runs(pid)
        until(lambda: not runs(pid), "the child has ended")


def test_program_that_cannot_be_started_fails_the_call(address):
    with service(address, "none", "/no/such/program"):
        done = gsb_command(address, "call", "none")
        assert done.returncode == 6
        assert "/no/such/program: No such file" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "output"),
    [
        (["call", "unknown"], 4, "no service 'unknown'"),
        (["call", "/x"], 2, "/x"),
        (["call", "x", "{"], 2, "the data must be JSON"),
        (["call", "sys/ping", '[1, "two"]'], 0, '[1, "two"]\n'),
        (["call", "sys/ping"], 0, ""),
        (["ping", "-n", "2"], 0, " ms\n"),
        (["ls"], 0, "no services"),
        (["serve", "sys/x", "--", "true"], 2, "register 'sys/x'"),
    ],
    ids=str,
)
def test_output_and_exit_codes(address, words, code, output):
    rest = words[words.index("--") :] if "--" in words else []
    words = words[: len(words) - len(rest)]
    done = run("gsb", *words, "--at", address, *rest)
    assert done.returncode == code, done
    assert output in done.stdout + done.stderr


def test_exit_code_without_a_bus():
    done = run("gsb", "ping", "--at", "tcp://127.0.0.1:1")
    assert done.returncode == 3
    assert done.stderr.startswith("polybus: cannot connect to tcp://127.0.0.1:1")
