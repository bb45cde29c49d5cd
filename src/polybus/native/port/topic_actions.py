"""Actions on topics: making them, looking at them, trimming and dropping them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.durable import query_progress
from polybus.durable.topic_names import CREATOR, creator_of
from polybus.durable.topic_registry import KEEP, KEEP_ALL, KEEP_READ, MAX_BYTES, WITH_SUBSCRIBERS
from polybus.errors import AlreadyExists, MalformedRequest, NotSupported
from polybus.model.access_rule import DELETE, SUBSCRIBE
from polybus.model.name_pattern import Pattern
from polybus.model.topic import MAX_SHARDS
from polybus.native.protocol.fields import ActionSchema, Answer, Arguments, Field, is_count

if TYPE_CHECKING:
    from polybus.model.topic import Bounds, Topic
    from polybus.native.port.native_port import Caller, NativePort

KEEP_VALUES = (KEEP_ALL, KEEP_READ)
INTERNAL_SETTINGS = (CREATOR, WITH_SUBSCRIBERS)  # settings of the bus's own
TOPIC = Field("topic", "text", "its name")
SETTINGS = Field(
    "settings", "object", "keep (all, read) and max_bytes (0: no bound), each optional", None
)


def describe_topic(topic: Topic) -> Answer:
    """A topic for people and programs."""
    settings = {key: value for key, value in topic.settings.items() if key not in INTERNAL_SETTINGS}
    return {
        "topic": topic.name,
        "number": topic.number,
        "shards": len(topic.open_shards),
        "generations": list(topic.generations),
        "creator": creator_of(topic).name,
        "settings": {KEEP: KEEP_ALL, MAX_BYTES: 0, **settings},
    }


def describe_bounds(bounds: Bounds) -> Answer:
    return {
        "first_id": bounds.first_id,
        "next_id": bounds.next_id,
        "timestamp_ns": bounds.timestamp_ns,
        "shards": [
            {"shard": number, "start": one.start, "end": one.end, "bytes": one.size_bytes}
            for number, one in enumerate(bounds.shards)
        ],
    }


def _settings(given: Arguments) -> dict[str, object]:
    settings: dict[str, object] = given["settings"] or {}
    unknown = sorted(settings.keys() - {KEEP, MAX_BYTES})
    if unknown:
        raise MalformedRequest(f"a topic has no setting {unknown[0][:64]!r}")
    if settings.get(KEEP, KEEP_ALL) not in KEEP_VALUES:
        raise MalformedRequest(f"keep is one of {', '.join(KEEP_VALUES)}")
    if not is_count(settings.get(MAX_BYTES, 0)):
        raise MalformedRequest("max_bytes is an integer from 0 on")
    return settings


def _create(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    shards = given["shards"] or port.limits.default_shards
    if not 1 <= shards <= MAX_SHARDS:
        raise MalformedRequest(f"a topic has 1 to {MAX_SHARDS} shards")
    topic, new = port.access.find_or_create(
        caller.identity, given["topic"], shards, _settings(given)
    )
    if not new:
        raise AlreadyExists(f"topic {topic.name} exists already")
    return describe_topic(topic)


def _configure(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    return describe_topic(port.access.configure(caller.identity, given["topic"], _settings(given)))


def _info(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    topic = port.find_visible_topic(caller, given["topic"])
    return {
        **describe_topic(topic),
        **describe_bounds(port.store.bounds(topic.number)),
        "shards": len(topic.open_shards),
    }


def _list(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    pattern = Pattern(given["pattern"])
    topics = port.access.list_visible(caller.identity)
    return {"topics": [describe_topic(one) for one in topics if pattern.matches(one.name.encode())]}


def _drop(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    topic = port.access.durable.find(given["topic"])
    port.access.drop(caller.identity, given["topic"])
    if topic is not None:
        query_progress.delete_query_progress(port.store, topic.number)
    return {}


def _trim(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    topic = port.access.get_topic(caller.identity, DELETE, given["topic"])
    before = {_shard_number(text): offset for text, offset in given["before"].items()}
    if not all(is_count(offset) for offset in before.values()):
        raise MalformedRequest('before is {"SHARD": OFFSET, …}')
    port.store.trim(topic.number, before)
    return describe_bounds(port.store.bounds(topic.number))


def _shard_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise MalformedRequest(f"{text[:64]!r} is no shard's number")
    return int(text)


def _reshard(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    raise NotSupported("this bus cannot change the number of a topic's shards yet")


def _bounds(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    topic = port.access.get_topic(caller.identity, SUBSCRIBE, given["topic"])
    return describe_bounds(port.store.bounds(topic.number))


def _find(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    topic = port.access.get_topic(caller.identity, SUBSCRIBE, given["topic"])
    return {"position": port.store.find(topic.number, given["shard"], given["timestamp_ns"])}


ACTIONS = {
    ActionSchema(
        "topic.create",
        "Makes a topic",
        (TOPIC, Field("shards", "count", "how many; 0: the bus's default", 0), SETTINGS),
        "topic, number, shards, generations, creator, settings",
    ): _create,
    ActionSchema(
        "topic.configure",
        "Replaces a topic's settings (its creator, admins)",
        (TOPIC, SETTINGS),
        "as topic.create",
    ): _configure,
    ActionSchema(
        "topic.info",
        "A topic, and where it begins and ends",
        (TOPIC,),
        "as topic.create, first_id, next_id, timestamp_ns",
    ): _info,
    ActionSchema(
        "topic.list",
        "The topics that the caller may know of",
        (Field("pattern", "text", "only those it matches; * is any run of characters", "*"),),
        "topics: a list, each as topic.create",
    ): _list,
    ActionSchema(
        "topic.drop", "Removes a topic and its messages (its creator, admins)", (TOPIC,), "nothing"
    ): _drop,
    ActionSchema(
        "topic.trim",
        "Removes a topic's oldest messages (its creator, admins)",
        (TOPIC, Field("before", "object", 'the first offset that stays, by shard: {"0": 17}')),
        "as bounds",
    ): _trim,
    ActionSchema(
        "topic.reshard",
        "Changes the number of shards; not_supported in this version",
        (TOPIC, Field("shards", "count", "how many from then on")),
        "as topic.create",
    ): _reshard,
    ActionSchema(
        "bounds",
        "Where a topic and its shards begin and end",
        (TOPIC,),
        "first_id, next_id, timestamp_ns, shards: shard, start, end, bytes each",
    ): _bounds,
    ActionSchema(
        "find",
        "The first position that came at a time or later; the end if none did",
        (
            TOPIC,
            Field("shard", "shard", "an offset of this shard, or an id of all", "all"),
            Field("timestamp_ns", "count", "the bus's time, nanoseconds since 1970"),
        ),
        "position",
    ): _find,
}
