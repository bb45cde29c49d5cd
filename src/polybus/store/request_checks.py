"""Checks of the form of requests, which every engine makes before it executes one.

The checks know the stored data only as a `Topic` that the engine passes. Each function
returns the valid value or raises `UsageError` (for shards also `ShardSealed`) with the
limit. Engines call them first, so that a request that can never succeed changes nothing,
consumes no stamp, and is refused by all engines in the same way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from polybus.errors import LimitReached, ShardSealed, TooLarge, UsageError
from polybus.model import topic_name
from polybus.model.block import Block
from polybus.model.commit import (
    MAX_APPENDS,
    MAX_COMMIT_KEYS,
    MAX_KEY_BYTES,
    MAX_NOTE_BYTES,
    MAX_RECORD_BYTES,
    MAX_RECORD_CHANGES,
    Append,
    Commit,
    RecordChange,
)
from polybus.model.stamp import (
    MAX_DIGEST_BYTES,
    MAX_KEPT_RESULTS,
    MAX_PRODUCER_BYTES,
    ProducerOptions,
    Stamp,
)
from polybus.model.topic import ALL, MAX_SHARDS, MAX_TOTAL_SHARDS, All, Topic

if TYPE_CHECKING:
    from polybus.store.contract import ShardRange

MAX_NUMBER = (1 << 63) - 1  # positions, epochs and times are stored as int64
MAX_COUNTER = (1 << 64) - 1  # pirate's clients may use all of them

# Columns of a read are addressed by int32, which limits the size of one result.
MAX_ANSWER_BYTES = 1 << 30

# Shards that one commit may append to through stages: the result, which lists them, is
# stored with the stamp and counts them in 16 bits.
MAX_SPANS = (1 << 16) - 1


def require(holds: bool, text: str) -> None:
    if not holds:
        raise UsageError(text)


# --- topics


def new_topic(
    name: str, shards: int, settings: Mapping[str, object]
) -> tuple[str, int, dict[str, object]]:
    """Return the checked name, shards and settings. Raises `InvalidTopic` for the name."""
    topic_name.check_topic_name(name)
    require(1 <= shards <= MAX_SHARDS, f"shards must be 1 to {MAX_SHARDS}, got {shards}")
    return name, shards, topic_settings(settings)


def new_shards(count: int) -> int:
    require(0 <= count <= MAX_SHARDS, f"add_shards must be 0 to {MAX_SHARDS}, got {count}")
    return count


def added_generation(topic: Topic, count: int) -> tuple[int, ...]:
    """Return the generations with one of `count` shards added; none is added for 0."""
    total = len(topic.shards) + count
    if total > MAX_TOTAL_SHARDS:
        raise LimitReached(
            "max_total_shards",
            f"topic {topic.name} must have at most {MAX_TOTAL_SHARDS} shards in all generations,"
            f" got {total}; copy it to a new topic",
        )
    return (*topic.generations, count) if count else topic.generations


def topic_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """Return a deep copy, which the caller cannot change later."""
    try:
        copy = json.loads(json.dumps(dict(settings), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"settings of a topic must be JSON values: {error}") from None
    require(list(copy) == list(settings), "names of topic settings must be strings")
    return {name: copy[name] for name in copy}


def shard_of(topic: Topic, shard: int | All) -> int | All:
    """Return the shard if the topic has it, or `ALL`."""
    return ALL if shard == ALL else single_shard(topic, shard)


def single_shard(topic: Topic, shard: int) -> int:
    known = f"0 to {len(topic.shards) - 1}"
    require(shard in topic.shards, f"shard of topic {topic.name!r} must be {known}, got {shard!r}")
    return shard


def open_shard(topic: Topic, shard: int) -> int:
    """Return the shard if it can be appended to. Raises `ShardSealed` if not."""
    single_shard(topic, shard)
    if shard not in topic.open_shards:
        raise ShardSealed(f"shard {shard} of topic {topic.name!r} is sealed")
    return shard


def trims(topic: Topic, before: Mapping[int, int]) -> Mapping[int, int]:
    for shard, offset in before.items():
        single_shard(topic, shard)
        number(offset, "position")
    return before


# --- commits


def commit(commit: Commit) -> Commit:
    """Check a commit. This runs for every commit, so it skips empty parts and builds no text."""
    given, published, changed, stamped, note = commit
    appends(given)
    if stamped is not None:
        stamp(stamped)
    if note:
        _at_most(note, MAX_NOTE_BYTES, "note")
    if published or changed:
        _check_unique(published, "a commit must not publish a stage twice")
        changes(changed)
        places(given, len(published) + len(changed))
    return commit


def places(appends: Sequence[Append], others: int = 0) -> None:
    """Raise `TooLarge` if a commit or a call of `stage` would change too many keys."""
    if 2 * len(appends) + others <= MAX_COMMIT_KEYS:
        return  # even if each append goes to another topic and shard
    shards = {(append.topic, append.shard) for append in appends}
    touched = len(shards) + len({topic for topic, _ in shards}) + others
    if touched > MAX_COMMIT_KEYS:
        raise TooLarge(f"a commit must change at most {MAX_COMMIT_KEYS} keys, got {touched}")


def spans(count: int) -> None:
    """Raise `TooLarge` if the stages of a commit have blocks for too many shards."""
    if count > MAX_SPANS:
        raise TooLarge(f"a commit must append to at most {MAX_SPANS} shards, got {count}")


def appends(appends: Sequence[Append]) -> Sequence[Append]:
    if len(appends) > MAX_APPENDS:
        raise UsageError(f"appends must be at most {MAX_APPENDS}, got {len(appends)}")
    for _, _, block in appends:
        if not isinstance(block, Block):
            raise UsageError(f"append.block must be a Block, got {type(block).__name__}")
    if len(appends) > 1:
        places(appends)
    return appends


def changes(changes: Sequence[RecordChange]) -> Sequence[RecordChange]:
    require(
        len(changes) <= MAX_RECORD_CHANGES,
        f"changes must be at most {MAX_RECORD_CHANGES}, got {len(changes)}",
    )
    for change in changes:
        key(change.key)
        _at_most(change.value or b"", MAX_RECORD_BYTES, "record")
        number(change.expected or 0, "expected version")
    _check_unique([change.key for change in changes], "a commit must not change a record twice")
    return changes


def key(key: bytes) -> bytes:
    require(len(key) > 0, "record key must not be empty")
    return _at_most(key, MAX_KEY_BYTES, "record key")


# --- producers


def stamp(stamp: Stamp) -> Stamp:
    name, epoch, counter, digest = stamp
    producer(name)
    if not 1 <= epoch <= MAX_NUMBER:
        raise UsageError(f"epoch must be >= 1, got {epoch}")
    if not 1 <= counter <= MAX_COUNTER:
        raise UsageError(f"counter must be 1 to {MAX_COUNTER}, got {counter}")
    if digest:
        _at_most(digest, MAX_DIGEST_BYTES, "digest")
    return stamp


def producer(name: str) -> bytes:
    """Return the name of a producer as bytes."""
    try:
        raw = name.encode()
    except UnicodeEncodeError:
        raise UsageError(f"producer name must be UTF-8, got {name!r}") from None
    if not 1 <= len(raw) <= MAX_PRODUCER_BYTES:
        raise UsageError(f"producer name must have 1 to {MAX_PRODUCER_BYTES} bytes, got {name!r}")
    return raw


def producer_options(options: ProducerOptions) -> ProducerOptions:
    kept = options.kept_results
    require(
        1 <= kept <= MAX_KEPT_RESULTS, f"kept_results must be 1 to {MAX_KEPT_RESULTS}, got {kept}"
    )
    return options


def lease(lease_s: float) -> float:
    require(math.isfinite(lease_s) and lease_s >= 0, f"lease_s must be >= 0, got {lease_s}")
    return lease_s


# --- reading


def read(start: int, end: int | None, max_rows: int, max_bytes: int) -> tuple[int, int, int, int]:
    """Return start, end, rows and bytes of a read, limited to values that fit their fields."""
    number(start, "position")
    end = MAX_NUMBER if end is None else number(end, "position")
    if max_rows < 1:
        raise UsageError(f"max_rows must be >= 1, got {max_rows}")
    if max_bytes < 1:
        raise UsageError(f"max_bytes must be >= 1, got {max_bytes}")
    return start, end, min(max_rows, MAX_ANSWER_BYTES), min(max_bytes, MAX_ANSWER_BYTES)


def parts(
    given: Sequence[ShardRange], max_rows: int, max_bytes: int
) -> tuple[Sequence[ShardRange], int, int]:
    """Return the parts of a read, and its limits of rows and bytes."""
    for _, start, end, most in given:
        read(start, end, most, max_bytes)
    return given, *read(0, 0, max_rows, max_bytes)[2:]


def time_ns(timestamp_ns: int) -> int:
    fits = -MAX_NUMBER <= timestamp_ns <= MAX_NUMBER
    require(fits, f"timestamp_ns must fit into 64 bits, got {timestamp_ns}")
    return timestamp_ns


def message_id(wanted: int) -> int:
    require(abs(wanted) <= MAX_NUMBER, f"id must fit into 64 bits, got {wanted}")
    return wanted


def excess(keep_bytes: int, max_blocks: int) -> None:
    number(keep_bytes, "keep_bytes")
    require(max_blocks >= 1, f"max_blocks must be >= 1, got {max_blocks}")


def scan(prefix: bytes, after: bytes, limit: int) -> None:
    for part in (prefix, after):  # either may be empty
        _at_most(part, MAX_KEY_BYTES, "record key")
    require(limit >= 1, f"limit must be >= 1, got {limit}")


# --- helpers


def number(value: int, name: str) -> int:
    if not 0 <= value <= MAX_NUMBER:
        raise UsageError(f"{name} must be 0 to 2^63 - 1, got {value}")
    return value


def _at_most(data: bytes | str, limit: int, name: str) -> bytes:
    if isinstance(data, str):
        raise UsageError(f"{name} must be bytes, got a string")
    if len(data) > limit:
        raise UsageError(f"{name} must have at most {limit} bytes, got {len(data)}")
    return data


def _check_unique(items: Iterable[Hashable], text: str) -> None:
    items = list(items)
    require(len(set(items)) == len(items), text)
