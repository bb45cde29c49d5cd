"""Actions on topics: create, describe, configure, trim and drop them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from polybus.durable import query_progress
from polybus.durable.topic_names import CREATOR, creator_of
from polybus.durable.topic_registry import (
    EXPIRED,
    EXPIRED_DEAD_LETTER,
    EXPIRED_DROP,
    KEEP,
    KEEP_ALL,
    KEEP_READ,
    MAX_BYTES,
    WITH_SUBSCRIBERS,
)
from polybus.errors import AlreadyExists, MalformedRequest, NotSupported, StoreFull
from polybus.model.access_rule import DELETE, SUBSCRIBE
from polybus.model.name_pattern import Pattern
from polybus.model.topic import MAX_SHARDS
from polybus.native.protocol.fields import is_count, parse_shard_number
from polybus.native.protocol.requests import (
    BoundsGet,
    PositionFind,
    TopicConfigure,
    TopicCreate,
    TopicDrop,
    TopicGet,
    TopicReshard,
    TopicsGet,
    TopicTrim,
)

if TYPE_CHECKING:
    from polybus.durable.delayed_messages import DelayedTotals
    from polybus.model.topic import Bounds, Topic
    from polybus.native.port.actions import Handlers
    from polybus.native.port.native_port import Caller, NativePort
    from polybus.native.protocol.answers import (
        DelayedCounts,
        Empty,
        FoundPosition,
        TopicBounds,
        TopicDescription,
        TopicInfo,
        TopicList,
    )

KEEP_VALUES = (KEEP_ALL, KEEP_READ)
EXPIRED_VALUES = (EXPIRED_DROP, EXPIRED_DEAD_LETTER)
INTERNAL_SETTINGS = (CREATOR, WITH_SUBSCRIBERS)  # stored by the bus, not shown


def describe_topic(topic: Topic) -> TopicDescription:
    """Return a topic as `topic.create` answers it."""
    settings = {key: value for key, value in topic.settings.items() if key not in INTERNAL_SETTINGS}
    return {
        "topic": topic.name,
        "number": topic.number,
        "shards": len(topic.open_shards),
        "generations": list(topic.generations),
        "creator": creator_of(topic).name,
        "settings": {KEEP: KEEP_ALL, MAX_BYTES: 0, **settings},
    }


def describe_bounds(bounds: Bounds) -> TopicBounds:
    """Return bounds as the action `bounds` answers them."""
    return {
        "first_id": bounds.first_id,
        "next_id": bounds.next_id,
        "timestamp_ns": bounds.timestamp_ns,
        "shards": [
            {"shard": number, "start": shard.start, "end": shard.end, "bytes": shard.size_bytes}
            for number, shard in enumerate(bounds.shards)
        ],
    }


def _check_settings(settings: dict[str, object] | None) -> dict[str, object]:
    settings = settings or {}
    unknown = sorted(settings.keys() - {KEEP, MAX_BYTES, EXPIRED})
    if unknown:
        raise MalformedRequest(f"unknown topic setting {unknown[0][:64]!r}")
    if settings.get(KEEP, KEEP_ALL) not in KEEP_VALUES:
        raise MalformedRequest(f"keep must be one of {', '.join(KEEP_VALUES)}")
    if settings.get(EXPIRED, EXPIRED_DROP) not in EXPIRED_VALUES:
        raise MalformedRequest(f"expired must be one of {', '.join(EXPIRED_VALUES)}")
    if not is_count(settings.get(MAX_BYTES, 0)):
        raise MalformedRequest("max_bytes must be an integer >= 0")
    return settings


def _create(port: NativePort, caller: Caller, request: TopicCreate) -> TopicDescription:
    shards = request.shards or port.limits.default_shards
    if not 1 <= shards <= MAX_SHARDS:
        raise MalformedRequest(f"shards must be from 1 to {MAX_SHARDS}, got {shards}")
    settings = _check_settings(request.settings)
    topic, is_new = port.access.find_or_create(caller.identity, request.topic, shards, settings)
    if not is_new:
        raise AlreadyExists(f"topic {topic.name} exists already")
    return describe_topic(topic)


def _configure(port: NativePort, caller: Caller, request: TopicConfigure) -> TopicDescription:
    settings = _check_settings(request.settings)
    return describe_topic(port.access.configure(caller.identity, request.topic, settings))


def _info(port: NativePort, caller: Caller, request: TopicGet) -> TopicInfo:
    topic = port.access.get_visible_topic(caller.identity, request.topic)
    bounds = port.store.bounds(topic.number)
    return {
        **describe_topic(topic),
        "first_id": bounds.first_id,
        "next_id": bounds.next_id,
        "timestamp_ns": bounds.timestamp_ns,
        "delayed": describe_delayed(port.access.durable.delayed.totals(topic.number)),
    }


def describe_delayed(delayed: DelayedTotals) -> DelayedCounts:
    """Return the delayed messages of a topic as `topic.info` answers them."""
    messages, size, next_due_ns = delayed
    return {"messages": messages, "bytes": size, "next_due_ns": next_due_ns}


def _list(port: NativePort, caller: Caller, request: TopicsGet) -> TopicList:
    pattern = Pattern(request.pattern)
    topics = port.access.list_visible(caller.identity)
    matching = [topic for topic in topics if pattern.matches(topic.name.encode())]
    return {"topics": [describe_topic(topic) for topic in matching]}


def _drop(port: NativePort, caller: Caller, request: TopicDrop) -> Empty:
    topic = port.access.durable.find(request.topic)
    port.access.drop(caller.identity, request.topic)
    # The topic is gone already. What a full disk leaves of its reports is not reachable.
    if topic is not None:
        with suppress(StoreFull):
            query_progress.delete_query_progress(port.store, topic.number)
    return {}


def _trim(port: NativePort, caller: Caller, request: TopicTrim) -> TopicBounds:
    topic = port.access.get_topic(caller.identity, DELETE, request.topic)
    before = {parse_shard_number(key, "before"): at for key, at in request.before.items()}
    if not all(is_count(offset) for offset in before.values()):
        raise MalformedRequest('before must be {"SHARD": OFFSET, …}, each offset >= 0')
    port.store.trim(topic.number, before)
    return describe_bounds(port.store.bounds(topic.number))


def _reshard(port: NativePort, caller: Caller, request: TopicReshard) -> TopicDescription:
    raise NotSupported("changing the number of shards is not supported in this version")


def _bounds(port: NativePort, caller: Caller, request: BoundsGet) -> TopicBounds:
    topic = port.access.get_topic(caller.identity, SUBSCRIBE, request.topic)
    return describe_bounds(port.store.bounds(topic.number))


def _find(port: NativePort, caller: Caller, request: PositionFind) -> FoundPosition:
    topic = port.access.get_topic(caller.identity, SUBSCRIBE, request.topic)
    return {"position": port.store.find(topic.number, request.shard, request.timestamp_ns)}


ACTIONS: Handlers = {
    TopicCreate: _create,
    TopicConfigure: _configure,
    TopicGet: _info,
    TopicsGet: _list,
    TopicDrop: _drop,
    TopicTrim: _trim,
    TopicReshard: _reshard,
    BoundsGet: _bounds,
    PositionFind: _find,
}
