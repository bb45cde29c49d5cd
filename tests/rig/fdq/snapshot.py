"""The content of an idle bus: the logs, the group's record, the stats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tests.rig.fdq.history import Position

# Between the parts of an output's body: its source, its run, its number in the run.
SEPARATOR = "|"


class Row(NamedTuple):
    """A message of the topic, or of the topic to which transactions produce."""

    shard: int
    offset: int
    id: int
    key: str | None
    body: str
    timestamp_ns: int = 0

    @property
    def position(self) -> Position:
        return self.shard, self.offset


class Dead(NamedTuple):
    """A dead letter, with the origin from its headers."""

    shard: int
    offset: int
    key: str | None
    body: str
    deliveries: int

    @property
    def position(self) -> Position:
        return self.shard, self.offset


@dataclass(frozen=True)
class Shard:
    """The group's record of a shard, and its stats."""

    shard: int
    start: int
    low: int
    ranges: tuple[tuple[int, int], ...]
    inserted: int
    routed: int
    acked: int
    emitted: int
    redelivered: int
    dead_lettered: int
    lag: int

    def has_acked(self, offset: int) -> bool:
        return offset < self.low or any(first <= offset < end for first, end in self.ranges)


@dataclass(frozen=True)
class Found:
    topic: tuple[Row, ...] = ()
    outputs: tuple[Row, ...] = ()
    dead: tuple[Dead, ...] = ()
    shards: tuple[Shard, ...] = ()
    generations: tuple[int, ...] = ()  # number of shards of each; the last is open


def source_of(output: str) -> str:
    """The body of the message whose handler produced this."""
    return output.split(SEPARATOR)[0]


def run_of(output: str) -> str:
    return output.split(SEPARATOR)[1]


def output_body(source: str, run: str, part: int) -> str:
    return SEPARATOR.join((source, run, str(part)))


# --- reading


class Bus(Protocol):
    """The part of a client that the snapshot uses."""

    def act(self, name: str, /, **request: Any) -> dict[str, Any]: ...
    def read(self, topic: str, shard: int | str = "all") -> Iterable[Any]: ...


def outputs_of(bus: Bus, output: str) -> tuple[Row, ...]:
    names = {one["topic"] for one in bus.act("topic.list")["topics"]}
    return tuple(_rows(bus, output)) if output in names else ()


def look(bus: Bus, topic: str, output: str, group: str) -> Found:
    """Read the snapshot. All clients should have ended."""
    names = {one["topic"] for one in bus.act("topic.list")["topics"]}
    dlq = f"{topic}.dlq"
    return Found(
        topic=tuple(_rows(bus, topic)),
        outputs=outputs_of(bus, output),
        dead=tuple(_dead(bus, dlq, group)) if dlq in names else (),
        shards=tuple(_shards(bus, topic, group)),
        generations=tuple(bus.act("topic.info", topic=topic)["generations"]),
    )


def _records(bus: Bus, topic: str) -> Iterable[dict[str, Any]]:
    for batch in bus.read(topic):
        yield from batch.to_pylist()


def _rows(bus: Bus, topic: str) -> Iterable[Row]:
    for one in _records(bus, topic):
        body, key = one["body"].decode(), one["shard_key"]
        yield Row(one["shard"], one["offset"], one["id"], key, body, one["timestamp_ns"])


def _dead(bus: Bus, topic: str, group: str) -> Iterable[Dead]:
    for one in _records(bus, topic):
        headers = {name: value.decode() for name, value in one["headers"]}
        if headers["polybus.group"] == group:
            yield Dead(
                int(headers["polybus.shard"]),
                int(headers["polybus.offset"]),
                one["shard_key"],
                one["body"].decode(),
                int(headers["polybus.deliveries"]),
            )


def _shards(bus: Bus, topic: str, group: str) -> Iterable[Shard]:
    """Fields of the record from `group.info`, derived ones from `topic.stats`."""
    stats = bus.act("topic.stats", topic=topic)
    counted = {one["shard"]: one for one in _group(stats, group).get("shards", ())}
    inserted = {one["shard"]: one for one in stats["shards"]}
    for one in bus.act("group.info", topic=topic, group=group)["shards"]:
        number = one["shard"]
        yield Shard(
            shard=number,
            start=one["start"],
            low=one["low"],
            ranges=(),  # only their number is reported; 0 when all is acked
            inserted=inserted[number]["inserted"],
            routed=inserted[number]["routed"],
            acked=counted[number]["acked"],
            emitted=counted[number]["emitted"],
            redelivered=counted[number]["redelivered"],
            dead_lettered=counted[number]["dead_lettered"],
            lag=counted[number]["lag"],
        )


def _group(stats: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    return next((one for one in stats["groups"] if one["group"] == group), {})
