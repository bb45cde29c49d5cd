"""Topics as tables: the contenders of each case."""

from collections.abc import Sequence

from bench.harness.options import Options
from bench.harness.report import Outcome
from bench.harness.results import OURS
from bench.spark import scans
from bench.spark.cases import (
    BUS,
    CASES,
    EVERY,
    KEYED,
    LATENCY,
    MESSAGES,
    PARQUET,
    REQUIREMENTS,
    SHORT_MESSAGES,
    SINK,
    SLOW,
    TUPLES,
)
from bench.spark.contenders import TopicToTopic, Write, to_parquet, to_topic
from bench.spark.place import TOPIC, Place, Suite
from bench.store.contract import Contender
from bench.store.rounds import Case

NAMES = tuple(case.name for case in CASES)


def run(options: Options) -> Outcome:
    suite = Suite("spark", Tables, CASES, REQUIREMENTS, (TUPLES,))
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
        asked = scans.EVERY_COLUMN if case is EVERY else scans.ONE_COLUMN
        ours = scans.Scan(OURS, scans.topic(spark, url, TOPIC), rows, pid, asked=asked)
        if case is SLOW:
            slow = scans.tuples(spark, url, TOPIC)
            return [ours, scans.Scan(TUPLES, slow, rows, None, warming=1)]
        return [ours, scans.Scan(PARQUET, self.parquet, rows, None, asked=asked)]

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
