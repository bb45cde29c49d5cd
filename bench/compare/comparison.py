"""Figures of two checkouts, row by row, and the rule that judges them.

A row is one figure of one case: a rate, a time or CPU time per message, measured once per round in
each checkout. Round by round the new figure is divided by the old one, and the median counts. The
spread is the range of the same ratio between the old figures of neighbouring rounds, in both
directions: a median within it does not differ from a repetition. Rates and times are shown as
speed, so that more is better for both; CPU time is shown as it is, so that less is better.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from bench.harness.report import table
from bench.harness.results import OURS, digits

LEAST_SPEED = 0.95
MOST_CPU = 1.03

Figures = dict[tuple[str, str], float]  # by case and key
Round = tuple[Figures, Figures]  # old, new


@dataclass(frozen=True)
class Row:
    benchmark: str
    case: str
    key: str
    old: tuple[float, ...]  # by round
    new: tuple[float, ...]

    @property
    def is_cpu(self) -> bool:
        return "cpu" in self.key

    @property
    def ratio(self) -> float:
        return median(self._ratio(old, new) for old, new in zip(self.old, self.new, strict=True))

    @property
    def spread(self) -> tuple[float, float]:
        pairs = [*pairwise(self.old), *pairwise(reversed(self.old))]
        ratios = [self._ratio(*pair) for pair in pairs] or [1.0]
        return min(ratios), max(ratios)

    @property
    def holds(self) -> bool:
        least, most = self.spread
        if self.is_cpu:
            return self.ratio <= max(MOST_CPU, most)
        return self.ratio >= min(LEAST_SPEED, least)

    @property
    def verdict(self) -> str:
        within = self.ratio <= MOST_CPU if self.is_cpu else self.ratio >= LEAST_SPEED
        if self.holds:
            return "ok" if within else "ok, within the spread"
        return "MORE CPU" if self.is_cpu else "SLOWER"

    def _ratio(self, first: float, second: float) -> float:
        """Of the second to the first; of a time, the inverse, which is the ratio of speeds."""
        rises = self.key.endswith("_per_s") or self.is_cpu
        numerator, denominator = (second, first) if rises else (first, second)
        return numerator / denominator if denominator > 0 else 1.0

    def cells(self) -> list[str]:
        least, most = self.spread
        old, new = (digits(median(values)) for values in (self.old, self.new))
        spread = f"{least:.2f}-{most:.2f}"
        name = f"{self.benchmark} {self.case}"
        return [name, self.key, old, new, f"{self.ratio:.3f}", spread, self.verdict]

    def to_json(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "case": self.case,
            "key": self.key,
            "old": self.old,
            "new": self.new,
            "ratio": self.ratio,
            "spread": self.spread,
            "verdict": self.verdict,
        }


def figures(report: dict[str, Any]) -> Figures:
    """The rates, times and CPU times of polybus itself in the JSON report of a benchmark."""
    return {
        (case["name"], key): value
        for case in report["cases"]
        for key, value in case["medians"].get(OURS, {}).items()
        if value is not None and (key.endswith(("_per_s", "_us")) or "cpu" in key)
    }


def rows(benchmark: str, rounds: Sequence[Round]) -> list[Row]:
    """A row for each figure that both checkouts have reported, in every round that has both."""
    names = dict.fromkeys(name for old, new in rounds for name in old if name in new)
    found = []
    for case, key in names:
        pairs = [
            (old[case, key], new[case, key])
            for old, new in rounds
            if (case, key) in old and (case, key) in new
        ]
        olds, news = zip(*pairs, strict=True)
        found.append(Row(benchmark, case, key, olds, news))
    return found


def unpaired(benchmark: str, rounds: Sequence[Round]) -> list[str]:
    """Figures that only one of the checkouts has reported, which cannot be compared."""
    old = {name for one, _ in rounds for name in one}
    new = {name for _, one in rounds for name in one}
    notes = [f"{benchmark} {case} {key}: only in the old" for case, key in sorted(old - new)]
    notes += [f"{benchmark} {case} {key}: only in the new" for case, key in sorted(new - old)]
    return notes


def text(compared: Iterable[Row]) -> str:
    header = ["case", "figure", "old", "new", "new/old", "old/old", ""]
    return table([header, *(row.cells() for row in compared)])
