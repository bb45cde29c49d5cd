"""The stress test of the pump's threads: builds `tests/threads/pump_stress.c`, and runs it.

    python -m tests.rig.pump_stress SECONDS

runs it on 1, 2, 4 and 8 threads under ThreadSanitizer and under AddressSanitizer, for SECONDS
in total. `make threads` does that.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rig.patching import PACKAGE, ROOT
from tests.rig.soak_runs import SoakRun

SOURCE = ROOT / "tests" / "threads"
FLAVOURS = {
    "plain": ("-O2",),
    "thread": ("-O1", "-fsanitize=thread"),
    "address": ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
}
FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-g", "-pthread", "-Wall", "-Wextra", "-Werror")
ERRORS = ("lost", "reordered", "foreign", "corrupt", "refused", "over_bound", "miscounted")
SUMMED = ("published", "delivered", "disconnects", "cuts", "blocked", "policies", *ERRORS)
THREADS = (1, 2, 4, 8)
# The program ends by itself when its clients are stuck.
GRACE_S = 300.0
REPORT_LINES = 60


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    counts: dict[str, Any]
    errors: str  # what the program and its sanitizer printed

    def require_clean(self) -> None:
        """Fail with the first report of a sanitizer, or with the counts that must be 0."""
        report = "\n".join(self.errors.splitlines()[:REPORT_LINES])
        assert "WARNING: ThreadSanitizer" not in self.errors, report
        assert "ERROR: " not in self.errors, report
        assert self.counts, f"exit code {self.exit_code}: {report}"
        broken = {name: self.counts[name] for name in ERRORS if self.counts[name]}
        assert not broken, f"{broken}\n{report}"
        assert self.exit_code == 0, f"exit code {self.exit_code}: {report}"


def build(folder: Path, flavour: str) -> Path:
    """Compile the program with the headers of the package that is tested. Returns its path."""
    program = folder / f"pump_stress_{flavour}"
    headers = (PACKAGE / "kernel", PACKAGE / "dialects" / "rqueue" / "server")
    command = ["gcc", *FLAGS, *FLAVOURS[flavour], *(f"-I{header}" for header in headers)]
    command += [str(SOURCE / "pump_stress.c"), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def run(program: Path, threads: int, seconds: float, seed: int) -> Outcome:
    command = [str(program), str(threads), str(seconds), str(seed)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=seconds + GRACE_S
    )
    counts = json.loads(done.stdout) if done.stdout else {}
    return Outcome(done.returncode, counts, done.stderr)


def soak(seconds: float) -> None:
    """Run all configurations, and append them to the record of soak runs."""
    share_s = seconds / len(THREADS) / 2
    with tempfile.TemporaryDirectory() as folder:
        for flavour in ("thread", "address"):
            program = build(Path(folder), flavour)
            for threads in THREADS:
                seed = random.randrange(1 << 32)
                record = SoakRun(f"threads/pump_stress.c ({flavour}, {threads} threads)", seed)
                outcome = run(program, threads, share_s, seed)
                sys.stdout.write(f"{flavour} {json.dumps(outcome.counts)}\n")
                sys.stdout.flush()
                outcome.require_clean()
                record.record(**{name: outcome.counts[name] for name in SUMMED})


if __name__ == "__main__":
    soak(float(sys.argv[1]))
