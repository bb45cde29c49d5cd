"""A suite of Spark: starts a bus and a session, writes the same rows to a topic and to files, and
runs the cases."""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyspark

from bench.fdq.contenders import native_url
from bench.harness.options import Options
from bench.harness.places import installed
from bench.harness.report import Outcome
from bench.harness.results import OURS, Requirement
from bench.harness.rounds import Effort
from bench.native.contenders import Bus, bus
from bench.spark import scans
from bench.spark.cases import PARQUET
from bench.spark.engine import session
from bench.spark.filling import fill
from bench.store.contract import Contender
from bench.store.rounds import Case, run_case
from bench.store.run import data_folder
from polybus import __version__
from polybus.native import Client

TOPIC = "rows"
# A measurement takes a second, after several warm-up runs: all cases take some minutes.
ROUNDS = 5
REPEATS = 8
REPEATS_S, SHORT_REPEATS_S = 120.0, 5.0
QUIET_WAIT_S = 2.0


@dataclass
class Place(ABC):
    """A bus and a session with the same rows in a topic and in Parquet files."""

    spark: Any
    bus: Bus
    client: Client
    folder: Path
    messages: int
    stack: ExitStack

    def __post_init__(self) -> None:
        self.url, self.files = native_url(self.bus), self.folder / "parquet"
        fill(self.url, TOPIC, self.messages)
        rows = scans.topic(self.spark, self.url, TOPIC)
        self.parquet = scans.parquet(self.spark, self.files, rows)

    @abstractmethod
    def contenders(self, case: Case) -> Sequence[Contender]:
        """Return the contenders of a case."""


@dataclass(frozen=True)
class Suite:
    """`others` are contenders beside Parquet and ours."""

    name: str
    place: type[Place]
    cases: Sequence[Case]
    requirements: Sequence[Requirement]
    others: Sequence[str]

    def run(self, options: Options, messages: int) -> Outcome:
        outcome, effort = Outcome(self.name, options), _effort(options)
        outcome.versions = {PARQUET: pyspark.__version__, **dict.fromkeys(self.others, "")}
        outcome.versions[OURS] = __version__
        with data_folder() as folder, ExitStack() as stack:
            place = self._prepared(folder, messages, stack)
            for case in (case for case in self.cases if options.wants(case.name)):
                print(f"… {case.title}", file=sys.stderr, flush=True)
                outcome.results.append(run_case(case, effort, place.contenders(case)))
        for requirement in self.requirements:
            outcome.verdicts += requirement.judge(outcome.results)
        return outcome

    def _prepared(self, folder: Path, messages: int, stack: ExitStack) -> Place:
        command = (str(installed("polybus", "make setup")), "serve", "--data", str(folder / "data"))
        ours = stack.enter_context(bus(self.name, folder, *command))
        client = stack.enter_context(Client(native_url(ours)))
        spark = stack.enter_context(session())
        return self.place(spark, ours, client, folder, messages, stack)


def _effort(options: Options) -> Effort:
    until_s = time.monotonic() + (SHORT_REPEATS_S if options.short else REPEATS_S)
    effort = replace(options.effort(), repeat_until_s=until_s)
    if options.short:
        return effort
    rounds = options.rounds or ROUNDS
    return replace(effort, rounds=rounds, repeats_per_case=REPEATS, quiet_wait_s=QUIET_WAIT_S)
