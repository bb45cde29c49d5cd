"""The order of work: start all servers, run the cases in rounds, then the rows of our own."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack

from bench.harness.options import Options
from bench.harness.peer import Peer, Running
from bench.harness.places import Unavailable
from bench.harness.programs import DidNotStart
from bench.harness.report import Outcome
from bench.harness.results import CaseResult, Metric, Requirement
from bench.harness.rounds import Case, Effort, run_case
from bench.peers.nats import Nats
from bench.peers.polybus import Polybus
from bench.peers.redis import Redis
from bench.peers.relay import Relay
from bench.peers.zeromq import ZeroMq
from bench.rqueue import client, memory
from bench.rqueue.cases import CASES, TARGETS

MEMORY = "memory"
CASE_NAMES = tuple(case.name for case in CASES)
NAMES = (*CASE_NAMES, *client.TITLES, MEMORY)
MEMORY_S, SHORT_MEMORY_S = 60.0, 10.0
REQUIREMENTS: tuple[Requirement, ...] = (*TARGETS, *client.FLOORS)
PEERS: tuple[Peer, ...] = (Nats(), Redis(), ZeroMq(), Relay())


def run(options: Options) -> Outcome:
    ours: Peer = Polybus(options.port)
    outcome = Outcome("rqueue", options)
    if options.wants(*CASE_NAMES, *client.TITLES):
        with ExitStack() as stack:
            servers = _start(PEERS, stack) if options.wants(*CASE_NAMES) else []
            servers.append((ours, stack.enter_context(ours.start())))
            outcome.versions = {peer.name: running.version for peer, running in servers}
            effort = options.effort()
            outcome.results += run_cases(CASES, servers, options, effort)
            outcome.results += run_clients(servers[-1:], options, effort)
    for requirement in REQUIREMENTS:
        outcome.verdicts += requirement.judge(outcome.results)
    if options.wants(MEMORY):
        run_memory(ours, options, outcome)
    return outcome


def _start(peers: Sequence[Peer], stack: ExitStack) -> list[tuple[Peer, Running]]:
    servers: list[tuple[Peer, Running]] = []
    for peer in peers:
        try:
            servers.append((peer, stack.enter_context(peer.start())))
        except Unavailable as missing:
            say(f"left out: {missing}")
    return servers


def run_cases(
    cases: Sequence[Case],
    servers: Sequence[tuple[Peer, Running]],
    options: Options,
    effort: Effort,
    further: tuple[Metric, ...] = (),
) -> list[CaseResult]:
    results = []
    for case in (case for case in cases if options.wants(case.name)):
        say(f"… {case.title}")
        results.append(run_case(case, effort, servers, further))
    return results


def run_clients(
    servers: Sequence[tuple[Peer, Running]], options: Options, effort: Effort
) -> list[CaseResult]:
    results = []
    for name, title in client.TITLES.items():
        if options.wants(name):
            say(f"… {title}")
            results.append(client.run_case(name, effort, servers))
    return results


def run_memory(ours: Peer, options: Options, outcome: Outcome) -> None:
    """On a server of its own, whose memory no other case has touched."""
    say("… memory with a slow subscriber")
    seconds = SHORT_MEMORY_S if options.short else MEMORY_S
    try:
        with ours.start() as running:
            verdict, outcome.rows[MEMORY] = memory.measure(ours, running, seconds)
    except DidNotStart as error:
        verdict = memory.failed(seconds, str(error))
    outcome.verdicts.append(verdict)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
