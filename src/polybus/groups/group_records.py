"""What is kept of a group: one record for its members, and one for each shard.

    group/TTTTTTTT 0 GROUP              the roster
    groupshard/TTTTTTTT 0 GROUP 0 SSSS  how far the group has come in a shard
    groupmark/TTTTTTTT                  the first epoch that no removed group of the topic had

T is the topic's number and S the shard's, in hex; 0 is a NUL, which no name has. The
values are JSON (a mark: a number). A group that is made anew begins at the mark, so that
whoever was in one of its name before holds no epoch of the new one. Rosters have a prefix
of their own, so that a bus that starts finds all groups without reading all their shards.
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

# Of a group's or consumer's name, in bytes: a host, a pid and a word fit, and a roster of
# as many members as there may be stays below what a record may hold.
MAX_NAME_BYTES: Final = 128


@dataclass(frozen=True, slots=True)
class Member:
    """A consumer that has joined, with what it asked for."""

    epoch: int
    max_deliver: int
    heartbeat_ms: int
    dead_ms: int


@dataclass(frozen=True, slots=True)
class Roster:
    """`generation` counts how often it has changed; `creator` is whom the group is charged to."""

    generation: int = 0
    next_epoch: int = 1
    members: Mapping[str, Member] = field(default_factory=dict)
    creator: str = ""


EMPTY_MAP: Final[Mapping[Any, int]] = {}


class ShardProgress(NamedTuple):
    """How far a group has come in one shard, and whose the shard is.

    `epoch` rises whenever the shard is given to somebody; `member` is the epoch of the
    one that has it. `start` is where acks are counted from. `attempts` are failed runs
    of messages that are not acked. Below `suspect_to` messages may have been running when
    a consumer died. `emitted` and `redelivered` are those of earlier owners; the present
    one's are in `counted`, as totals.
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
    return shard_prefix(topic, group) + b"%04x" % shard


def mark_key(topic: int) -> bytes:
    return MARKS + b"%08x" % topic


def read_mark_key(key: bytes) -> int:
    return int(key[len(MARKS) :], 16)


def read_roster_key(key: bytes) -> tuple[int, str]:
    """The topic's number and the group's name."""
    number, _, name = key[len(ROSTERS) :].partition(b"\0")
    return int(number, 16), name.decode()


def check_name(what: str, name: str) -> str:
    """`MalformedRequest` unless a group or consumer may be called so."""
    if not 1 <= len(name.encode()) <= MAX_NAME_BYTES:
        raise MalformedRequest(f"the name of a {what} has 1 to {MAX_NAME_BYTES} bytes")
    if any(char < " " or "\x7f" <= char < "\xa0" for char in name):
        raise MalformedRequest(f"the name of a {what} has no control characters")
    return name


# --- values


def encode_roster(roster: Roster) -> bytes:
    members = {
        name: [one.epoch, one.max_deliver, one.heartbeat_ms, one.dead_ms]
        for name, one in roster.members.items()
    }
    held = {
        "generation": roster.generation,
        "next_epoch": roster.next_epoch,
        "members": members,
        "creator": roster.creator,
    }
    return _encode(held).encode()


def decode_roster(raw: bytes) -> Roster:
    try:
        held = json.loads(raw)
        members = {name: Member(*one) for name, one in held["members"].items()}
        return Roster(held["generation"], held["next_epoch"], members, held["creator"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged("the record of a group cannot be read") from None


def encode_progress(progress: ShardProgress) -> bytes:
    """Without what is as in a new one: most of it, most of the time."""
    parts = zip(ShardProgress._fields, progress, NEW, strict=True)
    return _encode({name: value for name, value, usual in parts if value != usual}).encode()


def decode_progress(raw: bytes) -> ShardProgress:
    try:
        held = json.loads(raw)
        held["ranges"] = tuple((start, end) for start, end in held.get("ranges", ()))
        held["attempts"] = {int(key): n for key, n in held.get("attempts", {}).items()}
        emitted, redelivered = held.get("counted", (0, 0))
        held["counted"] = (emitted, redelivered)
        return ShardProgress(**held)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged("the record of a group's shard cannot be read") from None


NEW: Final = ShardProgress()
# One for all: to make one for each record would take longer than the record.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
