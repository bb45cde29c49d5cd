"""`python -m bench rqueue --threads-table`: CPU time by thread at 1, 2, 4 and 8 threads.

One server for each number of threads; all run at the same time and are measured in turn. There are
eight pairs of a publisher and a subscriber, so that each of eight threads can have a publisher. On
a machine with few cores the rate cannot rise with the threads. CPU time a message can be measured
all the same, and the busiest thread's is what limits the rate where each thread has a core.
"""

from collections import Counter
from contextlib import ExitStack

from bench.harness.options import Options
from bench.harness.peer import Peer, Running
from bench.harness.programs import Refused
from bench.harness.report import Outcome, table
from bench.harness.results import RATE, SERVER_CPU, CaseResult, digits
from bench.harness.rounds import BUSIEST_THREAD, LOAD_BUSIEST, LOAD_CORES, THREAD, Case
from bench.harness.workloads import Pairs
from bench.peers.polybus import Polybus
from bench.rqueue import run as rqueue

COUNTS = (1, 2, 4, 8)
CASES = (
    Case("8-pairs", "8 → 8 on 8 topics, 16 B", Pairs(8, 16)),
    Case("8-pairs-128", "8 → 8 on 8 topics, 128 B", Pairs(8, 128)),
)
NAMES = tuple(case.name for case in CASES)
SHOWN_SHARE = 0.01  # of the server's CPU time; threads with less are left out
HEADER = (
    "server",
    "M messages/s",
    "load, cores",
    "its busiest thread",
    "CPU ns",
    "of one thread's",
    "busiest thread ns",
    "its share",
    "M messages/s with a core each",
    "of one thread's",
    "share by thread",
)


def run(options: Options) -> Outcome:
    outcome = Outcome("rqueue-threads-table", options)
    with ExitStack() as stack:
        servers = _start(options, stack)
        outcome.versions = {peer.name: "" for peer, _ in servers}
        effort = options.effort()
        outcome.results += rqueue.run_cases(CASES, servers, options, effort)
    outcome.tables += [_table(result, list(outcome.versions)) for result in outcome.results]
    return outcome


def _start(options: Options, stack: ExitStack) -> list[tuple[Peer, Running]]:
    servers: list[tuple[Peer, Running]] = []
    for count in COUNTS:
        peer = Polybus(name=_name(count), threads=count, cpus=options.server_cpus)
        try:
            servers.append((peer, stack.enter_context(peer.start())))
        except Refused as refused:
            rqueue.say(f"left out: {_name(count)}: {refused}")
    return servers


def _name(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _table(result: CaseResult, servers: list[str]) -> str:
    rows = [table_row(result, server, servers[0]) for server in servers if server in result.servers]
    return f"{result.title}, by threads of the server\n\n{table([HEADER, *rows])}"


def table_row(result: CaseResult, server: str, one: str) -> tuple[str, ...]:
    def median(key: str, of: str = server) -> float:
        return result.median(of, key) or 0.0

    cpu, busiest = median(SERVER_CPU.key), median(BUSIEST_THREAD.key)
    alone = 1e9 / busiest if busiest else 0.0  # messages/s of the busiest thread on its own core
    return (
        server,
        digits(median(RATE.key) / RATE.scale),
        digits(median(LOAD_CORES)),
        digits(median(LOAD_BUSIEST)),
        digits(cpu),
        _times(cpu, median(SERVER_CPU.key, one)),
        digits(busiest),
        f"{busiest / cpu:.0%}" if cpu else "–",
        digits(alone / RATE.scale),
        _times(median(BUSIEST_THREAD.key, one), busiest),
        _shares(result, server),
    )


def _times(numerator: float, denominator: float) -> str:
    return f"{numerator / denominator:.2f}×" if denominator else "–"


def _shares(result: CaseResult, server: str) -> str:
    """Each thread's share of the server's CPU time, the largest first."""
    keys = {key for one in result.rounds for key in one.get(server, {}) if key.startswith(THREAD)}
    ns = {key: result.median(server, key) or 0.0 for key in keys}
    names = {key: key.removeprefix(THREAD).rpartition(" ")[0] for key in keys}
    often, total = Counter(names.values()), sum(ns.values())
    # A name that several threads have is shown with the thread's number.
    shown = {key: names[key] if often[names[key]] == 1 else key.removeprefix(THREAD) for key in ns}
    largest = sorted(ns, key=lambda key: (-ns[key], key))
    return ", ".join(
        f"{shown[key]} {ns[key] / total:.0%}" for key in largest if ns[key] >= SHOWN_SHARE * total
    )
