"""Run examples/native.py against a real bus, and check its output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.rig.native_bus import NativeBus

EXAMPLE = Path(__file__).parents[2] / "examples" / "native.py"
PATIENCE_S = 60


def test_example_follows_produced_messages():
    with NativeBus() as bus:
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), bus.url],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
    lines = done.stdout.splitlines()
    assert sum(line.split(" ", 1)[1].startswith("ann lamp") for line in lines) == 1000
    assert {"a chair", "a table"} <= {line.split(" ", 2)[2] for line in lines[:2]}
    assert any(line.endswith("None the last") for line in lines)
    assert any(line.startswith("Produced(first_id=1003") for line in lines)
