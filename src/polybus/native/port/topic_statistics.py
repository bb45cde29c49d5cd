"""`topic.stats`: counts of a topic, of its shards and of its readers; `query.progress`.

All counts are computed from the store, so they are the same on a running bus, after a
restart, and on the data folder alone (`polybus inspect`):

- `inserted` and `routed` are the end of a shard, `trimmed` is its start, because offsets
  begin at 0 and are never reused. `routed` equals `inserted` because a commit assigns the
  shard.
- `emitted`, `acked`, `redelivered`, `dead_lettered` and `expired` belong to a group; those of
  a shard or a topic are sums over the groups.
- The lag of a group in messages is the sum over its shards, in seconds that of its slowest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polybus.bus.dialect_registry import installed_dialects
from polybus.durable.delayed_messages import DelayedTotals
from polybus.durable.query_progress import list_query_progress, store_query_progress
from polybus.durable.topic_registry import paused_sides
from polybus.errors import Damaged, DoesNotExist, MalformedRequest
from polybus.model.access_rule import SUBSCRIBE
from polybus.native.port.topic_actions import describe_delayed
from polybus.native.protocol.fields import is_count, parse_shard_number
from polybus.native.protocol.requests import QueryProgress, TopicStatsGet

if TYPE_CHECKING:
    from polybus.groups.coordinator import Coordinator
    from polybus.model.topic import Bounds, Topic
    from polybus.native.port.actions import Handlers
    from polybus.native.port.native_port import Caller, NativePort
    from polybus.native.protocol.answers import Empty, TopicStats

SHARD_COUNTS = ("inserted", "routed", "trimmed", "bytes")
SUMMED_GROUP_COUNTS = ("emitted", "acked", "redelivered", "dead_lettered", "expired")
COUNTS = (*SHARD_COUNTS, *SUMMED_GROUP_COUNTS)
GROUP_COUNTS = (*SUMMED_GROUP_COUNTS, "lag", "trimmed_unread")
MAX_QUERY_CHARACTERS = 128  # of the id or the name of a Spark query


def compose_topic_stats(
    topic: Topic,
    bounds: Bounds,
    groups: Sequence[Mapping[str, Any]],
    queries: Sequence[Mapping[str, Any]],
    subscribers: Sequence[Mapping[str, Any]] = (),
    delayed: DelayedTotals = DelayedTotals(),  # noqa: B008 -- a frozen value
) -> TopicStats:
    """Return the answer of `topic.stats` from the state of a topic and its readers."""
    shards = []
    for number, shard in enumerate(bounds.shards):
        stored = (shard.end, shard.end, shard.start, shard.size_bytes)
        counts = dict(zip(SHARD_COUNTS, stored, strict=True))
        shards.append({"shard": number, **counts, **dict.fromkeys(SUMMED_GROUP_COUNTS, 0)})
    for group in groups:
        for group_shard in group["shards"]:
            counts = shards[group_shard["shard"]]
            for key in SUMMED_GROUP_COUNTS:
                counts[key] += group_shard[key]
    return {
        "topic": topic.name,
        "paused": list(paused_sides(topic)),
        "all": _sum_counts(shards, COUNTS),
        "shards": shards,
        "groups": [add_group_totals(group) for group in groups],
        "queries": list(queries),
        "subscribers": list(subscribers),
        "delayed": describe_delayed(delayed),
    }


def add_group_totals(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group with the sums over its shards."""
    slowest_s = max((shard["lag_s"] for shard in group["shards"]), default=0.0)
    return {**group, **_sum_counts(group["shards"], GROUP_COUNTS), "lag_s": slowest_s}


def _sum_counts(shards: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, int]:
    return {key: sum(shard[key] for shard in shards) for key in keys}


def list_group_infos(groups: Coordinator, topic: Topic) -> list[dict[str, Any]]:
    """Return all groups of a topic, each as `group.info` describes it."""
    infos = []
    for name in groups.names(topic):
        try:
            infos.append(groups.info(topic, name))
        except (DoesNotExist, Damaged):  # removed since it was listed, or cannot be read
            continue
    return infos


def _stats(port: NativePort, caller: Caller, request: TopicStatsGet) -> TopicStats:
    topic = port.access.get_visible_topic(caller.identity, request.topic)
    groups = list_group_infos(port.groups, topic)
    bounds = port.store.bounds(topic.number)  # after the groups, so that acked <= inserted
    queries = list_query_progress(port.store, topic, bounds)
    subscribers = installed_dialects().read_subscribers(port.store, topic, bounds)
    delayed = port.access.durable.delayed.totals(topic.number)
    return compose_topic_stats(topic, bounds, groups, queries, subscribers, delayed)


def record_query_progress(port: NativePort, caller: Caller, request: QueryProgress) -> Empty:
    topic = port.access.get_topic(caller.identity, SUBSCRIBE, request.topic)
    for field, text in (("query", request.query), ("name", request.name)):
        if len(text) > MAX_QUERY_CHARACTERS or not text.isprintable():
            most = MAX_QUERY_CHARACTERS
            raise MalformedRequest(f"{field} must be printable, at most {most} characters")
    if not request.query:
        raise MalformedRequest("query must not be empty")
    offsets: dict[str, int] = {}
    for key, offset in request.offsets.items():
        shard = parse_shard_number(key, "offsets")
        if shard not in topic.shards:
            raise MalformedRequest(f"topic {topic.name} has no shard {shard}")
        if not is_count(offset):
            raise MalformedRequest('offsets must be {"SHARD": OFFSET, …}, each offset >= 0')
        offsets[str(shard)] = offset
    store_query_progress(
        port.store, topic.number, request.query, request.name, offsets, port.wall_ns()
    )
    return {}


ACTIONS: Handlers = {TopicStatsGet: _stats}
