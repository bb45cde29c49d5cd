"""Records of the progress of Spark queries in a topic, which `topic.stats` shows.

    query/TTTTTTTT 0 QUERY → {"name": "…", "offsets": {"0": 17}, "told_ns": n}

T is the number of the topic in hex, 0 a NUL. Progress is informational: it does not hold
back trimming. No event marks the end of a query, so a topic keeps the MAX_QUERIES queries
that reported last.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from polybus.errors import Conflict
from polybus.model.commit import Commit, RecordChange, StoredRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polybus.model.topic import Bounds, Topic
    from polybus.store.contract import Store

PREFIX = b"query/"
MAX_QUERIES = 256  # per topic; a new query evicts the one that reported longest ago
MAX_ATTEMPTS = 8  # to write a record that another report changes at the same time


def list_query_progress(store: Store, topic: Topic, bounds: Bounds) -> list[dict[str, Any]]:
    """Return the queries of a topic, the latest report first; `lag` counts unread messages."""
    queries = [_describe_query(record, bounds) for record in _records(store, topic.number)]
    return sorted(queries, key=lambda query: (-query["told_ns"], query["query"]))


def store_query_progress(
    store: Store, topic: int, query: str, name: str, offsets: Mapping[str, int], now_ns: int
) -> None:
    """Merge a report into the record of a query. An empty name keeps the stored one.

    Raises:
        Conflict: other reports of the same query won MAX_ATTEMPTS times.
    """
    key = _key(topic, query)
    for _ in range(MAX_ATTEMPTS):
        stored = store.get(key)
        kept: dict[str, Any] = _decode(stored) if stored else {"name": "", "offsets": {}}
        value = {
            "name": name or kept["name"],
            "offsets": {**kept["offsets"], **offsets},
            "told_ns": now_ns,
        }
        changes = [RecordChange(key, json.dumps(value).encode(), stored.version if stored else 0)]
        if not stored:
            changes += _evict_oldest(store, topic)
        try:
            store.commit(Commit(changes=tuple(changes))).result()
        except Conflict:
            continue
        return
    raise Conflict(f"query {query} is being reported by other callers; retry")


def delete_query_progress(store: Store, topic: int) -> None:
    """Delete the records of a topic that was dropped."""
    changes = tuple(RecordChange(record.key, None) for record in _records(store, topic))
    if changes:
        store.commit(Commit(changes=changes)).result()


def _describe_query(record: StoredRecord, bounds: Bounds) -> dict[str, Any]:
    stored = _decode(record)
    offsets = stored["offsets"]
    # A shard that was never reported counts as unread.
    lag = sum(
        max(0, shard.end - offsets.get(str(number), shard.start))
        for number, shard in enumerate(bounds.shards)
    )
    return {
        "query": record.key.partition(b"\0")[2].decode("utf-8", "replace"),
        "name": stored["name"],
        "offsets": offsets,
        "lag": lag,
        "told_ns": stored["told_ns"],
    }


def _evict_oldest(store: Store, topic: int) -> list[RecordChange]:
    """Return the changes that leave room for one more query."""
    records = _records(store, topic)
    oldest = sorted(records, key=lambda record: _decode(record)["told_ns"])
    return [RecordChange(record.key, None) for record in oldest[: len(records) - MAX_QUERIES + 1]]


def _decode(record: StoredRecord) -> dict[str, Any]:
    """Return a record. A damaged one is as if the query had never reported: it reports again."""
    try:
        found: dict[str, Any] = json.loads(record.value)
        return {
            "name": str(found["name"]),
            "offsets": {str(shard): int(end) for shard, end in found["offsets"].items()},
            "told_ns": int(found["told_ns"]),
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {"name": "", "offsets": {}, "told_ns": 0}


def _records(store: Store, topic: int) -> list[StoredRecord]:
    # Concurrent first reports may exceed MAX_QUERIES by a few.
    return store.scan(_key(topic, ""), limit=MAX_QUERIES + MAX_ATTEMPTS)


def _key(topic: int, query: str) -> bytes:
    return PREFIX + b"%08x\0" % topic + query.encode()
