"""The order of work: the bus, a bare ROUTER, a store, then the cases in rounds."""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from bench.harness.options import Options
from bench.harness.peer import Running
from bench.harness.report import Outcome
from bench.harness.rounds import Effort
from bench.native.contenders import Bus
from bench.peers import router
from bench.pirate import memory
from bench.pirate.cases import (
    CASES,
    CLIENTS,
    COLLECT,
    GET,
    GET_ALONE,
    GET_SAME,
    HELD,
    PUT,
    REQUIREMENTS,
    STORE,
)
from bench.pirate.contenders import (
    Filled,
    Followed,
    echoing,
    getting,
    getting_again,
    putting,
    store_alone,
)
from bench.pirate.places import pirate_bus
from bench.store.contract import Contender
from bench.store.rounds import Case, run_case
from bench.store.run import data_folder
from polybus import __version__
from polybus.store.contract import Store
from polybus.store.engine_registry import open_store

MEMORY = "pirate-memory"
NAMES = (*(case.name for case in CASES), MEMORY)
MEMORY_S, SHORT_MEMORY_S = 30.0, 6.0
SHORT_REPEATS_S = 8.0
RATIO_ROUNDS = 9


def run(options: Options) -> Outcome:
    outcome = Outcome("pirate", options)
    effort = options.effort()
    if options.short:
        effort = replace(effort, repeat_until_s=time.monotonic() + SHORT_REPEATS_S)
    with data_folder() as folder, ExitStack() as stack:
        ours = stack.enter_context(pirate_bus(folder))
        bare = stack.enter_context(router.started())
        store = stack.enter_context(open_store(f"lmdb:{folder / 'store'}"))
        versions = {STORE: "", router.NAME: bare.version, HELD: "", "polybus": __version__}
        outcome.versions = versions
        for case in (case for case in CASES if options.wants(case.name)):
            print(f"… {case.title}", file=sys.stderr, flush=True)
            contenders = _contenders(case, ours, bare, store)
            outcome.results.append(run_case(case, _effort(case, effort), contenders))
    for requirement in REQUIREMENTS:
        outcome.verdicts += requirement.judge(outcome.results)
    if options.wants(MEMORY):
        _run_memory(options, outcome)
    return outcome


def _effort(case: Case, effort: Effort) -> Effort:
    """Both wait for a disk that others use, too: a ratio of few rounds says little."""
    if case not in (PUT, COLLECT) or effort.rounds_are_fixed:
        return effort
    return replace(effort, rounds=max(effort.rounds, RATIO_ROUNDS))


def _contenders(case: Case, ours: Bus, bare: Running, store: Store) -> Sequence[Contender]:
    if case is PUT:
        alone = store_alone(store, case.name)
        return [putting(ours, case.name), alone, echoing(bare, CLIENTS)]
    if case in (GET, GET_SAME, GET_ALONE):
        count = CLIENTS if case is GET else 1
        filled = Filled(ours, case.name)
        if case is GET_SAME:
            return [getting_again(ours, case.name, filled), echoing(bare, count)]
        return [getting(ours, case.name, count, filled), echoing(bare, count)]
    assert case is COLLECT
    return [
        Followed(ours, "collected", held=False),
        Followed(ours, "held", held=True),
    ]


def _run_memory(options: Options, outcome: Outcome) -> None:
    """On a bus of its own, whose memory no other case has touched."""
    print("… memory with 10,000 subscriptions", file=sys.stderr, flush=True)
    seconds = SHORT_MEMORY_S if options.short else MEMORY_S
    with data_folder() as folder, pirate_bus(folder) as ours:
        verdict, outcome.rows[MEMORY] = memory.measure(ours, seconds)
    outcome.verdicts.append(verdict)
