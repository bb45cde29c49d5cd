"""The outcome of a run: tables for people (Markdown, aligned), JSON for machines."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.harness.options import Options
from bench.harness.results import OURS, CaseResult, Metric, Verdict, digits


def machine() -> dict[str, Any]:
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _cell(result: CaseResult, server: str, metrics: Sequence[Metric]) -> str:
    texts = []
    for metric in metrics:
        value = result.median(server, metric.key)
        if value is not None:
            texts.append(digits(value / metric.scale))
    return " / ".join(texts) or "–"


def _unit(result: CaseResult) -> str:
    return " / ".join(metric.unit for metric in result.metrics)


def _times(result: CaseResult, against: str) -> str:
    ratios = [result.ratio(metric, (against,)) for metric in result.metrics]
    return " / ".join(f"{ratio:.2f}×" for ratio in ratios if ratio is not None) or "–"


def table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


@dataclass
class Outcome:
    """What a benchmark found; filled as it goes."""

    benchmark: str
    options: Options
    versions: dict[str, str] = field(default_factory=dict)  # by server, in the order of the columns
    results: list[CaseResult] = field(default_factory=list)
    rows: dict[str, dict[str, float]] = field(default_factory=dict)  # figures of our server alone
    tables: list[str] = field(default_factory=list)  # of the benchmark's own
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return all(verdict.holds for verdict in self.verdicts)

    @property
    def failures(self) -> list[str]:
        """Servers that broke a connection or did not deliver exactly what was sent."""
        return [failure for result in self.results for failure in result.failures]

    def text(self) -> str:
        parts = [_figures(self.results, list(self.versions)), _quietness(self.results)]
        parts += [f"{row}: {_pairs(figures)}" for row, figures in self.rows.items()]
        shown = parts if self.results else parts[2:]
        judged = [self._judged()] if self.verdicts else []
        return "\n\n".join([*shown, *self.tables, *self.failures, *judged])

    def _judged(self) -> str:
        rows = [["target", "wanted", "reached", ""]]
        for verdict in self.verdicts:
            reached = "not measured" if verdict.reached is None else digits(verdict.reached)
            rows.append([verdict.text, verdict.wanted, reached, _held(verdict)])
        return table(rows)

    def write(self) -> None:
        """Writes the JSON file: every round of every case, so that others can judge again."""
        content = {
            "benchmark": self.benchmark,
            "form": "short" if self.options.short else "long",
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": self.versions,
            "cases": [result.to_json() for result in self.results],
            "rows": self.rows,
            "targets": [asdict(verdict) for verdict in self.verdicts],
        }
        self.options.output.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=1, ensure_ascii=False)
        self.options.output.write_text(text + "\n")


def _held(verdict: Verdict) -> str:
    if not verdict.is_judged:
        return "not judged"
    return "ok" if verdict.holds else "MISSED"


def _figures(results: Sequence[CaseResult], servers: Sequence[str]) -> str:
    """One line a case: the median of each server, and how many times better we are."""
    others = [server for server in servers if server != OURS] if OURS in servers else []
    rows = [["case", "unit", *servers, *(f"to {other}" for other in others)]]
    for result in results:
        cells = [_cell(result, server, result.metrics) for server in servers]
        times = [_times(result, other) for other in others]
        rows.append([result.title, _unit(result), *cells, *times])
    return table(rows)


def _quietness(results: Sequence[CaseResult]) -> str:
    dropped = sum(result.dropped for result in results)
    kept = sum(result.disturbed_kept for result in results)
    text = f"{dropped} measurements disturbed by other processes were dropped and taken again"
    return f"{text}; {kept} disturbed ones had to stay" if kept else text


def _pairs(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {digits(value)}" for name, value in figures.items())
