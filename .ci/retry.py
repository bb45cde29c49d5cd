"""Run the tests that failed in the last run three more times; all three must pass.

A machine that stands still for a while can starve a live test. A race fails again within
three runs, or is reported: each test that failed and then passed is printed as FLAKY, with
the seed that its failure printed. Known ones stand in tests/flaky.txt, with reason and date.

    .ci/retry.py LOG [pytest arguments]     LOG has the output of the run that failed
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAST_FAILED = ROOT / ".venv" / ".pytest_cache" / "v" / "cache" / "lastfailed"
KNOWN = ROOT / "tests" / "flaky.txt"
RUNS = 3
# A test of faults prints its seed, Hypothesis the blob that repeats an example.
SEED = re.compile(r"seed[ =:]+(\d+)|@reproduce_failure\(([^)]*)\)")


def known_tests() -> set[str]:
    lines = (line.partition("#")[0].strip() for line in KNOWN.read_text().splitlines())
    return {line for line in lines if line}


def seed_of(test: str, output: str) -> str:
    """Return the first seed in the report of the test."""
    name = test.rpartition("::")[2].partition("[")[0]
    report = output.partition(f" {name}")[2]
    match = SEED.search(report)
    return next(filter(None, match.groups())) if match else "none printed"


def main(log: Path, arguments: list[str]) -> int:
    output = log.read_text(errors="replace")
    failed = sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    if not failed:
        sys.stderr.write("polybus: pytest failed without a failed test\n")
        return 1
    # The log lists the sampled sabotages. Their names end in the one of the sabotage, in brackets,
    # which `--sabotage` adds to a test.
    sampled = {test for test in failed if f"sabotage {test}\n" in output}
    sabotaged = sorted({test.rpartition("[")[0] for test in sampled})
    plain = [test for test in failed if test not in sampled]
    for options, tests in ((["--sabotage"], sabotaged), ([], plain)):
        command = [sys.executable, "-m", "pytest", "-q", *arguments, *options, *tests]
        for _ in range(RUNS if tests else 0):
            if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
                return code
    for test in failed:
        known = ", known" if test in known_tests() else ""
        sys.stdout.write(f"FLAKY {test} (seed: {seed_of(test, output)}{known})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
