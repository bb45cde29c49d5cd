"""A store that has grown: 100 million messages beside a small one, round by round.

Appending and reading the end must not get slower with what is stored, nor with the holes that
trimming leaves. Then what should cost nothing: opening, and publishing a gigabyte of stages while
others go on. It takes about 20 GB of disk and some minutes; with --short a twentieth of that.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.harness.options import Options
from bench.harness.report import Outcome
from bench.harness.results import RATE, Requirement, Target, Values, Verdict
from bench.store.producers import Batch, Crowd
from bench.store.publishing import publish
from bench.store.rounds import Case, run_case
from bench.store.run import data_folder
from bench.store.writing import OURS, Ours
from polybus.model.topic import Topic
from polybus.store.contract import Store
from polybus.store.engine_registry import open_store

SMALL = "at 1 M messages"
SMALL_MESSAGES = 1_000_000
FULL, SHORT = 100, 5  # times the small one
STAGED_BYTES = 1_000_000_000
SLOWER = 1.5
OPENING_S, PUBLISHING_MS = 1.0, 50.0
TRIMMED = 0.9
TAIL = 1000  # messages from the end
FILL_BATCH, FILL_PRODUCERS = 10_000, 8

APPEND = Case("grown-append", "append, 16 × 100, grown", (RATE,))
READ = Case("grown-tail", "read the last 1000, grown", (RATE,))
TRIMMED_APPEND = Case("trimmed-append", "append, 16 × 100, grown and 90 % trimmed", (RATE,))
TRIMMED_READ = Case("trimmed-tail", "read the last 1000, grown and 90 % trimmed", (RATE,))
CASES = (APPEND, READ, TRIMMED_APPEND, TRIMMED_READ)
REQUIREMENTS: tuple[Requirement, ...] = tuple(
    Target(case.name, RATE, (SMALL,), 1 / SLOWER) for case in CASES
)


class Appender(Ours):
    """Appends to the store's one topic, as the case of small stores does."""

    def __init__(self, name: str, store: Store, topic: Topic) -> None:
        super().__init__(store, topic, 16, 100)
        self.name = name


class TailReader:
    pid = None

    def __init__(self, name: str, store: Store, topic: Topic) -> None:
        self.name, self._store, self._topic = name, store, topic.number
        self._reads = 200

    def _run(self) -> float:
        end = self._store.bounds(self._topic).shards[0].end
        started_s = time.perf_counter()
        for _ in range(self._reads):
            at = end - TAIL
            while at < end:
                at += self._store.read(self._topic, 0, at, max_rows=TAIL).count
        return time.perf_counter() - started_s

    def calibrate(self, wanted_s: float) -> None:
        self._reads = max(50, round(self._reads * wanted_s / self._run()))

    def measure(self) -> Values:
        return {RATE.key: TAIL * self._reads / self._run()}


@dataclass
class Grown:
    """The two stores, and their topics."""

    folder: Path
    small: Store
    large: Store
    small_topic: Topic
    large_topic: Topic

    def compare(self, append: Case, read: Case, options: Options, outcome: Outcome) -> None:
        sides = (SMALL, self.small, self.small_topic), (OURS, self.large, self.large_topic)
        effort = options.effort()
        appenders = [Appender(*side) for side in sides]
        outcome.results.append(run_case(append, effort, appenders))
        readers = [TailReader(*side) for side in sides]
        outcome.results.append(run_case(read, effort, readers))


def fill(store: Store, messages: int) -> Topic:
    topic = store.create("grown", 1, {})
    per_turn = FILL_BATCH * FILL_PRODUCERS
    crowd = Crowd(store, topic, FILL_PRODUCERS, Batch(FILL_BATCH))
    while (done := store.bounds(topic.number).next_id - 1) < messages:
        _say(f"  {done / 1e6:.0f} M messages")
        crowd.run(max(1, min(100, (messages - done) // per_turn)))
    return topic


@contextmanager
def _stores(folder: Path, times: int) -> Iterator[Grown]:
    with open_store(f"lmdb:{folder / 'small'}") as small, open_store(_large(folder)) as large:
        small_topic = fill(small, SMALL_MESSAGES)
        yield Grown(folder, small, large, small_topic, fill(large, SMALL_MESSAGES * times))


def _large(folder: Path) -> str:
    return f"lmdb:{folder / 'large'}"


def run(options: Options) -> Outcome:
    outcome = Outcome("store-soak", options)
    outcome.versions = {SMALL: "", OURS: ""}
    share = SHORT / FULL if options.short else 1.0
    with data_folder() as folder:
        with _stores(folder, SHORT if options.short else FULL) as grown:
            _say("… append and read the end")
            grown.compare(APPEND, READ, options, outcome)
        _open_again(folder, outcome)
        with open_store(f"lmdb:{folder / 'small'}") as small, open_store(_large(folder)) as large:
            grown = Grown(folder, small, large, small.topics()[0], large.topics()[0])
            _say("… publish stages")
            _publish(large, grown.large_topic, round(STAGED_BYTES * share), outcome)
            _say("… trim, then append and read the end")
            _trim(large, grown.large_topic, outcome)
            grown.compare(TRIMMED_APPEND, TRIMMED_READ, options, outcome)
    for requirement in REQUIREMENTS:
        outcome.verdicts += requirement.judge(outcome.results)
    return outcome


def _open_again(folder: Path, outcome: Outcome) -> None:
    size = sum(path.stat().st_size for path in (folder / "large").rglob("*") if path.is_file())
    started_s = time.perf_counter()
    store = open_store(_large(folder))
    took_s = time.perf_counter() - started_s
    store.close()
    outcome.rows["opening"] = {"s": took_s, "file_gb": size / 1e9}
    text = f"opening a store of {size / 1e9:.1f} GB: s"
    outcome.verdicts.append(Verdict(text, f"under {OPENING_S:g}", took_s, took_s < OPENING_S))


def _publish(store: Store, topic: Topic, size: int, outcome: Outcome) -> None:
    found = publish(store, topic, size)
    outcome.rows["publishing"] = found
    text = f"publishing {size / 1e9:g} GB of stages: ms"
    took = found["publish_ms"]
    wanted = f"under {PUBLISHING_MS:g}"
    outcome.verdicts.append(Verdict(text, wanted, took, took < PUBLISHING_MS))
    longest = found["others_longest_ms"]
    text = "longest commit of others meanwhile: ms"
    outcome.verdicts.append(Verdict(text, wanted, longest, longest < PUBLISHING_MS))


def _trim(store: Store, topic: Topic, outcome: Outcome) -> None:
    end = store.bounds(topic.number).shards[0].end
    started_s = time.perf_counter()
    store.trim(topic.number, {0: round(end * TRIMMED)})
    outcome.rows["trimming"] = {"s": time.perf_counter() - started_s}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
