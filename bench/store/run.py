"""The order of work: a folder for all data, the servers, then the cases in rounds."""

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from bench.harness.options import Options
from bench.harness.places import Unavailable, output_folder
from bench.harness.programs import DidNotStart
from bench.harness.report import Outcome
from bench.harness.rounds import Effort
from bench.peers.jetstream import JetStream
from bench.peers.redis_streams import RedisStreams
from bench.store import log_appends
from bench.store.cases import BATCHES, CASES, IN_BLOCKS, READ, REQUIREMENTS, SINGLES
from bench.store.contract import Contender, LogPeer, RunningLog
from bench.store.reading import Reader, written_in_blocks, written_one_by_one
from bench.store.rounds import Case, run_case
from bench.store.writing import APPEND, LMDB, OURS, OneEach, Ours, RawAppend, Server
from polybus import __version__
from polybus.model.topic import Topic
from polybus.server import process_tuning
from polybus.store.contract import Store
from polybus.store.engine_registry import open_store

NAMES = tuple(case.name for case in CASES)
PEERS: tuple[LogPeer, ...] = (JetStream(), RedisStreams())
MESSAGES, SHORT_MESSAGES = 4_000_000, 1_000_000  # written in blocks
ONE_BY_ONE, SHORT_ONE_BY_ONE = 1_000_000, 64_000
SHORT_REPEATS_S = 12.0  # all of the short form in 40 s, on a busy machine, too

Logs = dict[str, RunningLog]


def run(options: Options) -> Outcome:
    outcome = Outcome("store", options)
    effort = _effort(options)
    process_tuning.prepare_process()  # as a bus does
    process_tuning.freeze_heap()
    with data_folder() as folder, ExitStack() as stack:
        logs = dict(_start(folder, stack)) if options.wants(BATCHES.name, SINGLES.name) else {}
        outcome.versions = {APPEND: "", LMDB: "", **{n: one.version for n, one in logs.items()}}
        outcome.versions |= {IN_BLOCKS: "", OURS: __version__}
        if options.wants(log_appends.LOG.name):
            outcome.versions |= dict.fromkeys(log_appends.BESIDE, "")
        store = stack.enter_context(open_store(f"lmdb:{folder / 'ours'}"))
        for case in (case for case in CASES if options.wants(case.name)):
            _say(f"… {case.title}")
            contenders = _contenders(case, store, folder, logs, options)
            outcome.results.append(run_case(case, effort, contenders))
    for requirement in REQUIREMENTS:
        outcome.verdicts += requirement.judge(outcome.results)
    return outcome


def _effort(options: Options) -> Effort:
    effort = options.effort()
    if not options.short:
        return effort
    return replace(effort, repeat_until_s=time.monotonic() + SHORT_REPEATS_S)


@contextmanager
def data_folder() -> Iterator[Path]:
    """Return a folder on the disk of the build, because temporary folders may be in memory."""
    folder = Path(tempfile.mkdtemp(prefix="store-", dir=output_folder()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, stack: ExitStack) -> Iterator[tuple[str, RunningLog]]:
    for peer in PEERS:
        try:
            yield peer.name, stack.enter_context(peer.start(folder))
        except (Unavailable, DidNotStart) as missing:
            _say(f"left out: {missing}")


def _contenders(
    case: Case, store: Store, folder: Path, logs: Logs, options: Options
) -> Sequence[Contender]:
    if case is BATCHES:
        ours = Ours(store, store.create(case.name, 1, {}), 16, 100)
        servers = [Server(name, log, 16, 100) for name, log in logs.items()]
        return [ours, RawAppend(folder, ours), *servers]
    if case is SINGLES:
        servers = [Server(name, log, 128, 1) for name, log in logs.items()]
        ours = Ours(store, store.create(case.name, 1, {}), 128, 1)
        return [ours, OneEach(folder), *servers]
    if case is log_appends.LOG:
        return log_appends.contenders(folder, store)
    in_blocks = _in_blocks(store, options)
    if case is READ:
        return [Reader(OURS, store, in_blocks)]
    one_by_one = written_one_by_one(
        store, case.name, SHORT_ONE_BY_ONE if options.short else ONE_BY_ONE
    )
    cast(Any, store).reblock()  # only this engine has it; it runs in the background otherwise
    return [Reader(IN_BLOCKS, store, in_blocks), Reader(OURS, store, one_by_one)]


def _in_blocks(store: Store, options: Options) -> Topic:
    """Write the messages once for both cases that read them."""
    found = [topic for topic in store.topics() if topic.name == IN_BLOCKS]
    messages = SHORT_MESSAGES if options.short else MESSAGES
    return found[0] if found else written_in_blocks(store, IN_BLOCKS, messages)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
