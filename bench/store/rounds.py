"""Rounds of contenders that measure themselves, watched for what others do meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.harness.backed import back_memory
from bench.harness.quiet import Watch
from bench.harness.results import CaseResult, Metric, Values
from bench.harness.rounds import Effort, Measured, contest
from bench.store.contract import Contender


@dataclass(frozen=True)
class Case:
    name: str
    title: str
    metrics: tuple[Metric, ...]


class Watched:
    def __init__(self, contender: Contender, writes_files: bool) -> None:
        self._contender = contender
        self._writes_files = writes_files
        self.name = contender.name

    def calibrate(self, wanted_s: float) -> None:
        self._contender.calibrate(wanted_s)

    def measure(self) -> Measured:
        if self._writes_files:
            back_memory()
        watch = Watch(self._contender.pid)
        values = self._contender.measure()
        cpu = _cpu_values(values, watch, self._contender.pid is not None)
        return cpu | values, watch.disturbance()


def _cpu_values(values: Values, watch: Watch, has_server: bool) -> Values:
    """CPU time per message, call or item: of all processes, and of the server alone."""
    rate = next((value for key, value in values.items() if key.endswith("_per_s")), None)
    if not rate:
        return {}
    count = rate * watch.elapsed_s()
    cpu = {"cpu_us_each": watch.cpu_s() / count * 1e6}
    if has_server:
        cpu["server_cpu_us_each"] = watch.server_cpu_s() / count * 1e6
    return cpu


def run_case(
    case: Case, effort: Effort, contenders: Sequence[Contender], *, writes_files: bool = True
) -> CaseResult:
    line = CaseResult(case.name, case.title, case.metrics, ())
    watched = [Watched(contender, writes_files) for contender in contenders]
    return contest(line, watched, effort, effort.rounds)
