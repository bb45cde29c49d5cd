"""The example works on a running bus and on an in-process bus."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.rig.native_bus import NativeBus

EXAMPLE = Path(__file__).parents[2] / "examples" / "fdq.py"
PATIENCE_S = 90


def run(url: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), url], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("where", ["bus", "lmdb", "memory"])
def test_every_order_has_one_invoice_in_its_customers_order(where, tmp_path):
    if where == "bus":
        with NativeBus() as bus:
            lines = run(bus.url)
    else:
        lines = run(f"lmdb:{tmp_path}/data" if where == "lmdb" else "memory:")
    assert lines == [
        "ann 100 invoice for chair 0 … invoice for chair 297",
        "bob 100 invoice for chair 1 … invoice for chair 298",
        "eve 100 invoice for chair 2 … invoice for chair 299",
        "acked 300, lag 0",
    ]
