"""What every engine asks of its callers before it does anything: the form of requests.

Nothing here knows what is stored, but for a `Topic` that the engine found. Each
function returns what is good, and raises `UsageError` (of shards also `ShardSealed`)
with the limit that was passed. Engines call them first, so that a request that can
never succeed changes nothing, uses up no stamp, and is refused by all in the same way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from polybus.errors import ShardSealed, TooLarge, UsageError
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
from polybus.model.topic import ALL, MAX_SHARDS, All, Topic

if TYPE_CHECKING:
    from polybus.store.contract import ShardRange

MAX_NUMBER = (1 << 63) - 1  # positions, epochs and times are stored as int64
MAX_COUNTER = (1 << 64) - 1  # pirate's clients may use all of them

# A read's columns are addressed by int32: more than this does not fit into one answer.
MAX_ANSWER_BYTES = 1 << 30

# Shards that get messages by one commit, by way of stages; its result is kept with its stamp.
MAX_SPANS = (1 << 16) - 1


def require(holds: bool, text: str) -> None:
    if not holds:
        raise UsageError(text)


# --- topics


def new_topic(
    name: str, shards: int, settings: Mapping[str, object]
) -> tuple[str, int, dict[str, object]]:
    """The name, shards and settings of a topic to be made; `InvalidTopic` for the name."""
    topic_name.check_topic_name(name)
    require(1 <= shards <= MAX_SHARDS, f"a topic has 1 to {MAX_SHARDS} shards, not {shards}")
    return name, shards, topic_settings(settings)


def new_shards(count: int) -> int:
    require(0 <= count <= MAX_SHARDS, f"0 to {MAX_SHARDS} shards can be added, not {count}")
    return count


def topic_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """A copy that shares nothing with what the caller holds."""
    try:
        copy = json.loads(json.dumps(dict(settings), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"settings of a topic must fit into JSON: {error}") from None
    require(list(copy) == list(settings), "names of settings must be strings")
    return {name: copy[name] for name in copy}


def shard_of(topic: Topic, shard: int | All) -> int | All:
    """A shard that the topic has, or `ALL`."""
    return ALL if shard == ALL else single_shard(topic, shard)


def single_shard(topic: Topic, shard: int) -> int:
    known = f"0 to {len(topic.shards) - 1}"
    require(shard in topic.shards, f"topic {topic.name!r} has shards {known}, not {shard!r}")
    return shard


def open_shard(topic: Topic, shard: int) -> int:
    """A shard that can be appended to."""
    single_shard(topic, shard)
    if shard not in topic.open_shards:
        raise ShardSealed(f"shard {shard} of topic {topic.name!r} is sealed")
    return shard


def trims(topic: Topic, before: Mapping[int, int]) -> Mapping[int, int]:
    for shard, offset in before.items():
        single_shard(topic, shard)
        position(offset)
    return before


# --- commits


def commit(commit: Commit) -> Commit:
    """Every commit comes by here, so what is empty is not looked at, nor is a text made."""
    given, published, changed, stamped, note = commit
    appends(given)
    if stamped is not None:
        stamp(stamped)
    if note:
        _at_most(note, MAX_NOTE_BYTES, "a note")
    if published or changed:
        stages(published)
        changes(changed)
        places(given, len(published) + len(changed))
    return commit


def places(appends: Sequence[Append], others: int = 0) -> None:
    """`TooLarge` if one commit, or one call of `stage`, would touch too much."""
    if 2 * len(appends) + others <= MAX_COMMIT_KEYS:
        return  # however they are spread
    shards = {(append.topic, append.shard) for append in appends}
    touched = len(shards) + len({topic for topic, _ in shards}) + others
    if touched > MAX_COMMIT_KEYS:
        raise TooLarge(f"a commit touches at most {MAX_COMMIT_KEYS} places, not {touched}")


def spans(count: int) -> None:
    """`TooLarge` if a commit's stages hold blocks for too many shards."""
    if count > MAX_SPANS:
        raise TooLarge(f"a commit has messages for at most {MAX_SPANS} shards, not {count}")


def appends(appends: Sequence[Append]) -> Sequence[Append]:
    if len(appends) > MAX_APPENDS:
        raise UsageError(f"at most {MAX_APPENDS} appends at a time")
    for _, _, block in appends:
        if not isinstance(block, Block):
            raise UsageError("appends carry blocks")
    if len(appends) > 1:
        places(appends)
    return appends


