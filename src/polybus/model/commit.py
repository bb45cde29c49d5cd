"""The one write verb, as a value: what is to be done, and what became of it.

A commit is atomic: all of it becomes visible at once and outlives a crash, or
none. Appends over any topics, publishing of stages and changes of records may
stand in one commit. Messages of one shard keep the order: the commit's appends
in the order given, then its stages in the order given. Ids run topic by topic,
shard by shard, by their numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from polybus.model.block import Block
    from polybus.model.stamp import Stamp

MAX_KEY_BYTES = 480  # LMDB's own limit is 511, and engines put a little before a key
MAX_RECORD_BYTES = 1 << 19  # with its headers it fits a message of JetStream's default 1 MiB
MAX_NOTE_BYTES = 1024
MAX_APPENDS = 4096
# Shards and their topics, records and stages that one commit touches, together: an atomic
# batch of JetStream has 1000 messages, and a few are the engine's own.
MAX_COMMIT_KEYS = 900
MAX_RECORD_CHANGES = MAX_COMMIT_KEYS


class Append(NamedTuple):
    """A block for the end of a shard."""

    topic: int
    shard: int
    block: Block


class RecordChange(NamedTuple):
    """Sets a record, or removes it (`value` None).

    `expected` is the version it must have: 0 if it must not exist, None if any will do.
    Versions are given by the store, never repeat for one key, also after it was removed,
    and say nothing beyond being equal or not. To remove what is not there is no fault.
    """

    key: bytes
    value: bytes | None
    expected: int | None = None


class StoredRecord(NamedTuple):
    key: bytes
    value: bytes
    version: int


class Commit(NamedTuple):
    """`note` is kept with the stamp, and comes back with the answer to a repeat."""

    appends: tuple[Append, ...] = ()
    stages: tuple[str, ...] = ()
    changes: tuple[RecordChange, ...] = ()
    stamp: Stamp | None = None
    note: bytes = b""


class Span(NamedTuple):
    """Where messages of one shard have come to stand: `count` offsets and ids from these on."""

    topic: int
    shard: int
    first_offset: int
    first_id: int
    count: int  # type: ignore[assignment]  # of tuple, which nobody asks here


class CommitResult(NamedTuple):
    """`spans` has one for each shard that got messages, by topic and shard.

    `timestamp_ns` is the wall clock's or, where that is behind, the newest of the topics
    that got messages: time never goes back within a topic.

    `versions` are those of the commit's changes, 0 for a removed record; an answer to a
    repeat carries the spans, time and note of the first time, and no versions.
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
