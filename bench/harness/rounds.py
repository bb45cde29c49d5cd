"""Interleaved rounds: A B C, A B C, … so that a slow minute of the machine touches all alike.

Before the first round each server is tried with growing amounts, which warms it up and tells how
much it does in the wanted time. A measurement that others disturbed (quiet.py) is dropped and taken
again at once; repeats are bounded, and a result says how many were dropped, how many had to stay.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

from bench.harness.awake import awake
from bench.harness.load import LoadFailed, run
from bench.harness.peer import Peer, Running
from bench.harness.processes import thread_cpu_s
from bench.harness.quiet import Disturbance, Watch, wait_for_quiet
from bench.harness.results import P50, P99, RATE, SERVER_CPU, CaseResult, Metric, Round, Values
from bench.harness.workloads import Work, Workload

SETTLE_S = 0.03  # between measurements, for the server to close the connections of the one before
TRIAL_S = 0.1  # a trial this long is enough to tell the rate
GROWTH = 16  # at most, from one trial to the next


# Values beside the metrics of a case. Their names have no "cpu", by which `compare` would take them
# for figures of the server alone.
IDLE_CORES = "idle_cores"  # beside the server, the load and other processes
LOAD_CORES, LOAD_BUSIEST = "load_cores", "load_busiest_thread_cores"
BUSIEST_THREAD = Metric("busiest_thread_ns_per_message", "busiest thread ns", False)
THREAD = "thread_ns_per_message "  # and the thread's name and number

Measured = tuple[Values, Disturbance]


@dataclass(frozen=True)
class Effort:
    """How much time a run may take."""

    rounds: int
    rounds_are_fixed: bool  # also for cases that name a number themselves
    measurement_s: float
    repeats_per_case: int
    quiet_wait_s: float  # at most, before a repeat
    repeat_until_s: float  # on time.monotonic(): no repeats after this


@dataclass(frozen=True)
class Case:
    name: str
    title: str
    workload: Workload
    rounds: int | None = None  # where the target itself names a number


class Contender:
    """One server at one case."""

    def __init__(self, peer: Peer, running: Running, workload: Workload) -> None:
        self.name = peer.name
        self._pid = running.pid
        self._cpus = os.sched_getaffinity(0) | running.cpus
        self._is_latency = workload.is_latency
        self._work: Work = workload.work(peer, running)
        self._cycles = self._work.least_cycles

    def calibrate(self, wanted_s: float) -> None:
        while (took_s := run(self._work.plan, self._cycles)["seconds"]) < TRIAL_S:
            growth = min(GROWTH, 1.5 * TRIAL_S / max(took_s, 1e-6))
            self._cycles = max(self._cycles + 1, int(self._cycles * growth))
        wanted = round(self._cycles * wanted_s / took_s)
        self._cycles = max(self._work.least_cycles, wanted)

    def measure(self) -> Measured:
        time.sleep(SETTLE_S)
        threads = Threads(self._pid)
        watch = Watch(self._pid)
        outcome = run(self._work.plan, self._cycles)
        disturbance = watch.disturbance()
        messages = self._work.delivered_per_cycle * self._cycles
        values = {RATE.key: messages / outcome["seconds"]}
        if self._is_latency:
            values |= {P50.key: outcome[P50.key], P99.key: outcome[P99.key]}
        values |= _load_values(outcome)
        if self._pid is not None:
            server_s = watch.server_cpu_s()
            values[SERVER_CPU.key] = server_s / messages * 1e9
            used = (server_s + outcome["cpu_s"]) / outcome["seconds"]
            foreign = disturbance.share * (os.cpu_count() or 1)
            values[IDLE_CORES] = max(0.0, len(self._cpus) - used - foreign)
            values |= threads.values(messages)
        return values, disturbance


def _load_values(outcome: dict[str, float]) -> Values:
    """How busy the generator was, in cores, and its busiest thread where it reports that."""
    keys = {"cpu_s": LOAD_CORES, "busiest_s": LOAD_BUSIEST}
    return {keys[key]: outcome[key] / outcome["seconds"] for key in keys if key in outcome}


class Threads:
    """CPU time of a server's threads since it was created."""

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._before_s = self._now_s()

    def _now_s(self) -> dict[str, float]:
        return {} if self._pid is None else thread_cpu_s(self._pid)

    def values(self, messages: int) -> Values:
        """Per delivered message, of each thread that ran, and of the busiest."""
        used_s = {name: s - self._before_s.get(name, 0.0) for name, s in self._now_s().items()}
        values = {THREAD + name: s / messages * 1e9 for name, s in used_s.items() if s > 0}
        return values | {BUSIEST_THREAD.key: max(values.values(), default=0.0)}


