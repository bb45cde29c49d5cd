"""Actions on topics: create, describe, configure, pause, trim and drop them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from polybus.durable import query_progress, retention_limits
from polybus.durable.retention import describe_retention
from polybus.durable.retention_limits import check_retention_settings
from polybus.durable.topic_names import creator_of
from polybus.durable.topic_registry import (
    CONSUME_SIDE,
    EXPIRED,
    EXPIRED_DEAD_LETTER,
    EXPIRED_DROP,
    KEEP,
    KEEP_ALL,
    KEEP_READ,
    MAX_BYTES,
    PRODUCE_SIDE,
    paused_sides,
)
from polybus.errors import AlreadyExists, MalformedRequest, StoreFull
from polybus.groups.reader_positions import read_positions
from polybus.model.access_rule import DELETE, SUBSCRIBE
from polybus.model.name_pattern import Pattern
from polybus.model.topic import MAX_SHARDS
from polybus.native.port.topic_access import OWN_SETTINGS
from polybus.native.protocol.fields import is_count, parse_shard_number
from polybus.native.protocol.requests import (
    BoundsGet,
    PositionFind,
    TopicConfigure,
    TopicCreate,
    TopicDrop,
    TopicGet,
    TopicPause,
    TopicReshard,
    TopicResume,
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
KNOWN_SETTINGS = frozenset((KEEP, MAX_BYTES, EXPIRED)) | retention_limits.SETTINGS
EXPIRED_VALUES = (EXPIRED_DROP, EXPIRED_DEAD_LETTER)


def describe_topic(topic: Topic) -> TopicDescription:
    """Return a topic as `topic.create` answers it."""
    settings = {key: value for key, value in topic.settings.items() if key not in OWN_SETTINGS}
    return {
        "topic": topic.name,
        "number": topic.number,
        "shards": len(topic.open_shards),
        "generation": len(topic.generations),
        "generations": list(topic.generations),
        "creator": creator_of(topic).name,
        "settings": {KEEP: KEEP_ALL, MAX_BYTES: 0, **settings},
        "paused": list(paused_sides(topic)),
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
    """Return the settings of a request; null stands for the default of a setting."""
    settings = settings or {}
    unknown = sorted(settings.keys() - KNOWN_SETTINGS)
    if unknown:
        raise MalformedRequest(f"unknown topic setting {unknown[0][:64]!r}")
    if settings.get(KEEP) not in (None, *KEEP_VALUES):
        raise MalformedRequest(f"keep must be one of {', '.join(KEEP_VALUES)}")
    if settings.get(EXPIRED) not in (None, *EXPIRED_VALUES):
        raise MalformedRequest(f"expired must be one of {', '.join(EXPIRED_VALUES)}")
    if not is_count(settings.get(MAX_BYTES) or 0):
        raise MalformedRequest("max_bytes must be an integer >= 0")
    check_retention_settings(settings)
    return settings


def _check_shards(shards: int) -> None:
    if not 1 <= shards <= MAX_SHARDS:
        raise MalformedRequest(f"shards must be from 1 to {MAX_SHARDS}, got {shards}")


def _create(port: NativePort, caller: Caller, request: TopicCreate) -> TopicDescription:
    shards = request.shards or port.limits.default_shards
    _check_shards(shards)
    settings = _check_settings(request.settings)
    topic, is_new = port.access.find_or_create(caller.identity, request.topic, shards, settings)
    if not is_new:
        raise AlreadyExists(f"topic {topic.name} exists already")
    return describe_topic(topic)


def _configure(port: NativePort, caller: Caller, request: TopicConfigure) -> TopicDescription:
    if request.change is not None and request.settings is not None:
        raise MalformedRequest("topic.configure takes settings or change, not both")
    is_change = request.change is not None
    settings = _check_settings(request.change if is_change else request.settings)
    topic = port.access.configure(caller.identity, request.topic, settings, keep_others=is_change)
    return describe_topic(topic)


def _pause(port: NativePort, caller: Caller, request: TopicPause) -> TopicDescription:
    return _change_paused(port, caller, request, lambda paused, sides: paused | sides)


def _resume(port: NativePort, caller: Caller, request: TopicResume) -> TopicDescription:
    return _change_paused(port, caller, request, lambda paused, sides: paused - sides)


def _change_paused(
    port: NativePort,
    caller: Caller,
    request: TopicPause | TopicResume,
    combine: Callable[[set[str], set[str]], set[str]],
) -> TopicDescription:
    chosen = {PRODUCE_SIDE: request.produce, CONSUME_SIDE: request.consume}
    sides = {side for side, is_chosen in chosen.items() if is_chosen} or set(chosen)
    topic = port.access.configure_paused(
        caller.identity, request.topic, lambda paused: combine(paused, sides)
    )
    port.groups.wake(topic)  # fetches that wait
    return describe_topic(topic)


def _info(port: NativePort, caller: Caller, request: TopicGet) -> TopicInfo:
    topic = port.access.get_visible_topic(caller.identity, request.topic)
    bounds = port.store.bounds(topic.number)
    return {
        **describe_topic(topic),
        "first_id": bounds.first_id,
        "next_id": bounds.next_id,
        "timestamp_ns": bounds.timestamp_ns,
        "open_shards": [topic.open_shards[0], topic.open_shards[-1]],
        "draining": port.groups.draining(topic),
        "retention": describe_retention(port.store, topic, bounds, read_positions, port.wall_ns()),
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
    _check_shards(request.shards)
    with port.access.exclusive_topic(caller.identity, request.topic) as topic:
        # A repeated request, whose first answer was lost, changes nothing.
        if request.shards == len(topic.open_shards):
            return describe_topic(topic)
        port.groups.check_drained(topic)
        resharded = port.access.reshard(topic, request.shards)
        port.groups.add_generation(resharded)
    return describe_topic(resharded)


def _bounds(port: NativePort, caller: Caller, request: BoundsGet) -> TopicBounds:
    topic = port.access.get_topic(caller.identity, SUBSCRIBE, request.topic)
    return describe_bounds(port.store.bounds(topic.number))


def _find(port: NativePort, caller: Caller, request: PositionFind) -> FoundPosition:
    topic = port.access.get_topic(caller.identity, SUBSCRIBE, request.topic)
    return {"position": port.store.find(topic.number, request.shard, request.timestamp_ns)}


ACTIONS: Handlers = {
    TopicCreate: _create,
    TopicConfigure: _configure,
    TopicPause: _pause,
    TopicResume: _resume,
    TopicGet: _info,
    TopicsGet: _list,
    TopicDrop: _drop,
    TopicTrim: _trim,
    TopicReshard: _reshard,
    BoundsGet: _bounds,
    PositionFind: _find,
}
