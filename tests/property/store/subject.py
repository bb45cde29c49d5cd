"""An engine under test: maps the model's topics, stages and versions, and compares the two."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from polybus.model.block import Block
from polybus.model.commit import Append, Commit, CommitResult, RecordChange
from polybus.model.rows import Rows
from polybus.model.stamp import Stamp
from polybus.model.topic import ALL, All, Topic
from polybus.store.contract import Store
from polybus.testing.conformance.sample_blocks import Message, block, messages
from tests.rig.store.model import Entry, ModelTopic, Put, Request, Result, StoreModel


@dataclass
class Subject:
    name: str
    store: Store
    reopen: Callable[[], Store] | None = None
    tidy: Callable[[], object] | None = None
    numbers: list[int] = field(default_factory=list)  # of the model's topics
    stages: list[str] = field(default_factory=list)
    versions: dict[int, int] = field(default_factory=lambda: {0: 0})  # by serial
    first_ids: dict[int, int] = field(default_factory=dict)  # the last seen of each topic

    # --- asking

    def appends(self, puts: Iterable[Put]) -> tuple[Append, ...]:
        return tuple(Append(self.numbers[put.topic], put.shard, _block(put)) for put in puts)

    def commit(self, request: Request) -> Future[CommitResult]:
        changes = tuple(
            RecordChange(wish.key, wish.value, self._version(wish.expected))
            for wish in request.wishes
        )
        stamp = Stamp(*request.mark) if request.mark else None
        stages = tuple(self.stages[stage] for stage in request.stages)
        appends = self.appends(request.puts)
        return self.store.commit(Commit(appends, stages, changes, stamp, request.note))

    def _version(self, serial: int | None) -> int | None:
        return None if serial is None else self.versions[serial]

    # --- comparing

    def compare_result(self, wanted: Result, found: CommitResult) -> None:
        spans = tuple((self.numbers[topic], *rest) for topic, *rest in wanted.spans)
        assert found.spans == spans, self.name
        assert (found.timestamp_ns, found.note) == (wanted.timestamp_ns, wanted.note), self.name
        assert found.duplicate == wanted.duplicate, self.name
        for serial, version in zip(wanted.serials, found.versions, strict=True):
            assert (serial == 0) == (version == 0), self.name
            self.versions[serial] = version

    def compare_all(self, model: StoreModel) -> None:
        there = model.there()
        found = self.store.topics()
        assert [topic.number for topic in found] == [self.numbers[at] for at in there]
        for at, topic in zip(there, found, strict=True):
            self._compare_topic(at, topic, model.topics[at])
        self._compare_records(model)

    def _compare_topic(self, at: int, found: Topic, wanted: ModelTopic) -> None:
        assert (found.name, found.settings) == (wanted.name, wanted.settings), self.name
        assert found.generations == tuple(wanted.generations), self.name
        assert self._read_all(found.number, ALL, 0) == as_messages(wanted.entries), self.name
        for shard, start in enumerate(wanted.starts):
            there = self._read_all(found.number, shard, start)
            assert there == as_messages(wanted.of(shard)), self.name
        self._compare_bounds(at, wanted)

    def _read_all(self, number: int, shard: int | All, start: int) -> list[Message]:
        found: list[Message] = []
        while rows := messages(self.store.read(number, shard, start)):
            found += rows
            start = (rows[-1].id if shard == ALL else rows[-1].offset) + 1
        return found

    def _compare_bounds(self, at: int, wanted: ModelTopic) -> None:
        bounds = self.store.bounds(self.numbers[at])
        assert (bounds.next_id, bounds.timestamp_ns) == (wanted.next_id, wanted.timestamp_ns)
        first_id = wanted.entries[0].id if wanted.entries else wanted.next_id
        assert self.first_ids.get(at, 0) <= bounds.first_id <= first_id, self.name
        assert wanted.entries or bounds.first_id == wanted.next_id, self.name
        self.first_ids[at] = bounds.first_id
        ends = [(shard.start, shard.end) for shard in bounds.shards]
        assert ends == list(zip(wanted.starts, wanted.ends, strict=True)), self.name
        for shard, found in enumerate(bounds.shards):
            sizes = [len(entry.content[2]) for entry in wanted.of(shard)]
            assert (found.size_bytes > 0) == bool(sizes), self.name
            assert found.size_bytes >= sum(sizes), self.name

    def _compare_records(self, model: StoreModel) -> None:
        found = self.store.scan(b"")
        assert [record.key for record in found] == sorted(model.records), self.name
        for record in found:
            value, serial = model.records[record.key]
            assert (record.value, record.version) == (value, self.versions[serial]), self.name
            assert self.store.get(record.key) == record, self.name


def compare_rows(wanted: list[Entry], found: Rows, max_rows: int, max_bytes: int) -> None:
    """A read must return a prefix of the expected rows, and at least one if there are any."""
    assert found.count <= max_rows
    assert found.count <= 1 or found.size_bytes <= max_bytes
    assert (found.count > 0) == bool(wanted)
    assert messages(found) == as_messages(wanted)[: found.count]


def as_messages(entries: Iterable[Entry]) -> list[Message]:
    return [Message(*entry[:4], *entry.content) for entry in entries]


def _block(put: Put) -> Block:
    times, keys, bodies, headers = zip(*put.contents, strict=True)
    return block(
        *bodies,
        insertion_ms=times,
        keys=keys if set(keys) != {None} else None,
        headers=headers if set(headers) != {None} else None,
    )
