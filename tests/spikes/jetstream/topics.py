"""Topics on JetStream: their tails, and the record that a dropped topic leaves for its name."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from polybus.errors import AlreadyExists, DoesNotExist
from polybus.model.topic import Bounds, ShardBounds, Topic
from tests.spikes.jetstream import subjects
from tests.spikes.jetstream.draft import Draft


def tail_of(draft: Draft, topic: int) -> dict[str, Any]:
    tail: dict[str, Any] | None = draft.head(subjects.tail(topic)).json()
    if tail is None:
        raise DoesNotExist(f"there is no topic of number {topic}")
    return tail


def topic_of(tail: Mapping[str, Any], number: int) -> Topic:
    return Topic(tail["name"], number, tuple(tail["generations"]), tail["settings"])


def bounds_of(tail: Mapping[str, Any]) -> Bounds:
    shards = tail["shards"]
    there = (shard["first_id"] for shard in shards if shard["start"] < shard["end"])
    first_id = min(there, default=tail["next_id"])
    found = (ShardBounds(one["start"], one["end"], one["size_bytes"]) for one in shards)
    return Bounds(first_id, tail["next_id"], tail["timestamp_ns"], tuple(found))


def create(draft: Draft, name: str, shards: int, settings: Mapping[str, object]) -> Topic:
    left = draft.head(subjects.topic_named(name)).json() or {"next_id": 1, "ends": []}
    if "number" in left:
        raise AlreadyExists(f"there is a topic {name!r}")
    number = (draft.head(subjects.NUMBERS).json() or 0) + 1
    ends = [*left["ends"], *[0] * shards][:shards]
    tail = {
        "name": name,
        "generations": [shards],
        "settings": settings,
        "next_id": left["next_id"],
        "timestamp_ns": left.get("timestamp_ns", 0),
        "shards": [_shard(end) for end in ends],
        "highest": left["ends"],  # of shards that this incarnation may not have
    }
    draft.set_json(subjects.NUMBERS, number)
    draft.set_json(subjects.topic_named(name), {"number": number})
    draft.set_json(subjects.tail(number), tail)
    return topic_of(tail, number)


def _shard(end: int) -> dict[str, int]:
    return {"start": end, "end": end, "size_bytes": 0, "first_id": 0}


def configure(draft: Draft, name: str, settings: Mapping[str, object], added: int) -> Topic:
    number = number_of(draft, name)
    tail = tail_of(draft, number) | {"settings": settings}
    if added:
        known = len(tail["shards"])
        ends = [*tail["highest"][known:], *[0] * added][:added]
        tail["generations"].append(added)
        tail["shards"] += [_shard(end) for end in ends]
    draft.set_json(subjects.tail(number), tail)
    return topic_of(tail, number)


def drop(draft: Draft, name: str) -> int:
    number = number_of(draft, name)
    tail = tail_of(draft, number)
    ends = [shard["end"] for shard in tail["shards"]]
    left = {
        "next_id": tail["next_id"],
        "timestamp_ns": tail["timestamp_ns"],
        "ends": [max(both) for both in zip_longest(ends, tail["highest"], fillvalue=0)],
    }
    draft.set_json(subjects.topic_named(name), left)
    draft.set(subjects.tail(number), None)  # so an append in progress is overtaken
    return number


def number_of(draft: Draft, name: str) -> int:
    known = draft.head(subjects.topic_named(name)).json() or {}
    if "number" not in known:
        raise DoesNotExist(f"there is no topic {name!r}")
    return int(known["number"])
