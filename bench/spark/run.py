"""Topics as tables: who takes part in each case."""

from collections.abc import Sequence

from bench.harness.options import Options
from bench.harness.report import Outcome
from bench.harness.results import OURS
from bench.spark import scans
from bench.spark.cases import (
    ALL_COLUMNS,
    BUS,
    CASES,
    EVERY,
    FILES,
    KEYED,
    LATENCY,
    MESSAGES,
    PARQUET,
    REQUIREMENTS,
    SHORT_MESSAGES,
    SINK,
    TUPLES,
)
from bench.spark.contenders import TopicToTopic, Write, to_parquet, to_topic
from bench.spark.place import TOPIC, Place, Suite
from bench.store.contract import Contender
from bench.store.rounds import Case

NAMES = tuple(case.name for case in CASES)


def run(options: Options) -> Outcome:
    suite = Suite("spark", Tables, CASES, REQUIREMENTS, (TUPLES, ALL_COLUMNS))
    return suite.run(options, SHORT_MESSAGES if options.short else MESSAGES)


class Tables(Place):
    def contenders(self, case: Case) -> Sequence[Contender]:
        if case is LATENCY:
            return [self._stream()]
        if case in (SINK, KEYED):
            return self._writers("body", *(["shard_key"] if case is KEYED else []))
        return self._scans(self.url if case is BUS else f"lmdb:{self.folder / 'data'}", case)

    def _scans(self, url: str, case: Case) -> Sequence[Contender]:
        spark, rows = self.spark, self.messages
        pid = self.bus.pid if case is BUS else None
        parquet = scans.Scan(PARQUET, self.parquet, rows, None)
        every = scans.topic(spark, url, TOPIC)
        if case is EVERY:
            tuples = scans.Scan(TUPLES, scans.tuples(spark, url, TOPIC), rows, None, warming=1)
            return [scans.Scan(OURS, every, rows, pid), parquet, tuples]
        ours = scans.Scan(OURS, scans.one_column(spark, url, TOPIC), rows, pid)
        if case is FILES:
            return [ours, parquet]
        return [ours, parquet, scans.Scan(ALL_COLUMNS, every, rows, pid)]

    def _writers(self, *columns: str) -> Sequence[Contender]:
        rows = self.parquet.select(*columns).persist()
        rows.count()
        topic = to_topic(rows, self.client, self.url)
        files = to_parquet(rows, self.folder / "written")
        return [
            Write(OURS, self.messages, topic, self.bus.pid),
            Write(PARQUET, self.messages, files, None),
        ]

    def _stream(self) -> TopicToTopic:
        stream = TopicToTopic(self.spark, self.client, self.url, self.folder, self.bus.pid)
        self.stack.callback(stream.close)
        return stream
