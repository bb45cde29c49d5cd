"""Where topics are read: through a running bus, or from its files.

Each process of Spark keeps one way to each bus, and uses it again for later tasks: a
worker that was forked makes its own.

Where an id is in a shard: ids grow with offsets, so halving finds it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from polybus.errors import DoesNotExist, Trimmed, UsageError
from polybus.model.arrow import batch_of
from polybus.model.name_pattern import Pattern
from polybus.native import Client, ClientOptions
from polybus.spark.spark_options import STORE_SCHEME
from polybus.store.engine_registry import open_store

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.model.rows import Rows
    from polybus.store.contract import Store

Answer = TypeVar("Answer")

# A chunk that is copied out of the files at once: small enough to be still in the
# processor's cache when it is sent to Spark.
CHUNK_ROWS = 16_384
CHUNK_BYTES = 4 << 20
# A bus that is started again is waited for.
RECONNECT_OPTIONS = ClientOptions(connect_timeout_s=20.0)
NO_BOUND = 0
STORE = "store"  # what a bus calls its store within its data folder
MARK = "CURRENT"  # the file that every store has


class ShardOffsets(NamedTuple):
    """Offsets `start` to `end` (exclusive) are there."""

    start: int
    end: int


class LogAccess(Protocol):
    def list_topics(self, pattern: str) -> list[str]:
        """The durable topics that a pattern matches."""

    def shards(self, topic: str) -> dict[int, ShardOffsets]:
        """`DoesNotExist` if there is no such topic, `WrongKind` if it is ephemeral."""

    def find_time(self, topic: str, shard: int, timestamp_ns: int) -> int:
        """The first offset that came at this time or later; the end if none did."""

    def find_id(self, topic: str, shard: int, wanted: int) -> int:
        """The first offset whose id is this one or a later one; the end if there is none."""

    def read(
        self,
        topic: str,
        shard: int,
        start: int,
        end: int,
        max_rows: int = NO_BOUND,
        columns: Collection[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Batches of `polybus.model.arrow.READ_SCHEMA`; if `columns` are named, at least these,
        and `offset`. `Trimmed` if the start has gone.
        """

    def report_progress(
        self, query: str, name: str, topic: str, offsets: Mapping[int, int]
    ) -> None:
        """How far a query has come, for those who look at the topic."""


