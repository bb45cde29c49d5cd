"""How far queries of Spark have come in a topic: they report it, and `topic.stats` tells it.

    query/TTTTTTTT 0 QUERY → {"name": "…", "offsets": {"0": 17}, "told_ns": n}

T is the topic's number in hex, 0 a NUL. A query reads at its own pace and holds nothing
back: what it reports is for people alone. Nobody says when a query will never come
again, so a topic keeps those that reported last.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from polybus.errors import Conflict, MalformedRequest
from polybus.model.access_rule import SUBSCRIBE
from polybus.model.commit import Commit, RecordChange, StoredRecord
from polybus.native.protocol.fields import ActionSchema, Answer, Arguments, Field, is_count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polybus.model.topic import Bounds, Topic
    from polybus.native.port.native_port import Caller, NativePort
    from polybus.store.contract import Store

PREFIX = b"query/"
MAX_QUERIES = 256  # of a topic: the one that reported longest ago makes room
MAX_TEXT = 128  # characters of an id or a name
MAX_ATTEMPTS = 8  # of two who report the same query at once, one is behind


def list_query_progress(store: Store, topic: Topic, bounds: Bounds) -> list[Answer]:
    """All that reported, the newest first. `lag` is what they still have to read."""
    found = [_describe_query(record, bounds) for record in _records(store, topic.number)]
    return sorted(found, key=lambda one: (-one["told_ns"], one["query"]))


def delete_query_progress(store: Store, number: int) -> None:
    """The topic has gone."""
    changes = tuple(RecordChange(record.key, None) for record in _records(store, number))
    if changes:
        store.commit(Commit(changes=changes)).result()


def _describe_query(record: StoredRecord, bounds: Bounds) -> Answer:
    kept = json.loads(record.value)
    reached = [kept["offsets"].get(str(n), one.start) for n, one in enumerate(bounds.shards)]
    ends = [one.end for one in bounds.shards]
    return {
        "query": record.key.partition(b"\0")[2].decode(),
        "name": kept["name"],
        "offsets": kept["offsets"],
        "lag": sum(max(0, end - at) for end, at in zip(ends, reached, strict=True)),
        "told_ns": kept["told_ns"],
    }


def _records(store: Store, number: int) -> list[StoredRecord]:
    return store.scan(_key(number, ""), limit=MAX_QUERIES + MAX_ATTEMPTS)


def _key(number: int, query: str) -> bytes:
    return PREFIX + b"%08x\0" % number + query.encode()


def _progress(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    topic = port.access.get_topic(caller.identity, SUBSCRIBE, given["topic"])
    query, name = _text(given["query"], "query"), _text(given["name"], "name")
    if not query:
        raise MalformedRequest("query is not empty")
    offsets = _offsets(given["offsets"], topic)
    for _ in range(MAX_ATTEMPTS):
        try:
            _store_progress(port, topic, query, name, offsets)
        except Conflict:
            continue
        return {}
    raise Conflict(f"query {query} is reported by several at once: try again")


def _store_progress(
    port: NativePort, topic: Topic, query: str, name: str, offsets: Mapping[str, int]
) -> None:
    key = _key(topic.number, query)
    known = port.store.get(key)
    kept: dict[str, Any] = json.loads(known.value) if known else {"name": "", "offsets": {}}
    value = {
        "name": name or kept["name"],
        "offsets": {**kept["offsets"], **offsets},
        "told_ns": port.wall_ns(),
    }
    version = known.version if known else 0
    changes = [RecordChange(key, json.dumps(value).encode(), version)]
    if not known:
        changes += _evict_oldest(port.store, topic.number)
    port.store.commit(Commit(changes=tuple(changes))).result()


def _evict_oldest(store: Store, number: int) -> list[RecordChange]:
    """Takes out those that reported longest ago, so that there is room for one more."""
    records = _records(store, number)
    oldest = sorted(records, key=lambda record: json.loads(record.value)["told_ns"])
    return [RecordChange(one.key, None) for one in oldest[: len(records) - MAX_QUERIES + 1]]


def _text(given: str, field: str) -> str:
    if len(given) > MAX_TEXT or not (given.isprintable() or not given):
        raise MalformedRequest(f"{field} is text of at most {MAX_TEXT} characters")
    return given


def _offsets(given: Mapping[str, object], topic: Topic) -> dict[str, int]:
    found = {}
    for shard, offset in given.items():
        is_shard = shard.isascii() and shard.isdigit() and int(shard) in topic.shards
        if not (is_shard and isinstance(offset, int) and is_count(offset)):
            raise MalformedRequest(f'offsets is {{"SHARD": OFFSET, …}}, of shards of {topic.name}')
        found[str(int(shard))] = offset
    return found


ACTIONS = {
    ActionSchema(
        "query.progress",
        "A query of Spark says how far it has read a topic; topic.stats tells it",
        (
            Field("query", "text", "an id that it keeps when it is started again"),
            Field("topic", "text", "its name"),
            Field("offsets", "object", 'the first that was not read, by shard: {"0": 17}'),
            Field("name", "text", "what people call it; empty: as before", ""),
        ),
        "nothing",
    ): _progress,
}
