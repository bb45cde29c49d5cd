"""The code of the guide and the example run as written."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rig.observer import until

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "spark.md"
EXAMPLE = ROOT / "examples" / "spark_stream.py"
PATIENCE_S = 200.0  # includes the start of a session
# Short queries: optimized compilation takes longer than it saves.
QUICK = {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1"}

pytestmark = pytest.mark.timeout(500)


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@contextmanager
def running(command: list[str], output: Path, **environment: str) -> Iterator[None]:
    """Run a program in a process group, which is killed at the end."""
    with output.open("wb") as file:
        program = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **QUICK, **environment},
            start_new_session=True,
        )
    try:
        yield
        assert program.poll() is None, output.read_text()[-3000:]
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()


def test_guide_code_runs(bus, client, tmp_path):
    (live, *_), (ten_lines, *_) = blocks("sh"), blocks("python")
    assert len(ten_lines.strip().splitlines()) <= 10 + 1, (
        "the guide promises ten lines (and an empty one)"
    )
    script = tmp_path / "totals.py"
    script.write_text(ten_lines)
    sent, shown = tmp_path / "sent", tmp_path / "shown"
    with (
        running(["sh", "-c", live], sent, POLYBUS_URL=bus.url),
        running([sys.executable, str(script)], shown, POLYBUS_URL=bus.url),
    ):
        row = re.compile(r"\|\{20\d\d-[^|]*\}\|(ann|bob|eve)\s*\|[1-9]\d*\s*\|")
        until(lambda: row.search(shown.read_text()), "a window with orders", PATIENCE_S)
        until(lambda: _lag(client, "totals") is not None, "the query's lag", PATIENCE_S)
    assert "WARN" not in shown.read_text(), "Spark's log must not be on the terminal"


def _lag(client, name: str) -> int | None:
    queries = client.topic_stats("orders")["queries"]
    return next((query["lag"] for query in queries if query["name"] == name), None)


def test_example_runs(bus, client, tmp_path):
    with client.producer() as producer:
        small, large = b'{"customer": "ann", "euros": 99}', b'{"customer": "bob", "euros": 100}'
        producer.produce("orders", [small, large] * 5, ["ann", "bob"] * 5).result()
    output = tmp_path / "output"
    command = [sys.executable, str(EXAMPLE), bus.url, str(tmp_path / "checkpoint")]
    with running(command, output):
        until(lambda: _bodies(client) == [large] * 5, "the large orders", PATIENCE_S)
        with client.producer() as producer:
            producer.produce("orders", [small, large], ["ann", "bob"]).result()
        until(lambda: len(_bodies(client)) > 5, "the next one", PATIENCE_S)
    assert _bodies(client) == [large] * 6


def _bodies(client) -> list[bytes]:
    if not client.topics("orders.large"):
        return []
    return [body for batch in client.read("orders.large") for body in batch["body"].to_pylist()]
