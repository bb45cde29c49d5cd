"""The one write operation of a store, as values: the commit and its result.

A commit is atomic: all of it becomes visible at once and survives a crash, or none of it.
It may append to any topics, publish stages and change records. Messages of one shard keep
their order: the appends in the order given, then the stages in the order given. Ids are
assigned topic by topic, shard by shard, in the order of their numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from polybus.model.block import Block
    from polybus.model.stamp import Stamp

MAX_KEY_BYTES = 480  # engines with keys of 511 bytes still have room for a prefix
MAX_RECORD_BYTES = 1 << 19  # fits a replicated log message of 1 MiB with its headers
MAX_NOTE_BYTES = 1024
MAX_APPENDS = 4096
# Shards, topics, records and stages that one commit may touch, together. A replicated log
# allows 1000 messages in an atomic batch, and the engine needs a few of its own.
MAX_COMMIT_KEYS = 900
MAX_RECORD_CHANGES = MAX_COMMIT_KEYS


class Append(NamedTuple):
    """A block to append to a shard."""

    topic: int
    shard: int
    block: Block


class RecordChange(NamedTuple):
    """Sets a record, or removes it if `value` is None.

    `expected` is the version that the record must have: 0 if it must not exist, None for
    any. The store assigns versions. They never repeat for one key, even after a removal,
    and can only be compared for equality. Removing an absent record is not an error.
    """

    key: bytes
    value: bytes | None
    expected: int | None = None


class StoredRecord(NamedTuple):
    key: bytes
    value: bytes
    version: int


class Commit(NamedTuple):
    """A commit. `note` is stored with the stamp and returned to a repeated request."""

    appends: tuple[Append, ...] = ()
    stages: tuple[str, ...] = ()
    changes: tuple[RecordChange, ...] = ()
    stamp: Stamp | None = None
    note: bytes = b""


class Span(NamedTuple):
    """The position of committed messages in one shard: `count` offsets and ids from these."""

    topic: int
    shard: int
    first_offset: int
    first_id: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used


class CommitResult(NamedTuple):
    """The result of a commit. `spans` has one entry per written shard, by topic and shard.

    `timestamp_ns` is the wall clock time, or the newest time of the written topics if that
    is later: time never goes back within a topic.

    `versions` are those of the changed records, 0 for a removed one. The result of a
    repeated commit has the spans, time and note of the first, and no versions.
    """

    spans: tuple[Span, ...] = ()
    timestamp_ns: int = 0
    versions: tuple[int, ...] = ()
    note: bytes = b""
    duplicate: bool = False

    def id_range(self) -> tuple[int, int] | None:
        """Return the first and the last message id, None if the commit wrote no messages."""
        if not self.spans:
            return None
        last = max(span.first_id + span.count for span in self.spans) - 1
        return min(span.first_id for span in self.spans), last
