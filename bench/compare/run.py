"""`python -m bench compare REF [--only NAME …] [--rounds N] [--json FILE]`.

Each benchmark runs in its short form, old and new in turn, for every round. Each checkout drives
its own product by its own bench code; only the command line and the JSON report are shared. The
exit code is 1 if a row is slower or needs more CPU time (comparison.py), and 2 if a run has failed.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.compare import checkout
from bench.compare.checkout import Checkout, CheckoutFailed
from bench.compare.comparison import Figures, Round, Row, figures, rows, text, unpaired
from bench.harness.quiet import busy_processes
from bench.harness.report import machine

BENCHMARKS = ("rqueue", "freud", "store", "native", "fdq", "gsb", "pirate", "spark", "pipelines")
ROUNDS = 7  # fewer are no ground for a verdict
RUN_TIMEOUT_S = 900.0
SLOWER, FAILED = 1, 2  # exit codes


class RunFailed(Exception):
    """A benchmark ended with an error; the text names its log."""


@dataclass
class Comparison:
    old: Checkout
    new: Checkout
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    disturbed: int = 0  # runs before which other processes were busy

    def measure(self, benchmark: str, cases: Sequence[str], rounds: int) -> None:
        measured: list[Round] = []
        for number in range(1, rounds + 1):
            try:
                pair = tuple(self._run(one, benchmark, cases) for one in (self.old, self.new))
            except RunFailed as error:
                self.failures.append(str(error))
                _say(f"bench: {error}")
                continue
            measured.append((pair[0], pair[1]))
            _say(f"{benchmark}: round {number} of {rounds}")
        found = rows(benchmark, measured)
        self.rows += found
        self.notes += unpaired(benchmark, measured)
        if found:
            _say(text(found))

    def _run(self, one: Checkout, benchmark: str, cases: Sequence[str]) -> Figures:
        if busy := busy_processes():
            self.disturbed += 1
            _say(f"bench: other processes are busy: {', '.join(busy)}")
        output = one.folder / "build" / "bench"
        output.mkdir(parents=True, exist_ok=True)
        report, log = output / "compare.json", output / f"compare-{benchmark}.log"
        report.unlink(missing_ok=True)
        command = [str(one.python), "-m", "bench", benchmark, "--short", "--output", str(report)]
        command += [part for case in cases for part in ("--only", case)]
        with log.open("wb") as lines:
            try:
                ended = subprocess.run(
                    command,
                    cwd=one.folder,
                    env=one.environment(),
                    stdout=lines,
                    stderr=lines,
                    timeout=RUN_TIMEOUT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise RunFailed(f"{benchmark} of {one.label}: {error}; see {log}") from None
        if ended.returncode or not report.exists():
            code = ended.returncode
            raise RunFailed(f"{benchmark} of {one.label}: exit code {code}; see {log}")
        return figures(json.loads(report.read_text()))

    def exit_code(self) -> int:
        if self.failures:
            return FAILED
        return 0 if all(row.holds for row in self.rows) else SLOWER

    def summary(self, rounds: int) -> str:
        lines = [text(self.rows), "", *self.notes, *self.failures]
        if self.disturbed:
            lines.append(f"other processes were busy before {self.disturbed} runs")
        if rounds < ROUNDS:
            lines.append(f"{rounds} rounds are too few for a verdict; take at least {ROUNDS}")
        missed = sum(not row.holds for row in self.rows)
        lines.append(f"{missed} of {len(self.rows)} rows missed")
        return "\n".join(lines)

    def write(self, path: Path, rounds: int) -> None:
        content = {
            "old": self.old.label,
            "new": self.new.label,
            "rounds": rounds,
            "machine": machine(),
            "disturbed_runs": self.disturbed,
            "rows": [row.to_json() for row in self.rows],
            "notes": self.notes,
            "failures": self.failures,
        }
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench compare", description="Measure two checkouts in turn."
    )
    parser.add_argument("ref", metavar="REF", help="the old commit")
    parser.add_argument("--new", metavar="REF", help="the new commit; default: the working tree")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="a benchmark, or BENCHMARK:CASE for one of its cases; repeatable",
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="%(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round to FILE")
    chosen = parser.parse_args(arguments)
    unknown = {name.partition(":")[0] for name in chosen.only} - set(BENCHMARKS)
    if unknown:
        known = ", ".join(BENCHMARKS)
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {known}")
    if chosen.rounds < 2:
        parser.error(f"--rounds must be at least 2, got {chosen.rounds}")
    return chosen


def _cases(only: Sequence[str]) -> dict[str, list[str]]:
    """The cases to run by benchmark; an empty list is all of them."""
    if not only:
        return {name: [] for name in BENCHMARKS}
    cases: dict[str, list[str]] = {}
    for name in only:
        benchmark, _, case = name.partition(":")
        cases.setdefault(benchmark, []).extend([case] if case else [])
    return cases


def main(arguments: Sequence[str]) -> int:
    chosen = _parse(arguments)
    try:
        old = checkout.of_commit(chosen.ref)
        new = checkout.of_commit(chosen.new) if chosen.new else checkout.working_tree()
    except CheckoutFailed as error:
        _say(f"bench: {error}")
        return FAILED
    comparison = Comparison(old, new)
    print(f"old is {old.label}, new is {new.label}\n", flush=True)
    for benchmark, cases in _cases(chosen.only).items():
        comparison.measure(benchmark, cases, chosen.rounds)
        if chosen.json:  # after each benchmark, because a whole comparison takes an hour or more
            comparison.write(chosen.json, chosen.rounds)
    print(comparison.summary(chosen.rounds))
    return comparison.exit_code()
