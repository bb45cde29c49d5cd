"""`topic.stats`: what was written to a topic, who has read how much of it, and who is behind.

Everything is computed from what the store keeps, so it is the same on a running bus, after
a restart, and on the files alone (`polybus inspect`):

- `inserted` and `routed` are where a shard ends, `trimmed` where it begins: offsets start at
  0 and never start anew. Routed is the same number, since a message is in its shard the
  moment it is there at all.
- `emitted`, `acked`, `redelivered` and `dead_lettered` are each group's own; of a shard, and
  of the topic, they are sums over the groups.
- A group's lag in messages is the sum over its shards, in seconds that of its slowest one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polybus.dialects.pirate.server.subscriber_lags import read_subscriber_lags
from polybus.durable.query_progress import list_query_progress
from polybus.errors import DoesNotExist
from polybus.native.protocol.fields import ActionSchema, Answer, Arguments, Field

if TYPE_CHECKING:
    from polybus.groups.coordinator import Coordinator
    from polybus.model.topic import Bounds, ShardBounds, Topic
    from polybus.native.port.native_port import Caller, NativePort

SHARD_COUNTS = ("inserted", "routed", "trimmed", "bytes")
SUMMED_GROUP_COUNTS = ("emitted", "acked", "redelivered", "dead_lettered")
COUNTS = (*SHARD_COUNTS, *SUMMED_GROUP_COUNTS)
GROUP_COUNTS = (*SUMMED_GROUP_COUNTS, "lag", "trimmed_unread")


def compose_topic_stats(
    topic: Topic,
    bounds: Bounds,
    groups: Sequence[Mapping[str, Any]],
    queries: Sequence[Mapping[str, Any]],
    subscribers: Sequence[Mapping[str, Any]] = (),
) -> Answer:
    """All that `topic.stats` answers, of what the store tells of the topic and its readers."""
    shards = [{"shard": number, **_count_shard(one)} for number, one in enumerate(bounds.shards)]
    for group in groups:
        for one in group["shards"]:
            shard = shards[one["shard"]]
            for key in SUMMED_GROUP_COUNTS:
                shard[key] += one[key]
    return {
        "topic": topic.name,
        "all": _sum_counts(shards, COUNTS),
        "shards": shards,
        "groups": [add_group_totals(one) for one in groups],
        "queries": list(queries),
        "subscribers": list(subscribers),
    }


def _count_shard(bounds: ShardBounds) -> dict[str, int]:
    stored = (bounds.end, bounds.end, bounds.start, bounds.size_bytes)
    return dict(zip(SHARD_COUNTS, stored, strict=True)) | dict.fromkeys(SUMMED_GROUP_COUNTS, 0)


def add_group_totals(group: Mapping[str, Any]) -> Answer:
    """A group, and what its shards come to together."""
    slowest_s = max((one["lag_s"] for one in group["shards"]), default=0.0)
    return {**group, **_sum_counts(group["shards"], GROUP_COUNTS), "lag_s": slowest_s}


def _sum_counts(shards: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, int]:
    return {key: sum(shard[key] for shard in shards) for key in keys}


def list_group_infos(groups: Coordinator, topic: Topic) -> list[Answer]:
    """All that there are, as `group.info` tells each."""
    found = []
    for name in groups.names(topic):
        try:
            found.append(groups.info(topic, name))
        except DoesNotExist:  # since it was listed
            continue
    return found


def _stats(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    topic = port.find_visible_topic(caller, given["topic"])
    groups = list_group_infos(port.groups, topic)
    bounds = port.store.bounds(topic.number)  # after them: what is acked is inserted
    queries = list_query_progress(port.store, topic, bounds)
    return compose_topic_stats(
        topic, bounds, groups, queries, read_subscriber_lags(port.store, topic, bounds)
    )


ACTIONS = {
    ActionSchema(
        "topic.stats",
        "Counts of messages, for the whole topic and by shard; its groups, Spark's queries and "
        "pirate's subscribers, and how far they are behind",
        (Field("topic", "text", "its name"),),
        "topic, all, shards, groups, queries, subscribers: see below",
    ): _stats,
}
