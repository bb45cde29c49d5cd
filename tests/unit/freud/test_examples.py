"""Run the examples of Freud, and check their output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"
PATIENCE_S = 40


def command(name: str, *args: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / f"{name}.py"), *args]


def test_published_lines_arrive_as_records(address):
    lines = [f"line {number}" for number in range(3000)]
    with subprocess.Popen(
        command("freud_subscribe", "lines", address), stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "subscribed to lines\n"
        done = subprocess.run(
            command("freud_publish", "lines", address),
            input="\n".join(lines),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        )
        assert done.stdout == "3000 produced, 0 dropped because lines has no subscriber\n"
        out, _ = reader.communicate(timeout=PATIENCE_S)
    *printed, last = out.splitlines()
    assert last == "lines was deleted"
    assert [line.split(" ", 2)[2] for line in printed] == lines
    assert [line.split(" ", 2)[0] for line in printed] == [str(n) for n in range(3000)]


def test_blocking_example_answers_across_threads(address):
    done = subprocess.run(
        command("freud_blocking", address),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "4 squared is 16"
