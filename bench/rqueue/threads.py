"""`python -m bench rqueue --threads N`: polybus with N threads beside polybus with one.

Both servers run at the same time and are measured in turn, in every row of the benchmark and in
rows of pairs: publishers that each have a topic and a subscriber of their own, so that threads
have work that does not meet. "polybus" in the table is the server with N threads.

The targets:
  - in every row at least 0.9 of one thread's throughput, for at most 1.4 of its CPU time a message
  - in the rows of pairs at least 1.3 of its throughput, if the load leaves 40 % of a core idle
    beside the server with one thread; else there is no core that a second thread could use
  - in the rows of pairs the busiest thread uses at most 0.75 of the server's CPU time, and at most
    0.75 of what one thread uses a message: its inverse is what more cores would bring
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median

from bench.harness.options import Options
from bench.harness.peer import Peer, Running
from bench.harness.programs import Refused
from bench.harness.report import Outcome
from bench.harness.results import (
    OURS,
    RATE,
    SERVER_CPU,
    CaseResult,
    Metric,
    Requirement,
    Target,
    Verdict,
)
from bench.harness.rounds import BUSIEST_THREAD, IDLE_CORES, LOAD_CORES, Case
from bench.harness.workloads import Pairs
from bench.peers.polybus import Polybus
from bench.rqueue import client
from bench.rqueue import run as rqueue
from bench.rqueue.cases import CASES, NEAR_ONE_ROUNDS

ONE_THREAD = "polybus, 1 thread"
LEAST_RATE = 0.9
LEAST_RATE_OF_PAIRS, NEEDED_IDLE_CORES = 1.3, 0.4
MOST_CPU = 1.4
MOST_OF_BUSIEST = 0.75

PAIRS = (
    Case("4-pairs", "4 → 4 on 4 topics, 16 B", Pairs(4, 16), NEAR_ONE_ROUNDS),
    Case("4-pairs-128", "4 → 4 on 4 topics, 128 B", Pairs(4, 128), NEAR_ONE_ROUNDS),
)
ROWS = (*(case.name for case in (*CASES, *PAIRS)), *client.TITLES)
NAMES = (*ROWS, rqueue.MEMORY)


@dataclass(frozen=True)
class MostOf:
    """A cost of `OURS` divided by a cost of `server` in the same round is at most this."""

    case: str
    text: str
    cost: Metric
    server: str
    of_cost: Metric
    at_most: float

    def judge(self, results: Sequence[CaseResult]) -> list[Verdict]:
        return [self._verdict(result) for result in results if result.name == self.case]

    def _verdict(self, result: CaseResult) -> Verdict:
        pairs = [
            (one.get(OURS, {}).get(self.cost.key), one.get(self.server, {}).get(self.of_cost.key))
            for one in result.rounds
        ]
        ratios = [ours / theirs for ours, theirs in pairs if ours is not None and theirs]
        reached = median(ratios) if ratios else None
        holds = reached is not None and reached <= self.at_most
        return Verdict(f"{result.title}: {self.text}", f"at most {self.at_most:g}", reached, holds)


@dataclass(frozen=True)
class IfIdle:
    """A target that is judged only if the load leaves so much idle beside the server `server`."""

    target: Target
    server: str
    idle_cores: float

    def judge(self, results: Sequence[CaseResult]) -> list[Verdict]:
        ran = [result for result in results if result.name == self.target.case]
        return [self._verdict(result) for result in ran]

    def _verdict(self, result: CaseResult) -> Verdict:
        (verdict,) = self.target.judge([result])
        idle = result.median(self.server, IDLE_CORES)
        load = result.median(self.server, LOAD_CORES) or 0.0
        if idle is None:
            return verdict
        left = f"{idle:.0%} of a core idle, the load uses {load:.0%}"
        if idle >= self.idle_cores:
            return replace(verdict, wanted=f"{verdict.wanted} ({left})")
        wanted = f"{verdict.wanted} with {self.idle_cores:.0%} of a core idle: {left}"
        return replace(verdict, wanted=wanted, holds=True, is_judged=False)


def _requirements() -> list[Requirement]:
    one = (ONE_THREAD,)
    found: list[Requirement] = [Target(row, RATE, one, LEAST_RATE) for row in ROWS]
    for case in PAIRS:
        target = Target(case.name, RATE, one, LEAST_RATE_OF_PAIRS)
        found.append(IfIdle(target, ONE_THREAD, NEEDED_IDLE_CORES))
    text = "CPU a message, of one thread's"
    found += [MostOf(row, text, SERVER_CPU, ONE_THREAD, SERVER_CPU, MOST_CPU) for row in ROWS]
    shares = (("of one thread's", ONE_THREAD), ("of the server's", OURS))
    for case in PAIRS:
        for whose, server in shares:
            text = f"CPU a message of the busiest thread, {whose}"
            limit = MostOf(case.name, text, BUSIEST_THREAD, server, SERVER_CPU, MOST_OF_BUSIEST)
            found.append(limit)
    return found


def run(options: Options) -> Outcome:
    assert options.threads is not None
    outcome = Outcome("rqueue-threads", options)
    one = Polybus(name=ONE_THREAD, threads=1, cpus=options.server_cpus)
    ours = Polybus(threads=options.threads, cpus=options.server_cpus)
    try:
        if options.wants(*ROWS):
            with ExitStack() as stack:
                running = stack.enter_context(ours.start())  # first, since it may refuse
                servers = [(one, stack.enter_context(one.start())), (ours, running)]
                outcome.versions = {one.name: "", ours.name: f"{ours.threads} threads"}
                _measure(servers, options, outcome)
        if options.wants(rqueue.MEMORY):
            rqueue.run_memory(ours, options, outcome)
    except Refused as refused:
        text = f"polybus serves with {options.threads} threads"
        rqueue.say(f"left out: {text}: {refused}")
        outcome.verdicts.append(Verdict(text, "yes", None, holds=False))
    return outcome


def _measure(servers: Sequence[tuple[Peer, Running]], options: Options, outcome: Outcome) -> None:
    effort = options.effort()
    cases = (*CASES, *PAIRS)
    outcome.results += rqueue.run_cases(cases, servers, options, effort, (BUSIEST_THREAD,))
    outcome.results += rqueue.run_clients(servers, options, effort)
    for requirement in _requirements():
        outcome.verdicts += requirement.judge(outcome.results)