class BusLogAccess:
    def __init__(self, url: str) -> None:
        self._client = Client(url, RECONNECT_OPTIONS)

    def list_topics(self, pattern: str) -> list[str]:
        return [found["topic"] for found in self._client.topics(pattern)]

    def shards(self, topic: str) -> dict[int, ShardOffsets]:
        found = self._client.bounds(topic)["shards"]
        return {one["shard"]: ShardOffsets(one["start"], one["end"]) for one in found}

    def find_time(self, topic: str, shard: int, timestamp_ns: int) -> int:
        return self._client.find(topic, timestamp_ns, shard)

    def find_id(self, topic: str, shard: int, wanted: int) -> int:
        return first_with_id(self, topic, shard, self.shards(topic)[shard], wanted)

    def read(
        self,
        topic: str,
        shard: int,
        start: int,
        end: int,
        max_rows: int = NO_BOUND,
        columns: Collection[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        reading = self._client.read(topic, shard, start, end, max_rows=max_rows, columns=columns)
        try:
            yield from reading
        finally:
            reading.close()

    def report_progress(
        self, query: str, name: str, topic: str, offsets: Mapping[int, int]
    ) -> None:
        told = {str(shard): offset for shard, offset in offsets.items()}
        self._client.act("query.progress", query=query, name=name, topic=topic, offsets=told)


class StoreLogAccess:
    """Read-only: the bus may run or not. Nobody is told of the query's progress."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._store: Store = open_store(f"{STORE_SCHEME}{_folder_of(url)}", read_only=True)
        self._numbers: dict[str, int] = {}

    def list_topics(self, pattern: str) -> list[str]:
        wanted = Pattern(pattern)
        self._numbers = {topic.name: topic.number for topic in self._store.topics()}
        return [name for name in self._numbers if wanted.matches(name.encode())]

    def shards(self, topic: str) -> dict[int, ShardOffsets]:
        found = self._of(topic, self._store.bounds)
        return {number: ShardOffsets(one.start, one.end) for number, one in enumerate(found.shards)}

    def find_time(self, topic: str, shard: int, timestamp_ns: int) -> int:
        return self._of(topic, lambda number: self._store.find(number, shard, timestamp_ns))

    def find_id(self, topic: str, shard: int, wanted: int) -> int:
        return first_with_id(self, topic, shard, self.shards(topic)[shard], wanted)

    def read(
        self,
        topic: str,
        shard: int,
        start: int,
        end: int,
        max_rows: int = NO_BOUND,
        columns: Collection[str] | None = None,  # all are at hand, and cost nothing
    ) -> Iterator[pa.RecordBatch]:
        left = max_rows or end - start
        while start < end and left > 0:
            rows = self._of(topic, self._chunk(shard, start, end, min(left, CHUNK_ROWS)))
            if not rows.count:
                return
            batch = batch_of(rows)
            start = batch.column("offset")[-1].as_py() + 1
            left -= rows.count
            yield batch

    def report_progress(
        self, query: str, name: str, topic: str, offsets: Mapping[int, int]
    ) -> None:
        pass

    def _chunk(self, shard: int, start: int, end: int, rows: int) -> Callable[[int], Rows]:
        return lambda number: self._store.read(
            number, shard, start, end, max_rows=rows, max_bytes=CHUNK_BYTES
        )

    def _of(self, topic: str, ask: Callable[[int], Answer]) -> Answer:
        """Of the topic that has this name now: the one that is known may have been dropped."""
        try:
            return ask(self._number(topic))
        except DoesNotExist:
            self._numbers = {}
            return ask(self._number(topic))

    def _number(self, topic: str) -> int:
        if topic not in self._numbers:
            self.list_topics("*")
        if topic not in self._numbers:
            raise DoesNotExist(
                f"there is no topic {topic!r} in {self._url}: it was never made, or it is "
                "ephemeral, and those are not in the files of a bus"
            )
        return self._numbers[topic]


def _folder_of(url: str) -> Path:
    """A bus has its store in a folder of its data folder; either may be given."""
    folder = Path(url.removeprefix(STORE_SCHEME))
    for place in (folder, folder / STORE):
        if (place / MARK).is_file():
            return place
    raise UsageError(f"{url}: there is no store here; give the data folder of a bus: lmdb:PATH")


_open: dict[tuple[int, str], LogAccess] = {}
_lock = Lock()


def open_log_access(url: str, archive: str | None = None) -> LogAccess:
    """This process's way to a bus, and to the archive of its topics if there is one."""
    key = os.getpid(), url
    with _lock:
        if key not in _open:
            _open[key] = StoreLogAccess(url) if url.startswith(STORE_SCHEME) else BusLogAccess(url)
        found = _open[key]
    if archive is None:
        return found
    from polybus.spark.archive.archive_log_access import ArchiveLogAccess  # which knows this module

    return ArchiveLogAccess(found, archive)


def first_with_id(
    access: LogAccess, topic: str, shard: int, there: ShardOffsets, wanted: int
) -> int:
    """The first offset whose id is this one or a later one; the end if there is none."""
    low, high = there.start, there.end
    while low < high:
        middle = (low + high) // 2
        try:
            is_before = _id_at(access, topic, shard, middle) < wanted
        except Trimmed:  # since we looked
            is_before = True
        low, high = (middle + 1, high) if is_before else (low, middle)
    return low


def _id_at(access: LogAccess, topic: str, shard: int, offset: int) -> int:
    for batch in access.read(topic, shard, offset, offset + 1):
        return int(batch.column("id")[0].as_py())
    raise Trimmed(f"topic {topic!r}, shard {shard}: nothing is at {offset}", offset)
