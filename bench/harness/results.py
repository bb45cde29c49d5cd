"""What was measured, and what must hold: cases, medians, ratios, targets.

A ratio is taken within one round, where the servers were measured one after the other, and the
median of those ratios is judged. It is always "how many times better we are": ours / theirs for
rates, theirs / ours for times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

OURS = "polybus"
US_PER_MS = 1000.0


@dataclass(frozen=True)
class Metric:
    key: str
    unit: str
    higher_is_better: bool
    scale: float = 1.0  # tables show the value divided by this


RATE = Metric("messages_per_s", "M messages/s", higher_is_better=True, scale=1e6)
P50 = Metric("p50_us", "p50 µs", higher_is_better=False)
P99 = Metric("p99_us", "p99 µs", higher_is_better=False)
# Of the server with all its threads, per delivered message.
SERVER_CPU = Metric("server_cpu_ns_per_message", "CPU ns", higher_is_better=False)

Values = dict[str, float]  # by metric key
Round = dict[str, Values]  # by server


def digits(value: float) -> str:
    """Three digits that mean something: 0.451, 2.53, 62.1, 145."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


@dataclass(frozen=True)
class CaseResult:
    """One case: its kept rounds, and how many measurements others disturbed."""

    name: str
    title: str
    metrics: tuple[Metric, ...]
    rounds: tuple[Round, ...]
    dropped: int = 0
    disturbed_kept: int = 0
    failures: tuple[str, ...] = ()

    @property
    def servers(self) -> list[str]:
        return sorted({server for one in self.rounds for server in one})

    def median(self, server: str, key: str) -> float | None:
        values = [one[server][key] for one in self.rounds if key in one.get(server, {})]
        return median(values) if values else None

    def ratio(self, metric: Metric, against: Sequence[str]) -> float | None:
        """Our median ratio to the best of the named servers, round by round."""
        ratios = [_ratio(one, metric, against) for one in self.rounds]
        known = [ratio for ratio in ratios if ratio is not None]
        return median(known) if known else None

    def told(self) -> str:
        """In one line a server, each metric as it stands in tables."""
        return "\n".join(f"    {server}: {self._figures(server)}" for server in self.servers)

    def _figures(self, server: str) -> str:
        found = [(metric, self.median(server, metric.key)) for metric in self.metrics]
        ratios = [self.ratio(metric, (server,)) for metric in self.metrics if server != OURS]
        figures = [
            f"{digits(v / metric.scale)} {metric.unit}" for metric, v in found if v is not None
        ]
        against = [f"{ratio:.2f}×" for ratio in ratios if ratio is not None]
        return ", ".join(figures) + (f" ({', '.join(against)})" if against else "")

    def to_json(self) -> dict[str, Any]:
        keys = sorted({key for one in self.rounds for values in one.values() for key in values})
        medians = {s: {key: self.median(s, key) for key in keys} for s in self.servers}
        return {
            "name": self.name,
            "title": self.title,
            "medians": medians,
            "rounds": list(self.rounds),
            "dropped": self.dropped,
            "disturbed_kept": self.disturbed_kept,
            "failures": list(self.failures),
        }


def _ratio(one: Round, metric: Metric, against: Sequence[str]) -> float | None:
    theirs = [one[server][metric.key] for server in against if metric.key in one.get(server, {})]
    ours = one.get(OURS, {}).get(metric.key)
    if not ours or len(theirs) < len(against):
        return None
    return ours / max(theirs) if metric.higher_is_better else min(theirs) / ours


@dataclass(frozen=True)
class Verdict:
    """Something that must hold, and what was reached; None is: could not be measured."""

    text: str
    wanted: str
    reached: float | None
    holds: bool
    is_judged: bool = True  # False: a condition of the target was not met, which `wanted` says


class Requirement(Protocol):
    def judge(self, results: Sequence[CaseResult]) -> list[Verdict]:
        """What it says of these results; nothing when its case was not run."""


@dataclass(frozen=True)
class Floor:
    """Our own median is at least this, whatever others do."""

    case: str
    metric: Metric
    at_least: float

    def judge(self, results: Sequence[CaseResult]) -> list[Verdict]:
        ran = [result for result in results if result.name == self.case]
        return [self._verdict(result) for result in ran]

    def _verdict(self, result: CaseResult) -> Verdict:
        reached = result.median(OURS, self.metric.key)
        holds = reached is not None and reached >= self.at_least
        text = f"{result.title}: {self.metric.unit}"
        shown = None if reached is None else reached / self.metric.scale
        return Verdict(text, f"at least {self.at_least / self.metric.scale:g}", shown, holds)


@dataclass(frozen=True)
class Ceiling:
    """Our own median of a time is at most so long; behind it, so many times that of `peer`."""

    case: str
    metric: Metric
    at_most_us: float
    peer: str = ""
    times_peer: float = 0.0

    def judge(self, results: Sequence[CaseResult]) -> list[Verdict]:
        return [self._verdict(result) for result in results if result.name == self.case]

    def _verdict(self, result: CaseResult) -> Verdict:
        reached = result.median(OURS, self.metric.key)
        peer_us = result.median(self.peer, self.metric.key) or 0.0
        allowed_us = self.at_most_us + self.times_peer * peer_us
        of_peer = f" + {self.times_peer:g} × {self.peer}'s {peer_us / US_PER_MS:.3g}"
        wanted = f"at most {self.at_most_us / US_PER_MS:g}" + (of_peer if self.peer else "")
        shown = None if reached is None else reached / US_PER_MS
        text = f"{result.title}: {self.metric.key.removesuffix('_us')} ms"
        return Verdict(text, wanted, shown, reached is not None and reached <= allowed_us)


@dataclass(frozen=True)
class Target:
    """Our ratio to the best of `against` is at least this."""

    case: str
    metric: Metric
    against: tuple[str, ...]
    at_least: float

    def judge(self, results: Sequence[CaseResult]) -> list[Verdict]:
        """Without a peer to compare with, it does not hold."""
        ran = [result for result in results if result.name == self.case]
        return [self._verdict(result) for result in ran]

    def _verdict(self, result: CaseResult) -> Verdict:
        reached = result.ratio(self.metric, self.against)
        holds = reached is not None and reached >= self.at_least
        return Verdict(self._text(result), f"at least {self.at_least:g}", reached, holds)

    def _text(self, result: CaseResult) -> str:
        others = self.against[0]
        if len(self.against) > 1:
            others = "the best of " + ", ".join(self.against)
        what = f", {self.metric.unit}" if len(result.metrics) > 1 else ""
        return f"{result.title}{what}: times {others}"
