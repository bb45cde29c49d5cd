"""Runs the benchmark: starts the bus and its peers, then measures the cases in rounds."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace

from bench.gsb.cases import (
    BULK,
    CASES,
    GRPC,
    IDLE,
    IN_FLIGHT,
    LINK,
    MANY,
    NATS,
    NO_LINK,
    ONE,
    ONE_BUS,
    PYNNG,
    PYNNG_ENDS,
    RELAY,
    REQUIREMENTS,
    STREAM,
    TWO_LINKS,
)
from bench.gsb.contenders import Pair, direct, nats, pair, polybus, relay, require
from bench.gsb.links import Idle, alone, line
from bench.gsb.wire import ITEMS, NUMBERS
from bench.harness.awake import awake
from bench.harness.options import Options
from bench.harness.places import Unavailable
from bench.harness.programs import DidNotStart
from bench.harness.report import Outcome
from bench.native.contenders import OURS, Bus
from bench.store.contract import Contender
from bench.store.rounds import Case, run_case
from bench.store.run import data_folder
from polybus import __version__

NAMES = tuple(case.name for case in CASES)
SHORT_REPEATS_S = 10.0
BULK_ITEMS, SHORT_BULK_ITEMS = 1024, 192  # of 1 MiB
ORDERS = {STREAM: NUMBERS, BULK: ITEMS}


def run(options: Options) -> Outcome:
    outcome = Outcome("gsb", options)
    peers = (RELAY, PYNNG, NATS, GRPC, ONE_BUS, TWO_LINKS, NO_LINK)
    outcome.versions = {**dict.fromkeys(peers, ""), OURS: __version__}
    effort = options.effort()
    if options.short:
        effort = replace(effort, repeat_until_s=time.monotonic() + SHORT_REPEATS_S)
    with data_folder() as folder, ExitStack() as stack:
        bus = stack.enter_context(polybus(folder))
        for case in (case for case in CASES if options.wants(case.name)):
            print(f"… {case.title}", file=sys.stderr, flush=True)
            with ExitStack() as during, awake() if case is ONE else nullcontext():
                if case in (LINK, IDLE):
                    contenders = _linked(case, during)
                else:
                    contenders = list(_contenders(case, bus, options, during))
                outcome.results.append(run_case(case, effort, contenders, writes_files=False))
    for requirement in REQUIREMENTS:
        outcome.verdicts += requirement.judge(outcome.results)
    return outcome


def _contenders(case: Case, bus: Bus, options: Options, during: ExitStack) -> Iterator[Pair]:
    in_flight = 1 if case is ONE else IN_FLIGHT
    order = ORDERS.get(case, "calls")
    whole = 0 if case is not BULK else SHORT_BULK_ITEMS if options.short else BULK_ITEMS
    ours = f"tcp://127.0.0.1:{bus.ports['gsb']}"
    kind = "pair" if case is PYNNG_ENDS else "gsb"
    yield during.enter_context(pair(OURS, kind, ours, in_flight, order, bus.pid, whole))
    if case is not PYNNG_ENDS:
        pid, address = during.enter_context(relay(gives_credit=case in ORDERS))
        yield during.enter_context(pair(RELAY, "gsb", address, in_flight, order, pid, whole))
    if case in (ONE, MANY, PYNNG_ENDS):
        address = direct("tcp://")
        yield during.enter_context(pair(PYNNG, "req", address, in_flight, order, None))
    if case in (ONE, MANY):
        yield from _brokers(in_flight, order, during)


def _linked(case: Case, during: ExitStack) -> Sequence[Contender]:
    near, middle, far = during.enter_context(line())
    if case is IDLE:
        lone = during.enter_context(alone())
        return [Idle(OURS, near.pid), Idle(NO_LINK, lone.pid)]
    columns = (
        pair(OURS, "gsb", near.address, IN_FLIGHT, "calls", near.pid, far=middle),
        pair(ONE_BUS, "gsb", far.address, IN_FLIGHT, "calls", far.pid),
        # The CPU time is that of the bus that passes the calls on.
        pair(TWO_LINKS, "gsb", far.address, IN_FLIGHT, "calls", middle.pid, far=near),
    )
    return [during.enter_context(column) for column in columns]


def _brokers(in_flight: int, order: str, during: ExitStack) -> Iterator[Pair]:
    for start in (_nats, _grpc):
        try:
            yield during.enter_context(start(in_flight, order, during))
        except (Unavailable, DidNotStart) as missing:
            print(f"left out: {missing}", file=sys.stderr)


def _nats(in_flight: int, order: str, during: ExitStack) -> AbstractContextManager[Pair]:
    require("nats")
    pid, address = during.enter_context(nats())
    return pair(NATS, "nats", address, in_flight, order, pid)


def _grpc(in_flight: int, order: str, during: ExitStack) -> AbstractContextManager[Pair]:
    require("grpc")
    return pair(GRPC, "grpc", direct(""), in_flight, order, None)
