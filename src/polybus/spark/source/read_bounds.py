"""The topics that a query selects, and where reading starts and ends.

Starts are inclusive and ends exclusive, for offsets and for times. A shard that the options do
not name is read from its first to its last offset.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from polybus.errors import DoesNotExist, InvalidTopic, Trimmed, UsageError
from polybus.model import topic_name
from polybus.model.name_pattern import STAR, Pattern
from polybus.spark.source.log_access import LogAccess, ShardOffsets
from polybus.spark.spark_options import SparkOptions

Offsets = dict[str, dict[int, int]]  # topic → shard → offset

EARLIEST, LATEST = "earliest", "latest"
NS_PER_MS = 1_000_000
MAX_TIME_NS = 2**63 - 1  # in the year 2262; a later time is the end of the log


class TopicSelection:
    """The topics of option `topic`: names, and patterns, which may match more topics later."""

    def __init__(self, text: str) -> None:
        parts = sorted({part.strip() for part in text.split(",")} - {""})
        if not parts:
            raise UsageError("option topic must name a topic: .option('topic', 'orders')")
        self.text = ", ".join(parts)
        self.names = tuple(part for part in parts if STAR not in part)
        self.patterns = tuple(part for part in parts if STAR in part)
        for name in self.names:
            try:
                topic_name.check_topic_name(name)
            except InvalidTopic as error:
                raise UsageError(f"option topic: {error}") from None

    def find_topics(self, access: LogAccess) -> list[str]:
        """Return the named topics and the existing topics that a pattern matches, sorted."""
        matches = {name for pattern in self.patterns for name in access.list_topics(pattern)}
        return sorted(matches.union(self.names))

    def shards(self, access: LogAccess) -> dict[str, dict[int, ShardOffsets]]:
        """Return the shards of all selected topics.

        Skips a topic that was dropped after a pattern matched it. Raises `DoesNotExist` if a named
        topic does not exist.
        """
        shards = {}
        for topic in self.find_topics(access):
            try:
                shards[topic] = access.shards(topic)
            except DoesNotExist:
                if topic in self.names:
                    raise
        return shards

    def covers(self, name: str) -> bool:
        """Return whether a topic of this name is selected."""
        patterns = (Pattern(text) for text in self.patterns)
        return name in self.names or any(pattern.matches(name.encode()) for pattern in patterns)


@dataclass(frozen=True)
class ReadBound:
    """Where reading starts or ends: by offsets or by a timestamp."""

    edge: Literal["starting", "ending"]
    default: str
    offsets: Offsets = field(default_factory=dict)
    timestamp_ns: int | None = None

    @classmethod
    def parse(
        cls, options: SparkOptions, edge: Literal["starting", "ending"], default: str
    ) -> ReadBound:
        offsets, timestamp = options.text(f"{edge}Offsets"), options.text(f"{edge}Timestamp")
        if offsets is not None and timestamp is not None:
            raise UsageError(f"give {edge}Offsets or {edge}Timestamp, not both")
        if timestamp is not None:
            return cls(edge, default, {}, _time_ns(timestamp, f"{edge}Timestamp"))
        if offsets is None or offsets.lower() in (EARLIEST, LATEST):
            return cls(edge, (offsets or default).lower())
        # A shard that the JSON does not name is read completely.
        outermost = EARLIEST if edge == "starting" else LATEST
        return cls(edge, outermost, _offsets(offsets, f"{edge}Offsets"))

    def check(self, topics: Iterable[str]) -> None:
        """Raise `UsageError` if the offsets name a topic that is not selected."""
        unknown = sorted(self.offsets.keys() - set(topics))
        if unknown:
            raise UsageError(
                f"{self.edge}Offsets names topic {unknown[0]!r}, which option topic does not"
            )

    def resolve_offsets(
        self, access: LogAccess, topic: str, shards: dict[int, ShardOffsets]
    ) -> dict[int, int]:
        """Return the offset of each shard."""
        if self.timestamp_ns is not None:
            return {shard: access.find_time(topic, shard, self.timestamp_ns) for shard in shards}
        given_offsets = self.offsets.get(topic, {})
        unknown = sorted(given_offsets.keys() - shards.keys())
        if unknown:
            raise UsageError(
                f"{self.edge}Offsets: topic {topic!r} has no shard {unknown[0]}, only 0 to "
                f"{max(shards)}"
            )
        is_first = self.default == EARLIEST
        edges = {n: shard.start if is_first else shard.end for n, shard in shards.items()}
        return {**edges, **given_offsets}


def clamp_offset(topic: str, shard: int, offset: int, in_log: ShardOffsets, *, strict: bool) -> int:
    """Return the nearest offset that is in the log; raises if `strict` and `offset` is not.

    Raises `Trimmed` if the offset was trimmed, `DoesNotExist` if it is after the end.
    """
    if strict and offset < in_log.start:
        raise trimmed_error(topic, shard, offset, in_log.start)
    if strict and offset > in_log.end:
        raise DoesNotExist(
            f"topic {topic!r}, shard {shard} ends at {in_log.end}, before offset {offset} of "
            "the query: correct the offsets or the bus URL, or set failOnDataLoss=false"
        )
    return min(max(offset, in_log.start), in_log.end)


def trimmed_error(topic: str, shard: int, offset: int, start: int) -> Trimmed:
    """Return the error for offsets `offset` to `start - 1`, trimmed before they were read."""
    return Trimmed(
        f"topic {topic!r}, shard {shard}: offsets {offset} to {start - 1} were trimmed away "
        "before they were read; set failOnDataLoss=false to go on with what is left",
        start,
    )


def _time_ns(text: str, option: str) -> int:
    """Parse a time. Without a zone it is UTC: tasks and driver may be in different zones."""
    try:
        if text.isascii() and text.isdigit():
            milliseconds = int(text)
        else:
            moment = datetime.fromisoformat(text)
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=UTC)
            milliseconds = round(moment.timestamp() * 1000)
    except (ValueError, OverflowError):
        raise UsageError(
            f"option {option} must be a time like 2026-01-31T12:00:00Z, or milliseconds since "
            f"1970, got {text!r}"
        ) from None
    return min(max(0, milliseconds * NS_PER_MS), MAX_TIME_NS)


def _offsets(text: str, option: str) -> Offsets:
    form = f'option {option} must be earliest, latest, or JSON like {{"orders": {{"0": 17}}}}'
    try:
        given = json.loads(text)
    except ValueError:
        raise UsageError(f"{form}, got {text[:64]!r}") from None
    if not isinstance(given, dict):
        raise UsageError(f"{form}, got {text[:64]!r}")
    for shards in given.values():
        if not isinstance(shards, dict):
            raise UsageError(f"{form}: shards of a topic must be an object, got {shards!r}")
        for shard, offset in shards.items():
            # type(), because JSON's true is an int for isinstance.
            if not (shard.isascii() and shard.isdigit() and type(offset) is int and offset >= 0):
                raise UsageError(f"{form}: {shard!r}: {offset!r} is not a shard and an offset")
    return {
        topic: {int(shard): offset for shard, offset in shards.items()}
        for topic, shards in given.items()
    }
