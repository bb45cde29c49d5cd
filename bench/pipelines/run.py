"""The order of work: a bus, a session, the same rows in a topic and in files, then the cases."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyspark

from bench.fdq.contenders import native_url
from bench.harness.options import Options
from bench.harness.places import installed
from bench.harness.report import Outcome
from bench.harness.results import OURS
from bench.native.contenders import Bus, bus
from bench.pipelines.archiving import (
    HISTORY,
    batch_to_parquet,
    keep_history,
    stream_to_parquet,
    to_archive,
)
from bench.pipelines.cases import (
    ARCHIVE,
    BATCH,
    BY_FORMAT,
    CASES,
    MESSAGES,
    PARQUET,
    REQUIREMENTS,
    SHORT_MESSAGES,
    UNION,
    WHERE,
)
from bench.pipelines.routing import Query, parquet_to_parquet, topic_to_topic
from bench.spark import scans
from bench.spark.engine import session
from bench.spark.filling import fill
from bench.store.contract import Contender
from bench.store.rounds import Case, run_case
from bench.store.run import data_folder
from polybus import __version__
from polybus.native import Client
from polybus.spark import table

NAMES = tuple(case.name for case in CASES)
TOPIC = "rows"
SHORT_REPEATS_S = 5.0


def run(options: Options) -> Outcome:
    outcome = Outcome("pipelines", options)
    effort = options.effort()
    if options.short:
        effort = replace(effort, repeat_until_s=time.monotonic() + SHORT_REPEATS_S)
    with data_folder() as folder, ExitStack() as stack:
        command = (str(installed("polybus", "make setup")), "serve", "--data", str(folder / "data"))
        ours = stack.enter_context(bus("pipelines", folder, *command))
        client = stack.enter_context(Client(native_url(ours)))
        spark = stack.enter_context(session())
        place = Place(spark, ours, client, folder, SHORT_MESSAGES if options.short else MESSAGES)
        outcome.versions = {
            PARQUET: pyspark.__version__,
            OURS: __version__,
            BY_FORMAT: "",
            BATCH: "",
        }
        for case in (case for case in CASES if options.wants(case.name)):
            print(f"… {case.title}", file=sys.stderr, flush=True)
            outcome.results.append(run_case(case, effort, place.contenders(case)))
    for requirement in REQUIREMENTS:
        outcome.verdicts += requirement.judge(outcome.results)
    return outcome


class Place:
    """The same rows, in a topic and in Parquet."""

    def __init__(self, spark: Any, ours: Bus, client: Client, folder: Path, messages: int) -> None:
        self._spark, self._bus, self._client = spark, ours, client
        self._url, self._folder = native_url(ours), folder
        self._messages = messages
        fill(self._url, TOPIC, messages)
        scans.parquet(spark, folder / "parquet", scans.topic(spark, self._url, TOPIC))

    def contenders(self, case: Case) -> Sequence[Contender]:
        if case is UNION:
            return self._unions()
        if case is ARCHIVE:
            ours = to_archive(self._spark, self._url, TOPIC, self._folder)
            place = self._spark, self._folder / "parquet", self._folder
            batch = Query(BATCH, self._messages, batch_to_parquet(*place), self._folder, None)
            return [*self._queries(ours, stream_to_parquet(*place)), batch]
        spark, where, folder = self._spark, WHERE[case.name], self._folder
        ours = topic_to_topic(spark, self._client, self._url, TOPIC, where)
        files = parquet_to_parquet(spark, folder / "parquet", where, folder)
        return self._queries(ours, files)

    def _queries(
        self, ours: Callable[[Path], object], files: Callable[[Path], object]
    ) -> Sequence[Contender]:
        return [
            Query(OURS, self._messages, ours, self._folder, self._bus.pid),
            Query(PARQUET, self._messages, files, self._folder, None),
        ]

    def _unions(self) -> Sequence[Contender]:
        spark, rows, pid = self._spark, self._messages, self._bus.pid
        options = keep_history(spark, self._url, rows, self._folder)
        by_format = spark.read.format("polybus").options(topic=HISTORY, **options).load()
        return [
            scans.Scan(OURS, table(spark, HISTORY, **options), rows, pid),
            scans.Scan(BY_FORMAT, by_format, rows, pid),
            scans.Scan(PARQUET, spark.read.parquet(str(self._folder / "parquet")), rows, None),
        ]
