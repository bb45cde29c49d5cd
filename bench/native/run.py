"""The order of work: the bus, the port without a store, JetStream, then the cases in rounds."""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench.harness.options import Options
from bench.harness.places import Unavailable, installed
from bench.harness.programs import DidNotStart
from bench.harness.report import Outcome
from bench.native.cases import (
    BATCH_MESSAGES,
    BATCHES,
    BESIDE,
    CASES,
    PROCESSES,
    READ,
    REQUIREMENTS,
    SINGLES,
    STREAMS,
    WINDOW,
)
from bench.native.contenders import ALONE, CEILING, OURS, Beside, Bus, Latency, Produce, Read, bus
from bench.native.load import load
from bench.peers.jetstream import JetStream
from bench.store.contract import Contender, RunningLog
from bench.store.rounds import Case, run_case
from bench.store.run import data_folder
from bench.store.writing import Server
from polybus import __version__
from polybus.native import Client

NAMES = tuple(case.name for case in CASES)
MESSAGES, SHORT_MESSAGES = 4_000_000, 1_000_000  # that are read
SHORT_REPEATS_S = 8.0


def run(options: Options) -> Outcome:
    outcome = Outcome("native", options)
    effort = options.effort()
    if options.short:
        effort = replace(effort, repeat_until_s=time.monotonic() + SHORT_REPEATS_S)
    with data_folder() as folder, ExitStack() as stack:
        ours, ceiling = _start(folder, stack)
        outcome.versions = {CEILING: "", ALONE: "", OURS: __version__}
        log = _jetstream(folder, stack) if options.wants(BATCHES.name) else None
        if log is not None:
            outcome.versions[JetStream.name] = log.version
        for case in (case for case in CASES if options.wants(case.name)):
            print(f"… {case.title}", file=sys.stderr, flush=True)
            with ExitStack() as during:
                contenders = _contenders(case, ours, ceiling, log, options, during)
                outcome.results.append(run_case(case, effort, contenders))
    for requirement in REQUIREMENTS:
        outcome.verdicts += requirement.judge(outcome.results)
    return outcome


def _start(folder: Path, stack: ExitStack) -> tuple[Bus, Bus]:
    polybus = str(installed("polybus", "make setup"))
    data = ("serve", "--data", str(folder / "data"))
    ours = stack.enter_context(bus("native", folder, polybus, *data))
    without = (sys.executable, "-m", "bench.native.ceiling", "--engine", "memory:")
    return ours, stack.enter_context(bus("native-ceiling", folder, *without))


def _jetstream(folder: Path, stack: ExitStack) -> RunningLog | None:
    try:
        return stack.enter_context(JetStream().start(folder))
    except (Unavailable, DidNotStart) as missing:
        print(f"left out: {missing}", file=sys.stderr)
        return None


def _contenders(
    case: Case, ours: Bus, ceiling: Bus, log: RunningLog | None, options: Options, during: ExitStack
) -> Sequence[Contender]:
    if case is READ:
        return [_reader(ours, SHORT_MESSAGES if options.short else MESSAGES, during)]
    if case is BESIDE:
        return [
            Beside(ours, case.name, PROCESSES, BATCH_MESSAGES, WINDOW),
            Latency(ALONE, ours),
        ]
    found: list[Contender] = [
        _producer(name, one, case, during) for name, one in ((OURS, ours), (CEILING, ceiling))
    ]
    if case is BATCHES and log is not None:
        found.append(Server(JetStream.name, log, PROCESSES, BATCH_MESSAGES))
    return found


def _producer(name: str, bus: Bus, case: Case, during: ExitStack) -> Produce:
    one_by_one = case is SINGLES
    return Produce(
        name,
        bus,
        during.enter_context(load(bus.url, case.name, PROCESSES)),
        producers=PROCESSES,
        streams=STREAMS if one_by_one else 1,
        messages=1 if one_by_one else BATCH_MESSAGES,
        window=1 if one_by_one else WINDOW,
    )


def _reader(bus: Bus, messages: int, during: ExitStack) -> Read:
    """Of a topic of one shard, written in blocks of 1000."""
    with Client(bus.url.replace("grpc", "polybus")) as client:
        client.act("topic.create", topic=READ.name, shards=1)
    one = during.enter_context(load(bus.url, READ.name, 1))
    one.tell(f"streams 1 {BATCH_MESSAGES} 1")
    one.tell(f"run {messages // BATCH_MESSAGES}")
    return Read(bus, one, messages)
