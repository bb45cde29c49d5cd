"""Rounds of dialogues (bench/harness/rounds.py): each measurement has fresh connections.

A case whose time is over makes do with fewer rounds, so that a run on a busy machine ends in
time, too.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from bench.freud.contract import Peer, Running
from bench.freud.dialogues import WARMUP_TURNS, run
from bench.harness.awake import awake
from bench.harness.quiet import Watch
from bench.harness.results import P50, CaseResult, Metric, Values
from bench.harness.rounds import GROWTH, SETTLE_S, TRIAL_S, Effort, Measured, contest

LEAST = WARMUP_TURNS + 1000  # turns or messages; a 99th percentile needs many
LEAST_ROUNDS = 3  # the least that have a median


@dataclass(frozen=True)
class Case:
    """One line of the table: a shape of load and its figures."""

    shape: str
    title: str
    metrics: tuple[Metric, ...]
    values: Callable[[dict[str, float]], Values]  # from what the client in C says
    rounds: int | None = None  # where the target needs a number of its own

    @property
    def is_latency(self) -> bool:
        return P50 in self.metrics


class Contender:
    """One server at one case."""

    def __init__(self, peer: Peer, running: Running, case: Case) -> None:
        self.name = peer.name
        self._running = running
        self._case = case
        self._count = LEAST

    def _run(self) -> dict[str, float]:
        with self._running.dialogue(self._case.shape) as dialogue:
            return run(dialogue, self._count)

    def calibrate(self, wanted_s: float) -> None:
        """Tries growing counts, which warms the server up, and finds what takes the wanted time."""
        while (took_s := self._run()["seconds"]) < TRIAL_S:
            growth = min(GROWTH, 1.5 * TRIAL_S / max(took_s, 1e-6))
            self._count = int(self._count * max(growth, 1.1))
        self._count = max(LEAST, round(self._count * wanted_s / took_s))

    def measure(self) -> Measured:
        time.sleep(SETTLE_S)
        watch = Watch(self._running.pid)
        outcome = self._run()
        disturbance = watch.disturbance()
        values = {"server_cpu_us_each": watch.server_cpu_s() / self._count * 1e6}
        return values | self._case.values(outcome), disturbance


def rounds_of(case: Case, effort: Effort) -> int:
    own = None if effort.rounds_are_fixed else case.rounds
    return own or effort.rounds


def _may_go_on(done: int, effort: Effort) -> bool:
    in_time = time.monotonic() < effort.repeat_until_s
    return in_time or effort.rounds_are_fixed or done < LEAST_ROUNDS


def run_case(case: Case, effort: Effort, servers: Sequence[tuple[Peer, Running]]) -> CaseResult:
    """All rounds of one case, with every server that can do it."""
    fitting = [(peer, running) for peer, running in servers if case.shape in peer.shapes]
    contenders = [Contender(peer, running, case) for peer, running in fitting]
    line = CaseResult(case.shape, case.title, case.metrics, ())
    with awake() if case.is_latency else nullcontext():
        return contest(
            line,
            contenders,
            effort,
            rounds_of(case, effort),
            lambda done: _may_go_on(done, effort),
        )
