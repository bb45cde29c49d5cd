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

from polybus.dialects.pirate.server.subscriber_lags import subscribers_of
from polybus.durable.query_progress import queries_of
from polybus.errors import DoesNotExist
from polybus.native.protocol.fields import Action, Answer, Arguments, Field

if TYPE_CHECKING:
    from polybus.groups.coordinator import Coordinator
    from polybus.model.topic import Bounds, ShardBounds, Topic
    from polybus.native.port.native_port import Caller, Port

STORED = ("inserted", "routed", "trimmed", "bytes")
BY_GROUPS = ("emitted", "acked", "redelivered", "dead_lettered")
COUNTS = (*STORED, *BY_GROUPS)
OF_A_GROUP = (*BY_GROUPS, "lag", "trimmed_unread")


def composed(
    topic: Topic,
    bounds: Bounds,
    groups: Sequence[Mapping[str, Any]],
    queries: Sequence[Mapping[str, Any]],
    subscribers: Sequence[Mapping[str, Any]] = (),
) -> Answer:
    """All that `topic.stats` answers, of what the store tells of the topic and its readers."""
    shards = [{"shard": number, **_stored(one)} for number, one in enumerate(bounds.shards)]
    for group in groups:
        for one in group["shards"]:
            shard = shards[one["shard"]]
            for key in BY_GROUPS:
                shard[key] += one[key]
    return {
        "topic": topic.name,
        "all": _summed(shards, COUNTS),
        "shards": shards,
        "groups": [with_sums(one) for one in groups],
        "queries": list(queries),
        "subscribers": list(subscribers),
    }


def _stored(bounds: ShardBounds) -> dict[str, int]:
    stored = (bounds.end, bounds.end, bounds.start, bounds.size_bytes)
    return dict(zip(STORED, stored, strict=True)) | dict.fromkeys(BY_GROUPS, 0)


def with_sums(group: Mapping[str, Any]) -> Answer:
    """A group, and what its shards come to together."""
    slowest_s = max((one["lag_s"] for one in group["shards"]), default=0.0)
    return {**group, **_summed(group["shards"], OF_A_GROUP), "lag_s": slowest_s}


def _summed(shards: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, int]:
    return {key: sum(shard[key] for shard in shards) for key in keys}


def groups_of(groups: Coordinator, topic: Topic) -> list[Answer]:
    """All that there are, as `group.info` tells each."""
    found = []
    for name in groups.names(topic):
        try:
            found.append(groups.info(topic, name))
        except DoesNotExist:  # since it was listed
            continue
    return found


def _stats(port: Port, caller: Caller, given: Arguments) -> Answer:
    topic = port.seen(caller, given["topic"])
    groups = groups_of(port.groups, topic)
    bounds = port.store.bounds(topic.number)  # after them: what is acked is inserted
    queries = queries_of(port.store, topic, bounds)
    return composed(topic, bounds, groups, queries, subscribers_of(port.store, topic, bounds))


ACTIONS = {
    Action(
        "topic.stats",
        "Counts of messages, for the whole topic and by shard; its groups, Spark's queries and "
        "pirate's subscribers, and how far they are behind",
        (Field("topic", "text", "its name"),),
        "topic, all, shards, groups, queries, subscribers: see below",
    ): _stats,
}
