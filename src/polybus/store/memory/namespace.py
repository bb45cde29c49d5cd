"""A namespace: everything that one commit can change, as plain values without threads.

A commit is checked as a whole before anything is changed, and no change after the checks can
fail. So it is executed as a whole or not at all.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from polybus.errors import AlreadyExists, Conflict, DoesNotExist, StageGone, Trimmed
from polybus.model.block import BlockSlice, gather
from polybus.model.commit import Append, Commit, CommitResult, RecordChange, Span, StoredRecord
from polybus.model.rows import EMPTY, Rows
from polybus.model.shard_routes import open_appends
from polybus.model.topic import ALL, All, Topic
from polybus.store import request_checks
from polybus.store.contract import Excess, ShardRange
from polybus.store.memory.memory_log import MemoryLog, MemoryShard
from polybus.store.memory.memory_producers import MemoryProducers


@dataclass(slots=True)
class MemoryStage:
    deadline_s: float
    appends: list[Append] = field(default_factory=list)


@dataclass(slots=True)
class Tombstone:
    """The next id and the ends of a dropped topic, where a new topic of the name continues."""

    next_id: int = 1
    ends: list[int] = field(default_factory=list)

    def end_of(self, shard: int) -> int:
        return self.ends[shard] if shard < len(self.ends) else 0


class Namespace:
    def __init__(self, wall_ns: Callable[[], int], clock_s: Callable[[], float]) -> None:
        self.producers = MemoryProducers()
        self._wall_ns = wall_ns
        self._clock_s = clock_s
        self._names: dict[str, MemoryLog] = {}
        self._logs: dict[int, MemoryLog] = {}
        self._tombstones: dict[str, Tombstone] = {}
        self._stages: dict[str, MemoryStage] = {}
        self._records: dict[bytes, StoredRecord] = {}
        self._last_number = 0
        self._last_version = 0

    # --- topics

    def create(self, name: str, shards: int, settings: dict[str, object]) -> Topic:
        if name in self._names:
            raise AlreadyExists(f"topic {name!r} already exists")
        self._last_number += 1
        topic = Topic(name, self._last_number, (shards,), settings)
        tombstone = self._tombstones.get(name, Tombstone())
        log = MemoryLog(topic, [], tombstone.next_id)
        self._open_shards(log)
        self._names[name] = self._logs[topic.number] = log
        return topic

    def configure(self, name: str, settings: dict[str, object], add_shards: int) -> Topic:
        log = self._log_by_name(name)
        generations = request_checks.added_generation(log.topic, add_shards)
        log.topic = replace(log.topic, settings=settings, generations=generations)
        self._open_shards(log)
        return log.topic

    def topics(self) -> list[Topic]:
        return [self._names[name].topic for name in sorted(self._names)]

    def drop(self, name: str) -> None:
        log = self._log_by_name(name)
        ends = [shard.end for shard in log.shards]
        before = self._tombstones.get(name, Tombstone())
        # A former topic of the name may have had more shards.
        ends += before.ends[len(ends) :]
        self._tombstones[name] = Tombstone(log.next_id, ends)
        del self._names[name], self._logs[log.topic.number]

    def log(self, number: int) -> MemoryLog:
        log = self._logs.get(number)
        if log is None:
            raise DoesNotExist(f"no topic has number {number}")
        return log

    def _log_by_name(self, name: str) -> MemoryLog:
        log = self._names.get(name)
        if log is None:
            raise DoesNotExist(f"there is no topic {name!r}")
        return log

    def _open_shards(self, log: MemoryLog) -> None:
        tombstone = self._tombstones.get(log.topic.name, Tombstone())
        for number in log.topic.shards[len(log.shards) :]:
            log.shards.append(
                MemoryShard(number, tombstone.end_of(number), tombstone.end_of(number))
            )

    # --- writing

    def commit(self, commit: Commit) -> CommitResult:
        first = self.producers.check_stamp(commit.stamp) if commit.stamp else None
        if first is not None:
            return first
        # Everything is checked before the first change, which then cannot fail.
        stages = [self._stage(stage) for stage in commit.stages]
        appends: list[Append] = []
        for append in commit.appends:
            topic = self.log(append.topic).topic
            request_checks.single_shard(topic, append.shard)
            appends += open_appends(topic, append)
        for append in (append for stage in stages for append in stage.appends):
            request_checks.open_shard(self.log(append.topic).topic, append.shard)
            appends.append(append)
        request_checks.spans(len({(append.topic, append.shard) for append in appends}))
        for change in commit.changes:
            record = self._records.get(change.key)
            version = record.version if record else 0
            if change.expected not in (None, version):
                raise Conflict(
                    f"record {change.key!r} has version {version}, expected {change.expected}"
                )
        # Ids run by topic and shard, within a shard in the order of the commit.
        appends.sort(key=lambda append: (append.topic, append.shard))
        spans, timestamp_ns = self._append(appends)
        for stage in commit.stages:
            del self._stages[stage]
        versions = tuple(self._change(change) for change in commit.changes)
        done = CommitResult(spans, timestamp_ns, versions, commit.note)
        if commit.stamp:
            self.producers.record_result(commit.stamp, done)
        return done

    def _append(self, appends: Sequence[Append]) -> tuple[tuple[Span, ...], int]:
        logs = [self.log(append.topic) for append in appends]
        # Times of a topic never decrease, even if the wall clock is set back.
        timestamp_ns = max([self._wall_ns(), *(log.timestamp_ns for log in logs)])
        spans: dict[tuple[int, int], Span] = {}
        for log, (topic, shard, block) in zip(logs, appends, strict=True):
            here = Span(topic, shard, log.shards[shard].end, log.next_id, 0)
            span = spans.get((topic, shard), here)
            spans[topic, shard] = span._replace(count=span.count + block.count)
            log.append(shard, block, timestamp_ns)
        return tuple(spans.values()), timestamp_ns

    def _change(self, change: RecordChange) -> int:
        if change.value is None:
            self._records.pop(change.key, None)
            return 0
        self._last_version += 1
        self._records[change.key] = StoredRecord(change.key, change.value, self._last_version)
        return self._last_version

    def trim(self, number: int, before: Mapping[int, int]) -> None:
        log = self.log(number)
        for shard, offset in request_checks.trims(log.topic, before).items():
            log.shards[shard].trim(offset)

    # --- stages

    def open_stage(self, lease_s: float) -> str:
        self._collect()
        name = secrets.token_hex(16)
        self._stages[name] = MemoryStage(self._clock_s() + lease_s)
        return name

    def stage(self, name: str, appends: Sequence[Append]) -> None:
        stage = self._stage(name)
        routed: list[Append] = []
        for append in appends:
            topic = self.log(append.topic).topic
            request_checks.single_shard(topic, append.shard)
            routed += open_appends(topic, append)
        stage.appends += routed

    def reroute_stage(self, name: str) -> bool:
        stage = self._stage(name)
        parts = [open_appends(self.log(append.topic).topic, append) for append in stage.appends]
        stage.appends = list(chain.from_iterable(parts))
        return False

    def staged_topics(self, names: Sequence[str]) -> frozenset[int]:
        self._collect()
        stages = [self._stages[name] for name in names if name in self._stages]
        return frozenset(append.topic for stage in stages for append in stage.appends)

    def renew(self, name: str, lease_s: float) -> None:
        self._stage(name).deadline_s = self._clock_s() + lease_s

    def discard(self, name: str) -> None:
        self._stages.pop(name, None)

    def _stage(self, name: str) -> MemoryStage:
        self._collect()
        stage = self._stages.get(name)
        if stage is None:
            raise StageGone(f"no stage {name!r}")
        return stage

    def _collect(self) -> None:
        now_s = self._clock_s()
        for name in [name for name, stage in self._stages.items() if stage.deadline_s <= now_s]:
            del self._stages[name]

    # --- reading

    def end(self, number: int, shard: int | All) -> int:
        log = self.log(number)
        if shard == ALL:
            return log.next_id
        return log.shards[request_checks.single_shard(log.topic, shard)].end

    def read(
        self, number: int, shard: int | All, start: int, end: int, max_rows: int, max_bytes: int
    ) -> Rows:
        log = self.log(number)
        request_checks.shard_of(log.topic, shard)
        if end <= start:
            return EMPTY
        if shard != ALL:
            pieces = _pieces(log.shards[shard], start, end, max_rows)
            return gather(pieces, max_rows=max_rows, max_bytes=max_bytes)
        pieces = [
            piece
            for source in log.shards
            for piece in source.pieces(source.offset_of_id(start), source.end, max_rows)
        ]
        return gather(pieces, from_id=start, below_id=end, max_rows=max_rows, max_bytes=max_bytes)

    def read_parts(
        self, number: int, parts: Sequence[ShardRange], max_rows: int, max_bytes: int
    ) -> Rows:
        log = self.log(number)
        pieces: list[BlockSlice] = []
        for shard, start, end, most in parts:
            request_checks.shard_of(log.topic, shard)
            if start < end:
                pieces += _pieces(log.shards[shard], start, end, most)
        return gather(pieces, max_rows=max_rows, max_bytes=max_bytes, by_piece=True)

    def find(self, number: int, shard: int | All, timestamp_ns: int) -> int:
        log = self.log(number)
        request_checks.shard_of(log.topic, shard)
        if shard == ALL:
            return log.id_of_time(timestamp_ns)
        return log.shards[shard].offset_of_time(timestamp_ns)

    def find_id(self, number: int, shard: int, message_id: int) -> int:
        log = self.log(number)
        request_checks.single_shard(log.topic, shard)
        return log.shards[shard].offset_of_id(message_id)

    def find_excess(self, number: int, keep_bytes: int) -> Excess:
        return self.log(number).find_excess(keep_bytes)

    def get(self, key: bytes) -> StoredRecord | None:
        return self._records.get(key)

    def scan(self, prefix: bytes, after: bytes, limit: int) -> list[StoredRecord]:
        keys = sorted(key for key in self._records if key.startswith(prefix) and key > after)
        return [self._records[key] for key in keys[:limit]]


def _pieces(source: MemoryShard, start: int, end: int, max_rows: int) -> list[BlockSlice]:
    if start < source.start:
        raise Trimmed(
            f"shard {source.number} starts at {source.start}, the read at {start}", source.start
        )
    return list(source.pieces(start, end, max_rows))
