"""The order of work: a bus, a session, the same rows in a topic and in files, then the cases."""

import sys
import time
from collections.abc import Sequence
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
from bench.spark import scans
from bench.spark.cases import (
    BUS,
    CASES,
    FILES,
    KEYED,
    LATENCY,
    MESSAGES,
    ONE_COLUMN,
    PARQUET,
    REQUIREMENTS,
    SHORT_MESSAGES,
    SINK,
    TUPLES,
)
from bench.spark.contenders import TopicToTopic, Write, to_parquet, to_topic
from bench.spark.engine import session
from bench.spark.filling import fill
from bench.store.contract import Contender
from bench.store.rounds import Case, run_case
from bench.store.run import data_folder
from polybus import __version__
from polybus.native import Client

NAMES = tuple(case.name for case in CASES)
TOPIC = "rows"
SHORT_REPEATS_S = 5.0


def run(options: Options) -> Outcome:
    outcome = Outcome("spark", options)
    effort = options.effort()
    if options.short:
        effort = replace(effort, repeat_until_s=time.monotonic() + SHORT_REPEATS_S)
    with data_folder() as folder, ExitStack() as stack:
        command = (str(installed("polybus", "make setup")), "serve", "--data", str(folder / "data"))
        ours = stack.enter_context(bus("spark", folder, *command))
        client = stack.enter_context(Client(native_url(ours)))
        spark = stack.enter_context(session())
        messages = SHORT_MESSAGES if options.short else MESSAGES
        place = Place(spark, ours, client, folder, messages, stack)
        outcome.versions = {PARQUET: pyspark.__version__, TUPLES: "", ONE_COLUMN: ""}
        outcome.versions[OURS] = __version__
        for case in (case for case in CASES if options.wants(case.name)):
            print(f"… {case.title}", file=sys.stderr, flush=True)
            outcome.results.append(run_case(case, effort, place.contenders(case)))
    for requirement in REQUIREMENTS:
        outcome.verdicts += requirement.judge(outcome.results)
    return outcome


class Place:
    """The same rows, wherever they are read from and written to."""

    def __init__(
        self,
        spark: Any,
        ours: Bus,
        client: Client,
        folder: Path,
        messages: int,
        stack: ExitStack,
    ) -> None:
        self._spark, self._bus, self._client = spark, ours, client
        self._url, self._folder = native_url(ours), folder
        self._messages = messages
        self._stack = stack
        fill(self._url, TOPIC, messages)
        self._parquet = scans.parquet(
            spark, folder / "parquet", scans.topic(spark, self._url, TOPIC)
        )

    def contenders(self, case: Case) -> Sequence[Contender]:
        if case is LATENCY:
            return [self._stream()]
        if case in (SINK, KEYED):
            return self._writers("body", *(["shard_key"] if case is KEYED else []))
        return self._scans(f"lmdb:{self._folder / 'data'}" if case is FILES else self._url, case)

    def _scans(self, url: str, case: Case) -> Sequence[Contender]:
        spark, rows = self._spark, self._messages
        pid = self._bus.pid if case is BUS else None
        found = [
            scans.Scan(OURS, scans.topic(spark, url, TOPIC), rows, pid),
            scans.Scan(ONE_COLUMN, scans.one_column(spark, url, TOPIC), rows, pid),
            scans.Scan(PARQUET, self._parquet, rows, None),
        ]
        if case is FILES:
            found.append(scans.Scan(TUPLES, scans.tuples(spark, url, TOPIC), rows, None))
        return found

    def _writers(self, *columns: str) -> Sequence[Contender]:
        rows = self._parquet.select(*columns).persist()
        rows.count()
        topic = to_topic(rows, self._client, self._url)
        files = to_parquet(rows, self._folder / "written")
        return [
            Write(OURS, self._messages, topic, self._bus.pid),
            Write(PARQUET, self._messages, files, None),
        ]

    def _stream(self) -> TopicToTopic:
        stream = TopicToTopic(self._spark, self._client, self._url, self._folder, self._bus.pid)
        self._stack.callback(stream.close)
        return stream
