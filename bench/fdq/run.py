"""The order of work: the bus, the peers, then the cases in rounds."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench.fdq.cases import (
    BATCH_MESSAGES,
    BATCHES,
    CASES,
    DISK,
    LATENCY,
    PEERS_MANY,
    PLAIN,
    PROCESSES,
    PRODUCE,
    REQUIREMENTS,
    SINGLES,
    WAITING,
    WINDOW,
)
from bench.fdq.contenders import Alone, Better, EndToEnd, Produce, native_url
from bench.fdq.disk import Disk
from bench.fdq.settled import PlainRead, Settled
from bench.harness.crew import Crew, crew
from bench.harness.options import Options
from bench.harness.places import Unavailable, installed
from bench.harness.programs import DidNotStart
from bench.harness.report import Outcome
from bench.native.contenders import OURS, Bus, bus
from bench.peers.jetstream import JetStream
from bench.peers.redis_streams import RedisStreams
from bench.store.contract import Contender, LogPeer, RunningLog
from bench.store.rounds import Case, run_case
from bench.store.run import data_folder
from bench.store.writing import Server
from polybus import __version__

NAMES = tuple(case.name for case in CASES)
PEERS: tuple[LogPeer, ...] = (JetStream(), RedisStreams())
MESSAGES, SHORT_MESSAGES = 2_000_000, 1_000_000  # that a group reads by batches, at once
SINGLE_MESSAGES, SHORT_SINGLE_MESSAGES = 500_000, 200_000
SHORT_REPEATS_S = 8.0

Logs = dict[str, RunningLog]


def run(options: Options) -> Outcome:
    outcome = Outcome("fdq", options)
    effort = options.effort()
    if options.short:
        effort = replace(effort, repeat_until_s=time.monotonic() + SHORT_REPEATS_S)
    with data_folder() as folder, ExitStack() as stack:
        polybus = str(installed("polybus", "make setup"))
        data = ("serve", "--data", str(folder / "data"))
        ours = stack.enter_context(bus("fdq", folder, polybus, *data))
        logs = dict(_start(folder, stack)) if options.wants(PRODUCE.name, WAITING.name) else {}
        outcome.versions = {name: log.version for name, log in logs.items()}
        outcome.versions |= {PLAIN: "", DISK: "", OURS: __version__}
        for case in (case for case in CASES if options.wants(case.name)):
            print(f"… {case.title}", file=sys.stderr, flush=True)
            with ExitStack() as during:
                contenders = _contenders(case, ours, folder, logs, options, during)
                # Latency writes a megabyte: it needs no memory, and would feel what the kernel
                # and the host do with a gigabyte that was given back a moment ago.
                writes = case is not LATENCY
                result = run_case(case, effort, contenders, writes_files=writes)
                outcome.results.append(result)
    for requirement in REQUIREMENTS:
        outcome.verdicts += requirement.judge(outcome.results)
    return outcome


def _start(folder: Path, stack: ExitStack) -> Iterator[tuple[str, RunningLog]]:
    for peer in PEERS:
        try:
            yield peer.name, stack.enter_context(peer.start(folder))
        except (Unavailable, DidNotStart) as missing:
            print(f"left out: {missing}", file=sys.stderr)


def _contenders(
    case: Case, ours: Bus, folder: Path, logs: Logs, options: Options, during: ExitStack
) -> Sequence[Contender]:
    if case in (PRODUCE, WAITING):
        workers = _crew(ours, case, PROCESSES, during)
        window = WINDOW if case is PRODUCE else 1
        return [Produce(ours, workers, window), *_peers(case, logs)]
    if case is BATCHES:
        workers = _crew(ours, case, PROCESSES, during)
        messages = SHORT_MESSAGES if options.short else MESSAGES
        settled = Settled(ours, workers, case.name, messages)
        return [settled, PlainRead(ours, workers, settled)]
    if case is SINGLES:
        messages = SHORT_SINGLE_MESSAGES if options.short else SINGLE_MESSAGES
        return [Alone(ours, _filled(ours, case, messages, during), case.name, messages)]
    producer, listener = (_crew(ours, LATENCY, 1, during) for _ in range(2))
    return [EndToEnd(ours, LATENCY.name, producer, listener), Disk(folder)]


def _peers(case: Case, logs: Logs) -> Iterator[Contender]:
    for name, log in logs.items():
        few = Server(name, log, PROCESSES, BATCH_MESSAGES)
        many = Server(name, log, PEERS_MANY, BATCH_MESSAGES)
        yield Better(few, many) if case is PRODUCE else few


def _crew(bus: Bus, case: Case, processes: int, during: ExitStack) -> Crew:
    program = ("fdq-load", "bench.fdq.work", native_url(bus), case.name)
    return during.enter_context(crew(*program, processes=processes, numbered=True))


def _filled(bus: Bus, case: Case, messages: int, during: ExitStack) -> Crew:
    """One process, and a topic with so many messages, in blocks as producers make them."""
    worker = _crew(bus, case, 1, during)
    worker.tell(f"produce {messages // BATCH_MESSAGES} {BATCH_MESSAGES} {WINDOW}")
    return worker
