"""Access to the log of topics: through a running bus, or from the files of its store.

Each process keeps one access object per bus and reuses it for later tasks. A forked worker opens
its own.

Within a shard ids grow with offsets, so `first_with_id` finds an id by bisection.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from threading import Lock
from typing import NamedTuple, TypeVar

import pyarrow as pa

from polybus.errors import DoesNotExist, Trimmed
from polybus.model.arrow import batch_of
from polybus.model.name_pattern import Pattern
from polybus.model.rows import Rows
from polybus.native import Client, ClientOptions
from polybus.native.protocol.requests import QueryProgress
from polybus.store.contract import Store
from polybus.store.engine_registry import find_store, is_store_url, open_store

Answer = TypeVar("Answer")

# Rows copied from the store at once: small enough to be in the processor's cache when the chunk
# is sent to Spark.
CHUNK_ROWS = 16_384
CHUNK_BYTES = 4 << 20
# Long enough for a restart of the bus.
RECONNECT_OPTIONS = ClientOptions(connect_timeout_s=20.0)


class ShardOffsets(NamedTuple):
    """Offsets `start` to `end` (exclusive) are in the log."""

    start: int
    end: int


class LogAccess(ABC):
    """How a query reads topics."""

    @abstractmethod
    def list_topics(self, pattern: str) -> list[str]:
        """Return the names of the durable topics that a pattern matches."""

    @abstractmethod
    def shards(self, topic: str) -> dict[int, ShardOffsets]:
        """Return the offsets of each shard.

        Raises `DoesNotExist` if there is no such topic, `WrongKind` if it is ephemeral.
        """

    @abstractmethod
    def find_time(self, topic: str, shard: int, timestamp_ns: int) -> int:
        """Return the first offset whose timestamp is not before this time; the end if there is
        none.
        """

    def find_id(self, topic: str, shard: int, wanted: int) -> int:
        """Return the first offset whose id is >= `wanted`; the end if there is none."""
        return first_with_id(self, topic, shard, self.shards(topic)[shard], wanted)

    @abstractmethod
    def read(
        self, topic: str, shard: int, start: int, end: int, columns: Collection[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield batches of `polybus.model.arrow.READ_SCHEMA`.

        If `columns` are given, batches may have only these and `offset`. Raises `Trimmed` if offset
        `start` was trimmed.
        """

    @abstractmethod
    def report_progress(
        self, query: str, name: str, topic: str, offsets: Mapping[int, int]
    ) -> None:
        """Report the position of a query, which the topic's statistics show as lag."""


class BusLogAccess(LogAccess):
    """Reads through the native port of a running bus."""

    def __init__(self, url: str) -> None:
        self._client = Client(url, RECONNECT_OPTIONS)

    def list_topics(self, pattern: str) -> list[str]:
        return [topic["topic"] for topic in self._client.topics(pattern)]

    def shards(self, topic: str) -> dict[int, ShardOffsets]:
        shards = self._client.bounds(topic)["shards"]
        return {shard["shard"]: ShardOffsets(shard["start"], shard["end"]) for shard in shards}

    def find_time(self, topic: str, shard: int, timestamp_ns: int) -> int:
        return self._client.find(topic, timestamp_ns, shard)

    def read(
        self, topic: str, shard: int, start: int, end: int, columns: Collection[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        batches = self._client.read(topic, shard, start, end, columns=columns)
        try:
            yield from batches
        finally:
            # Ends the call on the bus also if the task stops before the last batch.
            batches.close()

    def report_progress(
        self, query: str, name: str, topic: str, offsets: Mapping[int, int]
    ) -> None:
        by_shard = {str(shard): offset for shard, offset in offsets.items()}
        self._client.call(QueryProgress(query=query, name=name, topic=topic, offsets=by_shard))


class StoreLogAccess(LogAccess):
    """Reads the files of a store, whether or not its bus is running. Reports no progress."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._store: Store = open_store(find_store(url).url, read_only=True)
        self._numbers: dict[str, int] = {}

    def list_topics(self, pattern: str) -> list[str]:
        wanted = Pattern(pattern)
        self._numbers = {topic.name: topic.number for topic in self._store.topics()}
        return [name for name in self._numbers if wanted.matches(name.encode())]

    def shards(self, topic: str) -> dict[int, ShardOffsets]:
        shards = self._call(topic, self._store.bounds).shards
        return {number: ShardOffsets(shard.start, shard.end) for number, shard in enumerate(shards)}

    def find_time(self, topic: str, shard: int, timestamp_ns: int) -> int:
        return self._call(topic, lambda number: self._store.find(number, shard, timestamp_ns))

    def read(
        self, topic: str, shard: int, start: int, end: int, columns: Collection[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        # `columns` is ignored: a block of the store holds all columns together.
        def read_chunk(number: int) -> Rows:
            return self._store.read(
                number, shard, start, end, max_rows=CHUNK_ROWS, max_bytes=CHUNK_BYTES
            )

        while start < end:
            rows = self._call(topic, read_chunk)
            if not rows.count:
                return
            batch = batch_of(rows)
            start = batch.column("offset")[-1].as_py() + 1
            yield batch

    def report_progress(
        self, query: str, name: str, topic: str, offsets: Mapping[int, int]
    ) -> None:
        pass

    def _call(self, topic: str, method: Callable[[int], Answer]) -> Answer:
        """Call a method of the store with the topic's number.

        Retries once with fresh numbers: the topic may have been dropped and created again.
        """
        try:
            return method(self._number(topic))
        except DoesNotExist:
            self._numbers = {}
            return method(self._number(topic))

    def _number(self, topic: str) -> int:
        if topic not in self._numbers:
            self.list_topics("*")
        if topic not in self._numbers:
            raise DoesNotExist(
                f"there is no topic {topic!r} in {self._url}: it was never created, or it is "
                "ephemeral and therefore not in the store"
            )
        return self._numbers[topic]


_open: dict[tuple[int, str], LogAccess] = {}
_lock = Lock()


def open_log_access(url: str, archive: str | None = None) -> LogAccess:
    """Return this process's access to a bus, combined with the archive of its topics if one is
    given.
    """
    # Keyed by process: connections and store handles must not be used after a fork.
    key = os.getpid(), url
    with _lock:
        if key not in _open:
            _open[key] = StoreLogAccess(url) if is_store_url(url) else BusLogAccess(url)
        access = _open[key]
    if archive is None:
        return access
    from polybus.spark.archive.archive_log_access import ArchiveLogAccess  # imports this module

    return ArchiveLogAccess(access, archive)


def first_with_id(
    access: LogAccess, topic: str, shard: int, in_log: ShardOffsets, wanted: int
) -> int:
    """Return the first offset whose id is >= `wanted`; the end if there is none."""
    low, high = in_log.start, in_log.end
    while low < high:
        middle = (low + high) // 2
        try:
            batches = list(access.read(topic, shard, middle, middle + 1))
        except Trimmed:
            batches = []
        # A missing row was trimmed after the caller read the bounds, so the id is after it.
        if not batches or batches[0].column("id")[0].as_py() < wanted:
            low = middle + 1
        else:
            high = middle
    return low
