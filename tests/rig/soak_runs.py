"""The record of soak runs, from which docs/guarantees.md takes its figures.

A long test appends one line with its seed, commit, duration and counts. Counts of several runs
and seeds are summed; names that end in `_max` are maxima. `.ci/guarantees.py` writes the table.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
FILE = REPOSITORY / "docs" / "soak-runs.jsonl"


class SoakRun:
    """One run of a long test, timed from its construction."""

    def __init__(self, name: str, seed: int) -> None:
        self._name, self._seed, self._started = name, seed, time.monotonic()

    def record(self, **counts: float) -> None:
        """Append the run to the file."""
        line = {
            "name": self._name,
            "seed": self._seed,
            "commit": _commit(),
            "seconds": round(time.monotonic() - self._started),
            "counts": counts,
        }
        with FILE.open("a") as lines:
            lines.write(json.dumps(line) + "\n")


def _commit() -> str:
    command = ["git", "rev-parse", "--short=10", "HEAD"]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
