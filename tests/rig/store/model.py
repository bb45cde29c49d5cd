"""The store's contract as lists of messages: slow, plain, and with no code of an engine.

Random programs run against it and the engines side by side. It differs from a store
where the contract leaves something open:

- a topic is known by a handle, its place in `topics`; engines choose numbers;
- a version is a serial number; engines choose versions;
- a request that fails raises `Refusal` with every error that an engine may give for it;
- `read` gives all there is; engines may give a part from the front.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from polybus.errors import (
    AlreadyExists,
    Conflict,
    DoesNotExist,
    Fenced,
    OutOfSequence,
    PolybusError,
    ShardSealed,
    StageGone,
    Stale,
    Trimmed,
    UnknownProducer,
    UsageError,
)

# insertion_ms, key, body, headers
Content = tuple[int, str | None, bytes, tuple[tuple[str, bytes], ...] | None]
Error = type[PolybusError]


class Refusal(Exception):
    """An engine must raise one of these errors."""

    def __init__(self, *errors: Error) -> None:
        super().__init__(*errors)
        self.errors = errors


class Entry(NamedTuple):
    id: int
    shard: int
    offset: int
    timestamp_ns: int
    content: Content


class Put(NamedTuple):
    """Messages to append to a shard of a topic."""

    topic: int
    shard: int
    contents: tuple[Content, ...]


class Wish(NamedTuple):
    """The new value of a record, None to remove it, and the expected serial."""

    key: bytes
    value: bytes | None
    expected: int | None


class Mark(NamedTuple):
    """A stamp."""

    producer: str
    epoch: int
    counter: int
    digest: bytes


@dataclass(frozen=True)
class Request:
    puts: tuple[Put, ...] = ()
    stages: tuple[int, ...] = ()
    wishes: tuple[Wish, ...] = ()
    mark: Mark | None = None
    note: bytes = b""


@dataclass(frozen=True)
class Result:
    """`spans` are (topic, shard, first offset, first id, count)."""

    spans: tuple[tuple[int, int, int, int, int], ...]
    timestamp_ns: int
    serials: tuple[int, ...]
    note: bytes
    duplicate: bool = False


@dataclass
class ModelTopic:
    name: str
    generations: list[int]
    settings: dict[str, object]
    next_id: int
    starts: list[int]
    ends: list[int]
    timestamp_ns: int = 0
    entries: list[Entry] = field(default_factory=list)  # in the order of their ids
    dropped: bool = False

    @property
    def first_open(self) -> int:
        return sum(self.generations[:-1])

    def of(self, shard: int | None) -> list[Entry]:
        """Return the entries of a shard, or of all shards if None."""
        return [entry for entry in self.entries if shard in (None, entry.shard)]


@dataclass
class ModelProducer:
    epoch: int = 0
    dense: bool = True
    kept: int = 1
    used: list[tuple[Mark, Result]] = field(default_factory=list)  # all stamps

    @property
    def last(self) -> int:
        return self.used[-1][0].counter if self.used else 0


class StoreModel:
    def __init__(self, wall_ns: Callable[[], int]) -> None:
        self.topics: list[ModelTopic] = []
        self.stages: list[list[Put] | None] = []  # None: gone
        self.records: dict[bytes, tuple[bytes, int]] = {}
        self.producers: dict[str, ModelProducer] = {}
        self._wall_ns = wall_ns
        self._serial = 0

    # --- topics

    def create(self, name: str, shards: int, settings: dict[str, object]) -> int:
        if self._named(name) is not None:
            raise Refusal(AlreadyExists)
        earlier = [topic for topic in self.topics if topic.name == name]
        next_id = max((topic.next_id for topic in earlier), default=1)
        topic = ModelTopic(name, [], settings, next_id, [], [])
        self.topics.append(topic)
        self._grow(topic, shards)
        return len(self.topics) - 1

    def configure(self, name: str, settings: dict[str, object], add_shards: int) -> None:
        topic = self._named(name)
        if topic is None:
            raise Refusal(DoesNotExist)
        topic.settings = settings
        if add_shards:
            self._grow(topic, add_shards)

    def drop(self, name: str) -> None:
        topic = self._named(name)
        if topic is None:
            raise Refusal(DoesNotExist)
        topic.dropped = True
        topic.entries.clear()

    def there(self) -> list[int]:
        """Return the handles of all topics, sorted by name."""
        handles = [at for at, topic in enumerate(self.topics) if not topic.dropped]
        return sorted(handles, key=lambda at: self.topics[at].name)

    def _named(self, name: str) -> ModelTopic | None:
        return next((t for t in self.topics if t.name == name and not t.dropped), None)

    def _topic(self, handle: int, shard: int | None = None) -> ModelTopic:
        topic = self.topics[handle]
        if topic.dropped:
            raise Refusal(DoesNotExist)
        if shard is not None and not 0 <= shard < len(topic.ends):
            raise Refusal(UsageError)
        return topic

    def _grow(self, topic: ModelTopic, shards: int) -> None:
        topic.generations.append(shards)
        while len(topic.ends) < sum(topic.generations):
            shard = len(topic.ends)
            same = [t for t in self.topics if t.name == topic.name and len(t.ends) > shard]
            start = max((other.ends[shard] for other in same), default=0)
            topic.starts.append(start)
            topic.ends.append(start)

    # --- writing

    def commit(self, request: Request) -> Result:
        self._judge_form(request)
        first = self._judge_mark(request.mark)
        if first is not None:
            return first
        self._judge_all_else(request)
        staged = [self.stages[stage] or [] for stage in request.stages]
        puts = self._routed(request.puts)
        puts += [put for stage in staged for put in stage]
        result = self._perform(request, puts)
        for stage in request.stages:
            self.stages[stage] = None
        if request.mark:
            self.producers[request.mark.producer].used.append((request.mark, result))
        return result

    def _judge_form(self, request: Request) -> None:
        keys = [wish.key for wish in request.wishes]
        if len(set(keys)) < len(keys) or len(set(request.stages)) < len(request.stages):
            raise Refusal(UsageError)

    def _judge_mark(self, mark: Mark | None) -> Result | None:
        if mark is None:
            return None
        producer = self.producers.get(mark.producer)
        if producer is None:
            raise Refusal(UnknownProducer)
        if mark.epoch != producer.epoch:
            raise Refusal(Fenced)
        if mark.counter > producer.last + 1 and producer.dense:
            raise Refusal(OutOfSequence)
        if mark.counter > producer.last:
            return None
        for used, result in producer.used[-producer.kept :]:
            if (used.counter, used.digest) == (mark.counter, mark.digest):
                return Result(result.spans, result.timestamp_ns, (), result.note, duplicate=True)
        raise Refusal(Stale)

    def _judge_all_else(self, request: Request) -> None:
        errors: list[Error] = []
        for put in request.puts:
            errors += self._faults_of(put)
        for stage in request.stages:
            staged = self.stages[stage]
            errors += [StageGone] if staged is None else []
            for put in staged or ():
                errors += self._faults_of(put)
                if put.shard < self.topics[put.topic].first_open:
                    errors.append(ShardSealed)
        for wish in request.wishes:
            serial = self.records.get(wish.key, (b"", 0))[1]
            errors += [Conflict] if wish.expected not in (None, serial) else []
        if errors:
            raise Refusal(*errors)

    def _faults_of(self, put: Put) -> list[Error]:
        topic = self.topics[put.topic]
        if topic.dropped:
            return [DoesNotExist]
        if not 0 <= put.shard < len(topic.ends):
            return [UsageError]
        return []

    def _routed(self, puts: Sequence[Put]) -> list[Put]:
        """Return the puts; those to sealed shards go to the open ones, by key."""
        routed: list[Put] = []
        for put in puts:
            topic = self.topics[put.topic]
            if put.shard >= topic.first_open:
                routed.append(put)
                continue
            by_shard: dict[int, list[Content]] = {}
            keyless = 0
            for content in put.contents:
                if content[1] is None:
                    place = put.shard + keyless // 256
                    keyless += 1
                else:
                    place = xxhash.xxh64_intdigest(content[1].encode())
                shard = topic.first_open + place % topic.generations[-1]
                by_shard.setdefault(shard, []).append(content)
            routed += [Put(put.topic, at, tuple(each)) for at, each in by_shard.items()]
        return routed

    def _perform(self, request: Request, puts: Sequence[Put]) -> Result:
        times = [self.topics[put.topic].timestamp_ns for put in puts]
        timestamp_ns = max([self._wall_ns(), *times])
        spans = []
        for handle, shard in sorted({(put.topic, put.shard) for put in puts}):
            mine = [put for put in puts if (put.topic, put.shard) == (handle, shard)]
            contents = [content for put in mine for content in put.contents]
            topic = self.topics[handle]
            spans.append((handle, shard, topic.ends[shard], topic.next_id, len(contents)))
            topic.timestamp_ns = timestamp_ns
            for content in contents:
                at = topic.next_id, shard, topic.ends[shard]
                topic.entries.append(Entry(*at, timestamp_ns, content))
                topic.next_id += 1
                topic.ends[shard] += 1
        serials = tuple(self._change(wish) for wish in request.wishes)
        return Result(tuple(spans), timestamp_ns, serials, request.note)

    def _change(self, wish: Wish) -> int:
        if wish.value is None:
            self.records.pop(wish.key, None)
            return 0
        self._serial += 1
        self.records[wish.key] = wish.value, self._serial
        return self._serial

    def open_producer(self, name: str, dense: bool, kept: int) -> tuple[int, int]:
        producer = self.producers.setdefault(name, ModelProducer())
        # A larger ring does not bring back results that a smaller one has dropped.
        producer.used = producer.used[-min(producer.kept, kept) :]
        producer.epoch, producer.dense, producer.kept = producer.epoch + 1, dense, kept
        return producer.epoch, producer.last

    def close_producer(self, name: str, epoch: int) -> None:
        if name not in self.producers:
            raise Refusal(UnknownProducer)
        if self.producers[name].epoch != epoch:
            raise Refusal(Fenced)
        del self.producers[name]

    # --- stages

    def open_stage(self) -> int:
        self.stages.append([])
        return len(self.stages) - 1

    def stage(self, stage: int, puts: Sequence[Put]) -> None:
        staged = self.stages[stage]
        errors: list[Error] = [StageGone] if staged is None else []
        for put in puts:
            errors += self._faults_of(put)
        if errors or staged is None:
            raise Refusal(*errors)
        staged += self._routed(puts)

    def renew(self, stage: int) -> None:
        if self.stages[stage] is None:
            raise Refusal(StageGone)

    def discard(self, stage: int) -> None:
        self.stages[stage] = None

    # --- trimming and reading

    def trim(self, handle: int, before: Mapping[int, int]) -> None:
        topic = self._topic(handle)
        for shard, offset in before.items():
            self._topic(handle, shard)
            if offset < 0:
                raise Refusal(UsageError)
        for shard, offset in before.items():
            topic.starts[shard] = max(topic.starts[shard], min(offset, topic.ends[shard]))
        topic.entries = [
            entry for entry in topic.entries if entry.offset >= topic.starts[entry.shard]
        ]

    def read(
        self,
        handle: int,
        shard: int | None,
        start: int,
        end: int | None,
        max_rows: int = 1,
        max_bytes: int = 1,
    ) -> list[Entry]:
        """Return entries of a shard by offset, or of all shards (None) by id, without a limit."""
        if min(start, 0 if end is None else end) < 0 or min(max_rows, max_bytes) < 1:
            raise Refusal(UsageError, DoesNotExist)
        topic = self._topic(handle, shard)
        if end is not None and end <= start:
            return []
        if shard is not None and start < topic.starts[shard]:
            raise Refusal(Trimmed)
        places = range(start, 1 << 63 if end is None else end)
        return [
            entry
            for entry in topic.of(shard)
            if (entry.id if shard is None else entry.offset) in places
        ]

    def find(self, handle: int, shard: int | None, timestamp_ns: int) -> int:
        topic = self._topic(handle, shard)
        for entry in topic.of(shard):
            if entry.timestamp_ns >= timestamp_ns:
                return entry.id if shard is None else entry.offset
        return topic.next_id if shard is None else topic.ends[shard]

    def find_id(self, handle: int, shard: int, wanted: int) -> int:
        topic = self._topic(handle, shard)
        offsets = (entry.offset for entry in topic.of(shard) if entry.id >= wanted)
        return next(offsets, topic.ends[shard])

    def scan(self, prefix: bytes, after: bytes, limit: int) -> list[bytes]:
        """Return the keys of the records."""
        return sorted(k for k in self.records if k.startswith(prefix) and k > after)[:limit]
