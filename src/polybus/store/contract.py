"""The contract of a store; `polybus.testing.conformance` checks an engine against it.

Rules for all methods:

- A method may be called from any thread and blocks until it is done. `commit` and
  `stage` return a Future instead, so that one thread can have many in flight.
- When a method returns or its Future resolves, the change is on disk. With
  `durability="interval"` it is queued: a crash may lose the newest commits, each as a whole.
- Requests of one thread take effect in the order of the calls.
- Futures resolve on a thread of the engine, one at a time. A callback must be quick and
  must not wait for the store. A Future that was cancelled in time was not executed.
- Errors are those of `polybus.errors` and mean that nothing was changed. The exception is
  `ConnectionLost`, after which a commit with the same stamp returns the outcome. `commit`
  and `stage` report every error by their Future.

Methods take a topic by its number. They raise `DoesNotExist` if no topic has the number,
also while the data of a dropped topic is being removed. They raise `UsageError` if the topic
never had the shard and if a request exceeds a limit or is malformed
(`polybus.store.request_checks`).

A block for a sealed shard goes to the open shards instead, split by key
(`polybus.model.shard_routes`). So a block that was built before a reshard and arrives after
it is neither lost nor out of order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple, Self

from polybus.errors import NotSupported
from polybus.model.rows import EMPTY

if TYPE_CHECKING:
    from pathlib import Path

    from polybus.model.commit import Append, Commit, CommitResult, StoredRecord
    from polybus.model.rows import Rows
    from polybus.model.stamp import ProducerEpoch, ProducerOptions
    from polybus.model.topic import All, Bounds, Topic

LEASE_S = 600.0
MAX_ROWS = 65_536
MAX_READ_BYTES = 16 << 20


class ShardEnd(NamedTuple):
    """The end offset of a shard (exclusive)."""

    topic: int
    shard: int
    end: int


class ShardRange(NamedTuple):
    """Messages of a shard from `start` to `end` (exclusive), at most `max_rows` of them."""

    shard: int
    start: int
    end: int
    max_rows: int


class Excess(NamedTuple):
    """Offsets by shard at which to trim; `has_more` if the search has stopped at its limit."""

    before: dict[int, int]
    has_more: bool


class DamagedTopic(NamedTuple):
    """A topic that the store refuses, and the reason with the next steps for people.

    The topic has its number and its name, or `damaged-NUMBER` if that is lost. Shards and
    settings may be unknown.
    """

    topic: Topic
    reason: str


# Called with a topic's number and the damage that a read has met, on any thread.
DamageListener = Callable[[int, str], None]

# Called once for each group of commits that became visible, on a thread of the engine.
Listener = Callable[[Sequence[ShardEnd]], None]

# Called with the bytes done and the approximate total.
Progress = Callable[[int, int], None]


def no_progress(done: int, total: int) -> None:
    """Ignore the progress."""


class Store(ABC):
    """One namespace: topics, producers and records that one commit can change atomically."""

    # --- topics

    @abstractmethod
    def create(self, name: str, shards: int, settings: Mapping[str, object]) -> Topic:
        """Create a topic. Raises `AlreadyExists` if the name is taken.

        If a topic of this name was dropped before, ids and offsets continue: each shard
        starts at the highest end that a shard of its number ever had.
        """

    @abstractmethod
    def configure(self, name: str, settings: Mapping[str, object], *, add_shards: int = 0) -> Topic:
        """Replace the settings. With `add_shards`, seal all shards and open that many new ones.

        Sealed shards can still be read and trimmed.
        """

    @abstractmethod
    def topics(self) -> list[Topic]:
        """Return all topics but the damaged ones, sorted by name."""

    def damaged_topics(self) -> list[DamagedTopic]:
        """Return the topics whose records are damaged, sorted by name.

        While the store is open for writing, every call for one of them raises `Damaged`, and
        no other topic can get its name. The default is for engines that keep no files.
        """
        return []

    @abstractmethod
    def drop(self, name: str) -> None:
        """Remove a topic and its messages. The store keeps the next id and offsets of the name.

        A stage with blocks for the topic can no longer be published, only discarded.
        """

    # --- writing

    @abstractmethod
    def commit(self, commit: Commit) -> Future[CommitResult]:
        """Execute all of a commit or nothing. A repeated stamp returns the first result again.

        The engine checks the form first, then the stamp, then the rest: a repeat is
        recognised even if its topic or stage no longer exists. Two requests with the same
        counter differ only by their digest; the content is not compared. An empty commit
        consumes its stamp. If a commit has several faults, the engine may report any of them.
        """

    def commit_all(self, commits: Sequence[Commit]) -> list[Future[CommitResult]]:
        """Call `commit` for each. An engine may take all of them over in one step."""
        return [self.commit(commit) for commit in commits]

    @abstractmethod
    def open_producer(self, name: str, options: ProducerOptions) -> ProducerEpoch:
        """Create the producer if it is missing and raise its epoch, which fences older stamps."""

    @abstractmethod
    def look_up_producer(self, name: str) -> ProducerEpoch | None:
        """Return the producer without raising its epoch, or None if it does not exist."""

    @abstractmethod
    def close_producer(self, name: str, epoch: int) -> None:
        """Remove a producer. If it is opened again, its epoch and counter start from zero.

        Raises `Fenced` if its epoch is newer and `UnknownProducer` if it does not exist.
        """

    @abstractmethod
    def open_stage(self, lease_s: float = LEASE_S) -> str:
        """Create an empty stage and return its name. It may be published while empty.

        When the lease expires (with 0, immediately), the stage is gone; the engine removes
        its blocks later.
        """

    @abstractmethod
    def stage(self, stage: str, appends: Sequence[Append]) -> Future[None]:
        """Store blocks that stay invisible until a commit publishes the stage.

        A commit raises `ShardSealed` for a stage with blocks for shards that were sealed
        meanwhile: see `reroute_stage`. Raises `StageGone` if the stage was published or
        discarded, or if its lease expired.
        """

    @abstractmethod
    def reroute_stage(self, stage: str) -> bool:
        """Move blocks of a stage from sealed shards to open ones, split by key.

        One call moves a bounded part and renews the lease. Returns whether there may be more to
        move. Messages of one key keep their order. Raises `StageGone`.
        """

    @abstractmethod
    def staged_topics(self, stages: Sequence[str]) -> frozenset[int]:
        """Return the topics that stages have blocks for. A stage that is gone has none."""

    @abstractmethod
    def renew(self, stage: str, lease_s: float = LEASE_S) -> None:
        """Restart the lease. Raises `StageGone` if the stage no longer exists."""

    @abstractmethod
    def discard(self, stage: str) -> None:
        """Remove a stage. Does nothing if it no longer exists."""

    @abstractmethod
    def trim(self, topic: int, before: Mapping[int, int]) -> None:
        """Remove the messages of each shard before an offset, which is limited to its end.

        An offset before the start of the shard has no effect.
        """

    # --- reading

    @abstractmethod
    def bounds(self, topic: int) -> Bounds:
        """Return the range of ids of a topic, and the range of offsets of each shard."""

    @abstractmethod
    def end(self, topic: int, shard: int | All) -> int:
        """Return the end of a shard, or with `ALL` the next id of the topic.

        Readers that wait at the end ask after every commit, so an engine visits no other shard.
        """

    @abstractmethod
    def read(
        self,
        topic: int,
        shard: int | All,
        start: int,
        end: int | None = None,
        *,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_READ_BYTES,
    ) -> Rows:
        """Return messages from `start` to `end` (exclusive): offsets of a shard, ids of `ALL`.

        If there are messages in the range, the result has at least one, even if it exceeds
        `max_bytes`, and at most `max_rows`; an engine may return fewer. The result is empty
        if `start` is at or after the end of the shard, or not before `end`. Raises `Trimmed`
        if `start` is before the start of the shard; with `ALL`, trimmed ids are skipped.
        """

    def read_parts(
        self,
        topic: int,
        parts: Sequence[ShardRange],
        *,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_READ_BYTES,
    ) -> Rows:
        """Read from several shards, one after the other in the order of the parts.

        The limits apply to the whole result. Raises `Trimmed` if a part starts before its shard.
        """
        for shard, start, end, most in parts:
            bounds = {"max_rows": min(max_rows, most), "max_bytes": max_bytes}
            rows = self.read(topic, shard, start, end, **bounds)
            if rows.count:
                return rows
        return EMPTY

    @abstractmethod
    def find(self, topic: int, shard: int | All, timestamp_ns: int) -> int:
        """Return the first offset (for `ALL`, id) with this time or a later one.

        Returns the end if there is none. Trimmed messages do not count.
        """

    def find_id(self, topic: int, shard: int, message_id: int) -> int:
        """Return the first offset of a shard with this id or a higher one.

        Returns the end if there is none. Trimmed messages do not count. The default raises
        `NotSupported`, and then topics of the engine have no retention by number of messages.
        """
        raise NotSupported("this engine does not find messages by id")

    def find_excess(self, topic: int, keep_bytes: int, max_blocks: int) -> Excess:
        """Return where to trim a topic that has more than `keep_bytes`.

        The oldest blocks go first, in the order of the last id of each, and a block goes only if
        the blocks that stay have at least `keep_bytes`. Trimmed blocks that the engine has not
        removed yet do not count. Looks at `max_blocks` at most, so a large excess takes several
        calls. An engine that keeps no files may look at all. The default raises `NotSupported`:
        no retention by size.
        """
        raise NotSupported("this engine does not find messages by size")

    @abstractmethod
    def get(self, key: bytes) -> StoredRecord | None:
        """Return a record, or None if there is none."""

    @abstractmethod
    def scan(self, prefix: bytes, after: bytes = b"", limit: int = 1000) -> list[StoredRecord]:
        """Return at most `limit` records with this prefix and keys after `after`, in order."""

    @abstractmethod
    def watch(self, listener: Listener) -> Callable[[], None]:
        """Call the listener after commits become visible. Returns a function that ends this.

        The messages can be read when the listener is called. Calls of a listener come in the
        order of the commits and do not overlap. If it raises, the engine logs the error and
        keeps the listener.
        """

    def watch_damage(self, listener: DamageListener) -> None:  # noqa: B027 -- optional
        """Call the listener whenever a read meets damage. The default never does."""

    # --- maintenance, for engines that have use for it

    def yield_to(self, foreground: Callable[[], int]) -> None:  # noqa: B027 -- optional
        """Keep transactions small while the count that `foreground` returns keeps growing.

        It counts work of other threads whose callers wait. The default ignores it.
        """

    def compact(self, progress: Progress = no_progress) -> tuple[int, int]:
        """Return free space to the file system. Returns the file's bytes before and after.

        Commits wait until it is done. Raises `NotSupported` if the engine keeps no files.
        """
        raise NotSupported("this engine has no files to compact")

    def backup(self, target: Path, progress: Progress = no_progress) -> int:
        """Copy the store as it is now to a missing or empty folder. Returns the bytes written.

        Commits go on meanwhile. Raises `NotSupported` if the engine keeps no files.
        """
        raise NotSupported("this engine has no files to back up")

    # --- close

    @abstractmethod
    def close(self) -> None:
        """Finish the submitted requests and release the store.

        Later calls raise `StoreClosed`. Closing again and ending a watch do nothing.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
