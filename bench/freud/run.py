"""The order of work: start all servers, then run the cases in rounds."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from bench.freud.cases import CASES, REQUIREMENTS
from bench.freud.contract import Peer, Running
from bench.freud.rounds import Case, rounds_of, run_case
from bench.harness.options import Options
from bench.harness.places import Unavailable
from bench.harness.programs import DidNotStart
from bench.harness.report import Outcome
from bench.harness.rounds import Effort
from bench.peers.dbus_broker import DbusBroker
from bench.peers.dbus_daemon import DbusDaemon
from bench.peers.echo import Echo
from bench.peers.freud import Freud

NAMES = tuple(case.shape for case in CASES)
OTHERS: tuple[Peer, ...] = (Echo(), DbusDaemon(), DbusBroker())
# All short forms together take under three minutes, and this one 40 s: starting takes some of it.
SHORT_S = 30.0

Servers = Sequence[tuple[Peer, Running]]


def run(options: Options) -> Outcome:
    outcome = Outcome("freud", options)
    wanted = [case for case in CASES if options.wants(case.shape)]
    shapes = frozenset(case.shape for case in wanted)
    with ExitStack() as stack:
        servers = list(_start_others(shapes, stack, outcome.versions))
        ours: Peer = Freud()
        servers.append((ours, stack.enter_context(ours.start())))
        outcome.versions[ours.name] = servers[-1][1].version
        for case, effort in _efforts(wanted, options, servers):
            _say(f"… {case.title}")
            outcome.results.append(run_case(case, effort, servers))
    for requirement in REQUIREMENTS:
        outcome.verdicts += requirement.judge(outcome.results)
    return outcome


def _start_others(
    shapes: frozenset[str], stack: ExitStack, versions: dict[str, str]
) -> Iterator[tuple[Peer, Running]]:
    """One that is not there keeps its column, with the reason in place of its version."""
    for peer in (peer for peer in OTHERS if peer.shapes & shapes):
        try:
            running = stack.enter_context(peer.start())
        except (Unavailable, DidNotStart) as missing:
            versions[peer.name] = f"left out: {missing}"
            _say(versions[peer.name])
        else:
            versions[peer.name] = running.version
            yield peer, running


def _efforts(
    cases: Sequence[Case], options: Options, servers: Servers
) -> Iterator[tuple[Case, Effort]]:
    """In the short form, each case gets its share of the time that is left when it begins."""
    effort = options.effort()
    until_s = time.monotonic() + SHORT_S if options.short else effort.repeat_until_s
    for at, case in enumerate(cases):
        weights = [_measurements(one, effort, servers) for one in cases[at:]]
        left_s = max(0.0, until_s - time.monotonic())
        share_s = left_s * weights[0] / sum(weights)
        yield case, replace(effort, repeat_until_s=time.monotonic() + share_s)


def _measurements(case: Case, effort: Effort, servers: Servers) -> int:
    taking_part = sum(case.shape in peer.shapes for peer, _ in servers)
    return taking_part * rounds_of(case, effort)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
