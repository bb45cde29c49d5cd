"""Interleaved rounds of contenders, as bench/harness/rounds.py has them for servers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.harness.load import LoadFailed
from bench.harness.quiet import Watch
from bench.harness.results import CaseResult, Metric, Round
from bench.harness.rounds import Effort, Measured, Quietly
from bench.store.contract import Contender


@dataclass(frozen=True)
class Case:
    name: str
    title: str
    metrics: tuple[Metric, ...]


class Field:
    """The contenders at one case; one that fails is out of it, with the reason kept."""

    def __init__(self, case: Case, contenders: Sequence[Contender]) -> None:
        self._case, self._contenders = case, list(contenders)
        self.failures: list[str] = []

    def each(self, do: Callable[[Contender], None]) -> None:
        for contender in tuple(self._contenders):
            try:
                do(contender)
            except LoadFailed as error:
                self._contenders.remove(contender)
                self.failures.append(f"{contender.name} failed at {self._case.name}: {error}")

    def round(self, quietly: Quietly) -> Round:
        found: Round = {}

        def measure(contender: Contender) -> None:
            found[contender.name] = quietly.take(lambda: _watched(contender))

        self.each(measure)
        return found


def _watched(contender: Contender) -> Measured:
    watch = Watch(contender.pid)
    values = contender.measure()
    return values, watch.disturbance()


def run_case(case: Case, effort: Effort, contenders: Sequence[Contender]) -> CaseResult:
    field, quietly = Field(case, contenders), Quietly(effort)
    field.each(lambda contender: contender.calibrate(effort.measurement_s))
    rounds = tuple(field.round(quietly) for _ in range(effort.rounds))
    return CaseResult(
        case.name,
        case.title,
        case.metrics,
        rounds,
        quietly.dropped,
        quietly.disturbed_kept,
        tuple(field.failures),
    )
