"""Pipelines: the contenders of each case."""

from collections.abc import Callable, Sequence
from pathlib import Path

from bench.harness.options import Options
from bench.harness.report import Outcome
from bench.harness.results import OURS
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
    UNION,
    WHERE,
)
from bench.pipelines.routing import Query, parquet_to_parquet, topic_to_topic
from bench.spark import scans
from bench.spark.place import TOPIC, Place, Suite
from bench.store.contract import Contender
from bench.store.rounds import Case
from polybus.spark import table

NAMES = tuple(case.name for case in CASES)


def run(options: Options) -> Outcome:
    suite = Suite("pipelines", Pipelines, CASES, REQUIREMENTS, (BY_FORMAT, BATCH))
    return suite.run(options, MESSAGES)


class Pipelines(Place):
    def contenders(self, case: Case) -> Sequence[Contender]:
        if case is UNION:
            return self._unions()
        if case is ARCHIVE:
            ours = to_archive(self.spark, self.url, TOPIC, self.folder)
            place = self.spark, self.files, self.folder
            batch = Query(BATCH, self.messages, batch_to_parquet(*place), self.folder, None)
            return [*self._queries(ours, stream_to_parquet(*place)), batch]
        spark, where, folder = self.spark, WHERE[case.name], self.folder
        ours = topic_to_topic(spark, self.client, self.url, TOPIC, where)
        files = parquet_to_parquet(spark, self.files, where, folder)
        return self._queries(ours, files)

    def _queries(
        self, ours: Callable[[Path], object], files: Callable[[Path], object]
    ) -> Sequence[Contender]:
        return [
            Query(OURS, self.messages, ours, self.folder, self.bus.pid),
            Query(PARQUET, self.messages, files, self.folder, None),
        ]

    def _unions(self) -> Sequence[Contender]:
        spark, rows, pid = self.spark, self.messages, self.bus.pid
        options = keep_history(spark, self.url, rows, self.folder)
        by_format = spark.read.format("polybus").options(topic=HISTORY, **options).load()
        return [
            scans.Scan(OURS, table(spark, HISTORY, **options), rows, pid),
            scans.Scan(BY_FORMAT, by_format, rows, pid),
            scans.Scan(PARQUET, spark.read.parquet(str(self.files)), rows, None),
        ]
