"""The records of a group: one for its members, and one for each shard.

    group/TTTTTTTT 0 GROUP              the roster
    groupshard/TTTTTTTT 0 GROUP 0 SSSS  the progress of the group in a shard
    groupmark/TTTTTTTT                  the first epoch that no removed group of the topic used

T is the topic's number and S the shard's, in hex; 0 is a NUL, which no name contains. Values
are JSON; a mark is a number. A group that is created again begins at the mark, so that members
of the removed group have no valid epoch in the new one. Rosters have their own prefix, so that
a starting bus finds all groups without reading all shards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from polybus.errors import Damaged, MalformedRequest
from polybus.model.offset_ranges import Ranges, count_offsets

ROSTERS: Final = b"group/"
SHARDS: Final = b"groupshard/"
MARKS: Final = b"groupmark/"

# Of a group's or consumer's name. A host, a pid and a word fit, and a roster with max_members
# stays below the size limit of a record.
MAX_NAME_BYTES: Final = 128


@dataclass(frozen=True, slots=True)
class Member:
    """A consumer that has joined, with its settings."""

    epoch: int
    max_deliver: int
    heartbeat_ms: int
    dead_ms: int


@dataclass(frozen=True, slots=True)
class Roster:
    """The members of a group. `generation` counts changes; the group counts against `creator`.

    A paused group hands out no messages.
    """

    generation: int = 0
    next_epoch: int = 1
    members: Mapping[str, Member] = field(default_factory=dict)
    creator: str = ""
    is_paused: bool = False


EMPTY_MAP: Final[Mapping[Any, int]] = {}


class ShardProgress(NamedTuple):
    """The progress of a group in one shard, and the owner of the shard.

    `epoch` rises with every assignment; `member` is the member epoch of the owner. Acks are
    counted from `start`. `attempts` are failed runs of messages that are not acked. Messages
    below `suspect_to` may have been running when a consumer died. `emitted` and `redelivered`
    are totals of earlier owners; those of the current owner are in `counted`.
    """

    epoch: int = 0
    owner: str | None = None
    member: int = 0
    start: int = 0
    low: int = 0
    ranges: Ranges = ()
    attempts: Mapping[int, int] = EMPTY_MAP
    suspect_to: int = 0
    emitted: int = 0
    redelivered: int = 0
    counted: tuple[int, int] = (0, 0)
    dead_lettered: int = 0
    trimmed_unread: int = 0
    latency: Mapping[str, int] = EMPTY_MAP
    expired: int = 0

    @property
    def acked(self) -> int:
        return self.low - self.start + count_offsets(self.ranges)


# --- keys


def roster_prefix(topic: int) -> bytes:
    return ROSTERS + b"%08x\0" % topic


def shard_prefix(topic: int, group: str) -> bytes:
    return SHARDS + b"%08x\0" % topic + group.encode() + b"\0"


def roster_key(topic: int, group: str) -> bytes:
    return roster_prefix(topic) + group.encode()


def shard_key(topic: int, group: str, shard: int) -> bytes:
    return SHARDS + b"%08x\0%s\0%04x" % (topic, group.encode(), shard)


def mark_key(topic: int) -> bytes:
    return MARKS + b"%08x" % topic


def read_roster_key(key: bytes) -> tuple[int, str]:
    """Return the topic's number and the group's name. Raises `Damaged`."""
    number, _, name = key[len(ROSTERS) :].partition(b"\0")
    try:
        return int(number, 16), name.decode()
    except ValueError:
        raise Damaged(f"invalid key of a group: {key!r}") from None


def read_shard_key(key: bytes) -> int:
    """Return the shard's number. Raises `Damaged`."""
    try:
        return int(key[-4:], 16)
    except ValueError:
        raise Damaged(f"invalid key of a group's shard: {key!r}") from None


def read_mark_key(key: bytes) -> int:
    """Return the topic's number. Raises `Damaged`."""
    try:
        return int(key[len(MARKS) :], 16)
    except ValueError:
        raise Damaged(f"invalid key of a topic's mark: {key!r}") from None


def check_name(kind: str, name: str) -> str:
    """Return the name of a group or consumer. Raises `MalformedRequest` if it is invalid."""
    if not 1 <= len(name.encode()) <= MAX_NAME_BYTES:
        raise MalformedRequest(f"{kind} name must have 1 to {MAX_NAME_BYTES} bytes")
    if any(char < " " or "\x7f" <= char < "\xa0" for char in name):
        raise MalformedRequest(f"{kind} name must have no control characters, got {name!r}")
    return name


# --- values


def encode_roster(roster: Roster) -> bytes:
    members = {
        name: [member.epoch, member.max_deliver, member.heartbeat_ms, member.dead_ms]
        for name, member in roster.members.items()
    }
    fields = {
        "generation": roster.generation,
        "next_epoch": roster.next_epoch,
        "members": members,
        "creator": roster.creator,
        **({"paused": True} if roster.is_paused else {}),
    }
    return _encode(fields).encode()


def decode_roster(raw: bytes) -> Roster:
    try:
        fields = json.loads(raw)
        members = {name: Member(*_ints(values)) for name, values in fields["members"].items()}
        generation, next_epoch = _ints((fields["generation"], fields["next_epoch"]))
        is_paused = bool(fields.get("paused", False))
        return Roster(generation, next_epoch, members, str(fields["creator"]), is_paused)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged("invalid record of a group") from None


def encode_progress(progress: ShardProgress) -> bytes:
    """Encode the fields that differ from a new record, which are usually few."""
    parts = zip(ShardProgress._fields, progress, NEW, strict=True)
    return _encode({name: value for name, value, usual in parts if value != usual}).encode()


def decode_progress(raw: bytes) -> ShardProgress:
    try:
        fields = json.loads(raw)
        ranges = [_ints((start, end)) for start, end in fields.get("ranges", ())]
        fields["ranges"] = tuple(ranges)
        fields["attempts"] = {int(key): n for key, n in fields.get("attempts", {}).items()}
        emitted, redelivered = _ints(fields.get("counted", (0, 0)))
        fields["counted"] = (emitted, redelivered)
        progress = ShardProgress(**fields)
        _ints((progress.epoch, progress.member, progress.start, progress.low))
        return progress
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged("invalid record of a group's shard") from None


def decode_mark(raw: bytes) -> int:
    try:
        return int(raw)
    except ValueError:
        raise Damaged("invalid mark of a topic's groups") from None


def _ints(values: Any) -> tuple[Any, ...]:
    """Return the values. Raises `ValueError` unless each is an integer >= 0."""
    found = tuple(values)
    if not all(type(value) is int and value >= 0 for value in found):
        raise ValueError("not a count")
    return found


NEW: Final = ShardProgress()
# Shared: creating an encoder takes longer than encoding a record.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