class Quietly:
    """Measures until it was quiet, within the bounds of an effort, and counts the rest."""

    def __init__(self, effort: Effort) -> None:
        self._effort = effort
        self.dropped = 0
        self.disturbed_kept = 0

    def take(self, measure: Callable[[], Measured]) -> Values:
        values, disturbance = measure()
        while not disturbance.is_quiet and self._may_repeat():
            self.dropped += 1
            wait_for_quiet(self._effort.quiet_wait_s)
            values, disturbance = measure()
        self.disturbed_kept += not disturbance.is_quiet
        return values

    def _may_repeat(self) -> bool:
        in_time = time.monotonic() < self._effort.repeat_until_s
        return in_time and self.dropped < self._effort.repeats_per_case


class Contending(Protocol):
    """A participant of a case."""

    @property
    def name(self) -> str:
        """As it stands in tables."""

    def calibrate(self, wanted_s: float) -> None:
        """Warms up, and finds how much takes so long."""

    def measure(self) -> Measured:
        """What was reached, and how much others disturbed it."""


class Field:
    """Those at one case; one that fails is out of it, with the reason kept."""

    def __init__(self, case: str, contenders: Iterable[Contending]) -> None:
        self._case, self._contenders = case, list(contenders)
        self.failures: list[str] = []

    def each(self, do: Callable[[Contending], None]) -> None:
        for contender in tuple(self._contenders):
            try:
                do(contender)
            except LoadFailed as error:
                self._contenders.remove(contender)
                self.failures.append(f"{contender.name} failed at {self._case}: {error}")

    def round(self, quietly: Quietly) -> Round:
        found: Round = {}

        def measure(contender: Contending) -> None:
            found[contender.name] = quietly.take(contender.measure)

        self.each(measure)
        return found


def contest(
    line: CaseResult,
    contenders: Iterable[Contending],
    effort: Effort,
    rounds: int,
    may_go_on: Callable[[int], bool] = lambda _done: True,
) -> CaseResult:
    """All rounds of a case, whose name, title and metrics `line` has; `may_go_on` ends it early.

    What was found is said at once: a whole run takes long, and may be stopped."""
    field, quietly = Field(line.name, contenders), Quietly(effort)
    field.each(lambda contender: contender.calibrate(effort.measurement_s))
    done: list[Round] = []
    while len(done) < rounds and may_go_on(len(done)):
        done.append(field.round(quietly))
    found = replace(
        line,
        rounds=tuple(done),
        dropped=quietly.dropped,
        disturbed_kept=quietly.disturbed_kept,
        failures=tuple(field.failures),
    )
    print(found.told(), file=sys.stderr, flush=True)
    return found


def run_case(
    case: Case,
    effort: Effort,
    servers: Sequence[tuple[Peer, Running]],
    further: tuple[Metric, ...] = (),
) -> CaseResult:
    """All rounds of one case, with every server; the table also has the further metrics."""
    workload = case.workload
    contenders = [Contender(peer, running, workload) for peer, running in servers]
    own = None if effort.rounds_are_fixed else case.rounds
    metrics = (P50, P99, SERVER_CPU) if workload.is_latency else (RATE, SERVER_CPU)
    cpus = frozenset[int]().union(*(running.cpus for _, running in servers))
    with awake(cpus) if workload.is_latency else nullcontext():
        line = CaseResult(case.name, case.title, metrics + further, ())
        return contest(line, contenders, effort, own or effort.rounds)