def stages(stages: Collection[str]) -> Collection[str]:
    _check_unique(stages, "a commit publishes a stage once")
    return stages


def changes(changes: Sequence[RecordChange]) -> Sequence[RecordChange]:
    require(
        len(changes) <= MAX_RECORD_CHANGES, f"at most {MAX_RECORD_CHANGES} changes in one commit"
    )
    for change in changes:
        key(change.key)
        _at_most(change.value or b"", MAX_RECORD_BYTES, "a record")
        number(change.expected or 0, "an expected version")
    _check_unique([change.key for change in changes], "a commit changes a record once")
    return changes


def key(key: bytes) -> bytes:
    require(len(key) > 0, "a record's key cannot be empty")
    return part_of_key(key)


def part_of_key(part: bytes) -> bytes:
    """A key, or the beginning of keys: may be empty."""
    return _at_most(part, MAX_KEY_BYTES, "a record's key")


# --- producers


def stamp(stamp: Stamp) -> Stamp:
    name, epoch, counter, digest = stamp
    producer(name)
    if not 1 <= epoch <= MAX_NUMBER:
        raise UsageError(f"epochs start at 1, not {epoch}")
    if not 1 <= counter <= MAX_COUNTER:
        raise UsageError(f"counters go from 1 to {MAX_COUNTER}, not {counter}")
    if digest:
        _at_most(digest, MAX_DIGEST_BYTES, "a digest")
    return stamp


def producer(name: str) -> bytes:
    """The producer's name as bytes."""
    try:
        raw = name.encode()
    except UnicodeEncodeError:
        raise UsageError(f"a producer's name must be UTF-8, not {name!r}") from None
    if not 1 <= len(raw) <= MAX_PRODUCER_BYTES:
        raise UsageError(f"a producer's name has 1 to {MAX_PRODUCER_BYTES} bytes: {name!r}")
    return raw


def producer_options(options: ProducerOptions) -> ProducerOptions:
    kept = options.kept_results
    require(1 <= kept <= MAX_KEPT_RESULTS, f"1 to {MAX_KEPT_RESULTS} results are kept, not {kept}")
    return options


def lease(lease_s: float) -> float:
    require(math.isfinite(lease_s) and lease_s >= 0, f"a lease is 0 s or longer, not {lease_s}")
    return lease_s


# --- reading


def position(position: int) -> int:
    return number(position, "a position")


def read(start: int, end: int | None, max_rows: int, max_bytes: int) -> tuple[int, int, int, int]:
    """Start, end, rows and bytes of a read, as numbers that fit where they go."""
    position(start)
    end = MAX_NUMBER if end is None else position(end)
    require(max_rows >= 1, f"max_rows is at least 1, not {max_rows}")
    require(max_bytes >= 1, f"max_bytes is at least 1, not {max_bytes}")
    return start, end, min(max_rows, MAX_ANSWER_BYTES), min(max_bytes, MAX_ANSWER_BYTES)


def parts(
    given: Sequence[ShardRange], max_rows: int, max_bytes: int
) -> tuple[Sequence[ShardRange], int, int]:
    """The parts of a read, and its rows and bytes."""
    for _, start, end, most in given:
        read(start, end, most, max_bytes)
    return given, *read(0, 0, max_rows, max_bytes)[2:]


def time_ns(timestamp_ns: int) -> int:
    fits = -MAX_NUMBER <= timestamp_ns <= MAX_NUMBER
    require(fits, f"a time in nanoseconds fits into 64 bits, not {timestamp_ns}")
    return timestamp_ns


def scan(prefix: bytes, after: bytes, limit: int) -> None:
    part_of_key(prefix)
    part_of_key(after)
    require(limit >= 1, f"limit is at least 1, not {limit}")


# --- what several of them need


def number(value: int, what: str) -> int:
    require(0 <= value <= MAX_NUMBER, f"{what} lies between 0 and 2^63 - 1, not at {value}")
    return value


def _at_most(data: bytes | str, limit: int, what: str) -> bytes:
    if isinstance(data, str):
        raise UsageError(f"{what} is bytes, not a string")
    if len(data) > limit:
        raise UsageError(f"{what} has at most {limit} bytes, not {len(data)}")
    return data


def _check_unique(items: Iterable[Hashable], text: str) -> None:
    items = list(items)
    require(len(set(items)) == len(items), text)
