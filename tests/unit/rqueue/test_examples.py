"""Run the examples of rqueue, and check their output."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polybus.testing.bus_process import rqueue

EXAMPLES = Path(__file__).parents[3] / "examples"
PATIENCE_S = 40


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with rqueue() as bus:
        yield str(bus.address())


def command(name: str, *args: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / f"{name}.py"), *args]


def test_published_lines_arrive_as_lines(address):
    lines = "".join(f"{number}\n" for number in range(5000))
    with subprocess.Popen(
        command("rqueue_subscribe", "lines", address), stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "subscribed to lines\n"
        subprocess.run(
            command("rqueue_publish", "lines", address),
            input=lines,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        )
        assert "".join(reader.stdout.readline() for _ in range(5000)) == lines
        reader.send_signal(signal.SIGINT)
        assert reader.wait(PATIENCE_S) == 0


def test_blocking_example_answers_across_threads(address):
    done = subprocess.run(
        command("rqueue_blocking", address),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "4 squared is 16"
