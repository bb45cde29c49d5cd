"""The contract that every engine keeps; `polybus.testing.conformance` checks each by it.

What holds for all of it:

- Every method may be called from any thread, and blocks until it is done; `commit`
  and `stage` give a Future instead, so that many can be under way at once.
- What a method answered is on disk (`durability="interval"`: queued; then a crash may
  lose the last moments, whole commits only, the newest first).
- What one thread hands over takes effect in that order.
- Futures are resolved on a thread of the engine's, one at a time: a callback must be quick,
  and must not wait for the store. One that was cancelled in time was not done.
- Errors are those of `polybus.errors`, and mean that nothing was changed; but for
  `ConnectionLost`, after which the same stamp tells what became of it. Those of
  `commit` and `stage` come by the Future, all of them.

A topic is known by its number; a number that no topic has any more is
`DoesNotExist`, also while its data is still being removed. A shard that the topic
never had is a `UsageError`, as is all that breaks a limit or makes no sense in itself
(`polybus.store.request_checks`); appending to a sealed one is `ShardSealed`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
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
    """A shard has messages up to `end` (exclusive)."""

    topic: int
    shard: int
    end: int


class ShardRange(NamedTuple):
    """Messages of a shard from `start` to `end` (exclusive), at most `max_rows`."""

    shard: int
    start: int
    end: int
    max_rows: int


# Called once for each group of commits that became visible, on a thread of the engine.
Listener = Callable[[Sequence[ShardEnd]], None]

# Called with the bytes done and the approximate total.
Progress = Callable[[int, int], None]


def no_progress(done: int, total: int) -> None:
    """Ignore the progress."""


class Store(ABC):
    """One namespace: topics, producers and records that one commit can change together."""

    # --- topics

    @abstractmethod
    def create(self, name: str, shards: int, settings: Mapping[str, object]) -> Topic:
        """A new topic. `AlreadyExists` if it is there.

        Ids and offsets of a name that was dropped before go on where they ended: each
        shard at the highest offset that a shard of its number ever had.
        """

    @abstractmethod
    def configure(self, name: str, settings: Mapping[str, object], *, add_shards: int = 0) -> Topic:
        """Replaces the settings; with `add_shards` seals all shards and opens so many new ones.

        Sealed shards can be read and trimmed as before.
        """

    @abstractmethod
    def topics(self) -> list[Topic]:
        """All topics there are, by name."""

    @abstractmethod
    def drop(self, name: str) -> None:
        """Removes a topic and its messages. Its name's next id and offsets are kept.

        A stage with blocks for it can no longer be published, only discarded.
        """

    # --- writing

    @abstractmethod
    def commit(self, commit: Commit) -> Future[CommitResult]:
        """Does all of it or nothing; a repeated stamp gives the first result again.

        The form is judged first, then the stamp, then all else: a repeat is known as one
        also if its topic or stage is gone by now. The digest alone tells two requests of
        one counter apart, their content is not compared. An empty commit uses its stamp
        up. Which of several faults is named is the engine's choice.
        """

    def commit_all(self, commits: Sequence[Commit]) -> list[Future[CommitResult]]:
        """As many calls of `commit`, each by itself; an engine may take them in one step."""
        return [self.commit(one) for one in commits]

    @abstractmethod
    def open_producer(self, name: str, options: ProducerOptions) -> ProducerEpoch:
        """Makes the producer if need be, and raises its epoch: stamps of older ones are fenced."""

    @abstractmethod
    def look_up_producer(self, name: str) -> ProducerEpoch | None:
        """The producer as it is, with nothing raised; None if nobody has opened it."""

    @abstractmethod
    def close_producer(self, name: str, epoch: int) -> None:
        """Forgets a producer for good: opened again, it starts anew.

        `Fenced` if somebody has opened it since; `UnknownProducer` if it is not there.
        """

    @abstractmethod
    def open_stage(self, lease_s: float = LEASE_S) -> str:
        """A new, empty stage, which may be published as it is.

        Once its lease has run out (0: at once), it is gone for everyone; its blocks are
        collected some time later.
        """

    @abstractmethod
    def stage(self, stage: str, appends: Sequence[Append]) -> Future[None]:
        """Stores blocks that nobody sees until the stage is published by a commit.

        The shards must be open now, and again when it is published. `StageGone` if it
        was published, discarded or its lease has run out.
        """

    @abstractmethod
    def renew(self, stage: str, lease_s: float = LEASE_S) -> None:
        """The lease runs from now on. `StageGone` if it was collected."""

    @abstractmethod
    def discard(self, stage: str) -> None:
        """Removes a stage; one that is gone already is left alone."""

    @abstractmethod
    def trim(self, topic: int, before: Mapping[int, int]) -> None:
        """Removes the messages of each shard before an offset, at most all there are.

        Never moves a start back: an offset before it does nothing.
        """

    # --- reading

    @abstractmethod
    def bounds(self, topic: int) -> Bounds: ...

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
        """Messages from `start` to `end` (exclusive): offsets of a shard, ids of `ALL`.

        At least one if there is any, then as many as the bounds allow; an engine may give
        fewer, and gives none only if there are none: also from beyond the end, or if
        `end` is not behind `start`. A shard's messages that were trimmed are `Trimmed`;
        `ALL` passes over them.
        """

    def read_parts(
        self,
        topic: int,
        parts: Sequence[ShardRange],
        *,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_READ_BYTES,
    ) -> Rows:
        """The same of several shards, one after the other in the order of the parts.

        The bounds are for all of them together. `Trimmed` if a part begins before its shard.
        """
        for shard, start, end, most in parts:
            bounds = {"max_rows": min(max_rows, most), "max_bytes": max_bytes}
            rows = self.read(topic, shard, start, end, **bounds)
            if rows.count:
                return rows
        return EMPTY

    @abstractmethod
    def find(self, topic: int, shard: int | All, timestamp_ns: int) -> int:
        """The first offset (id, of `ALL`) that came at this time or later; the end if none.

        Only what is still there counts.
        """

    @abstractmethod
    def get(self, key: bytes) -> StoredRecord | None: ...

    @abstractmethod
    def scan(self, prefix: bytes, after: bytes = b"", limit: int = 1000) -> list[StoredRecord]:
        """Records whose keys begin so and come behind `after`, in order; at most `limit`."""

    @abstractmethod
    def watch(self, listener: Listener) -> Callable[[], None]:
        """Calls the listener with what has become visible, until the answer is called.

        The messages can be read by then. A listener that raises is logged, and stays.
        """

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

    # --- the end

    @abstractmethod
    def close(self) -> None:
        """Finishes what was handed over, and lets go. Later calls are `StoreClosed`.

        Closing again does nothing, nor does ending a watch after that.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
