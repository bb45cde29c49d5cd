"""Requests of the native port, one class per action, in the order of docs/spec/native.md."""

from __future__ import annotations

from typing import Any

from polybus.model.stamp import KEPT_RESULTS
from polybus.model.start_point import EARLIEST
from polybus.model.topic import ALL, All
from polybus.native.protocol import answers
from polybus.native.protocol.fields import Request, action, param
from polybus.store.contract import LEASE_S

MAX_WAIT_MS = 30_000

# --- producers


@action(
    "producer.open",
    "Open a producer, new or known; stamps of its earlier epochs are refused from then on",
    answer="producer, epoch, last_counter (0 if none)",
)
class ProducerOpen(Request[answers.ProducerOpened]):
    producer: str = param("text", "name; empty: a new anonymous producer", default="")
    dense: bool = param("flag", "counters must not leave gaps", default=True)
    kept_results: int = param(
        "count", "number of answers kept for repeated stamps", default=KEPT_RESULTS
    )


@action("producer.close", "Delete a producer and its stamps", answer="nothing")
class ProducerClose(Request[answers.Empty]):
    producer: str = param("text", "name of the producer")
    epoch: int = param("count", "the epoch that the caller holds")


# --- topics


@action(
    "topic.create",
    "Create a topic",
    answer="topic, number, shards, generations, creator, settings",
)
class TopicCreate(Request[answers.TopicDescription]):
    topic: str = param("text", "name of the topic")
    shards: int = param("count", "number of shards; 0: the default of the bus", default=0)
    settings: dict[str, object] | None = param(
        "object", "keep (all, read) and max_bytes (0: no limit), each optional", default=None
    )


@action(
    "topic.configure",
    "Replace the settings of a topic (its creator, admins)",
    answer="as topic.create",
)
class TopicConfigure(Request[answers.TopicDescription]):
    topic: str = param("text", "name of the topic")
    settings: dict[str, object] | None = param(
        "object", "keep (all, read) and max_bytes (0: no limit), each optional", default=None
    )


@action(
    "topic.info",
    "Describe a topic and its bounds",
    answer="as topic.create, first_id, next_id, timestamp_ns",
)
class TopicGet(Request[answers.TopicInfo]):
    topic: str = param("text", "name of the topic")


@action(
    "topic.list",
    "List the topics that are visible to the caller",
    answer="topics: a list, each as topic.create",
)
class TopicsGet(Request[answers.TopicList]):
    pattern: str = param("text", "only matching names; * matches any characters", default="*")


@action("topic.drop", "Drop a topic and its messages (its creator, admins)", answer="nothing")
class TopicDrop(Request[answers.Empty]):
    topic: str = param("text", "name of the topic")


@action(
    "topic.trim",
    "Remove the oldest messages of a topic (its creator, admins)",
    answer="as bounds",
)
class TopicTrim(Request[answers.TopicBounds]):
    topic: str = param("text", "name of the topic")
    before: dict[str, int] = param("object", 'first offset to keep, by shard: {"0": 17}')


@action(
    "topic.reshard",
    "Change the number of shards; not_supported in this version",
    answer="as topic.create",
)
class TopicReshard(Request[answers.TopicDescription]):
    topic: str = param("text", "name of the topic")
    shards: int = param("count", "new number of shards")


@action(
    "bounds",
    "Return the bounds of a topic and of its shards",
    answer="first_id, next_id, timestamp_ns, shards: shard, start, end, bytes each",
)
class BoundsGet(Request[answers.TopicBounds]):
    topic: str = param("text", "name of the topic")


@action(
    "find",
    "Find the first position that was committed at a time or later; the end if there is none",
    answer="position",
)
class PositionFind(Request[answers.FoundPosition]):
    topic: str = param("text", "name of the topic")
    shard: int | All = param(
        "shard", "return an offset of this shard, or an id for all", default=ALL
    )
    timestamp_ns: int = param("count", "clock of the bus, nanoseconds since 1970")


@action(
    "topic.stats",
    "Count messages, for the whole topic and by shard, with its groups, Spark queries and pirate "
    "subscribers, and how far each is behind",
    answer="topic, all, shards, groups, queries, subscribers: see below",
)
class TopicStatsGet(Request[answers.TopicStats]):
    topic: str = param("text", "name of the topic")


# --- groups


@action(
    "group.join",
    "Make a consumer a member of a group, which is created if it does not exist",
    answer="epoch, heartbeat_ms, dead_ms, shards (the number of shards of the topic)",
)
class GroupJoin(Request[answers.GroupJoined]):
    topic: str = param("text", "name of the topic")
    group: str = param("text", "name of the group, 1 to 128 bytes", default="default")
    consumer: str = param("text", "name, 1 to 128 bytes; an older consumer of it is fenced")
    start: str = param("text", "where a new group starts: earliest or latest", default=EARLIEST)
    max_deliver: int = param(
        "count", "failed runs after which a message is a dead letter", default=5
    )
    heartbeat_ms: int = param(
        "count", "interval at which the member sends heartbeats", default=2000
    )
    dead_ms: int = param(
        "count", "time without a heartbeat after which it is dropped", default=5000
    )


@action(
    "group.heartbeat",
    "Keep a membership alive and report the messages that the member runs",
    answer="release (shards to drain and release), assigned (all shards of the member)",
)
class GroupHeartbeat(Request[answers.GroupShards]):
    topic: str = param("text", "name of the topic")
    group: str = param("text", "name of the group, 1 to 128 bytes", default="default")
    consumer: str = param("text", "name of the member")
    epoch: int = param("count", "the epoch that group.join returned")
    running: dict[str, list[int]] | None = param(
        "object", 'offsets by shard: {"0": [17]}', default=None
    )


@action(
    "group.fetch",
    "Fetch messages of the member's shards and changes of the assignment",
    answer="assigned, release, lost, rows; the rows themselves in a second result",
)
class GroupFetch(Request[answers.GroupFetched]):
    topic: str = param("text", "name of the topic")
    group: str = param("text", "name of the group, 1 to 128 bytes", default="default")
    consumer: str = param("text", "name of the member")
    epoch: int = param("count", "the epoch that group.join returned")
    held: list[dict[str, Any]] | None = param(
        "objects", "shards it holds: shard, epoch, next, paused, releasing each", default=None
    )
    max_rows: int = param("count", "maximum number of messages", default=8192)
    max_bytes: int = param(
        "count", "approximate maximum of bytes of keys, bodies and headers", default=4 << 20
    )
    wait_ms: int = param("count", "time to wait if there is nothing to return", default=0)
    follow: bool = param("flag", "continue after rows, within the same limits", default=False)


@action(
    "group.ack",
    "Ack messages and report failed runs, of several shards in one commit",
    answer="shards: shard, low, attempts, dead, error each, in the order of the request",
)
class GroupAck(Request[answers.ShardReports]):
    topic: str = param("text", "name of the topic")
    group: str = param("text", "name of the group, 1 to 128 bytes", default="default")
    consumer: str = param("text", "name of the member")
    epoch: int = param("count", "the epoch that group.join returned")
    shards: list[dict[str, Any]] = param(
        "objects",
        "shard, epoch, and optionally acked, failed, running, emitted, redelivered, release each",
    )


@action(
    "group.commit",
    "Ack one message and write the messages produced with it, in one commit",
    answer="duplicate (it was acked already: nothing is written), spans, timestamp_ns",
)
class GroupCommit(Request[answers.Committed]):
    topic: str = param("text", "name of the topic")
    group: str = param("text", "name of the group, 1 to 128 bytes", default="default")
    consumer: str = param("text", "name of the member")
    epoch: int = param("count", "the epoch that group.join returned")
    shard: int = param("count", "shard of the message")
    shard_epoch: int = param("count", "epoch of the shard, as assigned")
    offset: int = param("count", "offset of the message")
    attempt: int = param("count", "failed runs of it that the member knows of", default=0)
    messages: list[dict[str, Any]] | None = param(
        "objects", "topic, body, shard_key, headers, insertion_ms", default=None
    )
    stages: list[str] | None = param("texts", "published with it, after the messages", default=None)


@action(
    "group.leave",
    "End a membership; the member's shards are reassigned at once",
    answer="shards, as group.ack",
)
class GroupLeave(Request[answers.ShardReports]):
    topic: str = param("text", "name of the topic")
    group: str = param("text", "name of the group, 1 to 128 bytes", default="default")
    consumer: str = param("text", "name of the member")
    epoch: int = param("count", "the epoch that group.join returned")
    shards: list[dict[str, Any]] | None = param(
        "objects", "last acks, as in group.ack", default=None
    )


@action(
    "group.reset",
    "Move a group to another position; refused while it has members, unless forced",
    answer="offsets, by shard, of the shards that were moved",
)
class GroupReset(Request[answers.GroupOffsets]):
    topic: str = param("text", "name of the topic")
    group: str = param("text", "name of the group, 1 to 128 bytes", default="default")
    to: str | dict[str, Any] = param("target", "see below")
    force: bool = param("flag", "also if it has members", default=False)


@action(
    "group.list",
    "List the groups of topics that the caller may subscribe to",
    answer="groups: topic, group, members, shards, acked, lag each",
)
class GroupsGet(Request[answers.GroupList]):
    topic: str = param("text", "only of matching topics; * matches any characters", default="*")


@action(
    "group.info",
    "Describe a group: its members, and its progress in each shard",
    answer="topic, group, members, shards, ack_latency",
)
class GroupGet(Request[answers.Answer]):
    topic: str = param("text", "name of the topic")
    group: str = param("text", "name of the group, 1 to 128 bytes", default="default")


@action(
    "group.rm",
    "Remove a group and its positions; refused while it has members, unless forced",
    answer="nothing",
)
class GroupRemove(Request[answers.Empty]):
    topic: str = param("text", "name of the topic")
    group: str = param("text", "name of the group, 1 to 128 bytes", default="default")
    force: bool = param("flag", "also if it has members", default=False)


# --- Spark queries


@action(
    "query.progress",
    "Record how far a Spark query has read a topic, for topic.stats",
    answer="nothing",
)
class QueryProgress(Request[answers.Empty]):
    query: str = param("text", "id that the query keeps across restarts")
    topic: str = param("text", "name of the topic")
    offsets: dict[str, int] = param("object", 'first unread offset, by shard: {"0": 17}')
    name: str = param("text", "name for people; empty: as reported before", default="")


# --- stages


@action(
    "stage.new",
    "Open a new, empty stage; every caller that knows its name may use it",
    answer="stage",
)
class StageOpen(Request[answers.StageOpened]):
    lease_s: float = param("seconds", "time to keep it unless renewed", default=LEASE_S)


@action("stage.renew", "Restart the lease of a stage", answer="nothing")
class StageRenew(Request[answers.Empty]):
    stage: str = param("text", "the name that stage.new returned")
    lease_s: float = param("seconds", "time to keep it unless renewed", default=LEASE_S)


@action(
    "stage.publish",
    "Make all batches of the stages visible at once, over all their topics",
    answer="spans: topic, shard, first_offset, first_id, count each; timestamp_ns, duplicate",
)
class StagePublish(Request[answers.Committed]):
    stages: list[str] = param("texts", "in this order")
    stamp: dict[str, Any] | None = param(
        "object", "producer, epoch, counter; a repeated stamp publishes nothing", default=None
    )
    run: dict[str, Any] | None = param(
        "object", "id, on_new (refuse, continue); the stamp has no epoch", default=None
    )


@action("stage.discard", "Remove a stage, if it still exists", answer="nothing")
class StageDiscard(Request[answers.Empty]):
    stage: str = param("text", "the name that stage.new returned")


# --- access rules


@action(
    "acl.ls",
    "List the rules that apply to a topic (its creator, admins)",
    answer="rules: rule, source, by, names_nobody each",
)
class RulesGet(Request[answers.RuleList]):
    topic: str = param("text", "name of the topic; empty: all rules (admins)", default="")


@action(
    "acl.add",
    "Add a rule (a topic's creator for produce, subscribe and delete of it; admins)",
    answer="rule, changed, kept",
)
class RuleAdd(Request[answers.RuleChanged]):
    rule: str = param("text", "as in: deny user:bob produce orders")


@action("acl.rm", "Remove a rule that was added this way", answer="rule, changed, kept")
class RuleRemove(Request[answers.RuleChanged]):
    rule: str = param("text", "as in: deny user:bob produce orders")


@action(
    "acl.test",
    "Return whether an action would be allowed, and the rule that decides",
    answer="allowed, why, rule",
)
class RuleTest(Request[answers.RuleVerdict]):
    who: str = param("text", "user:NAME, group:NAME, service:NAME, key:NAME or anonymous")
    action: str = param("text", "create, produce, subscribe, delete, call or admin")
    topic: str = param("text", "name of the topic")


# --- the whole bus


@action(
    "wait",
    "Wait until a shard has messages at an offset or later, or until the timeout",
    answer="news: topic, shard, end each; empty after the timeout",
)
class ShardsWait(Request[answers.WaitResult]):
    positions: list[dict[str, Any]] = param("objects", "topic, shard, offset each")
    timeout_ms: int = param("count", f"at most {MAX_WAIT_MS}", default=MAX_WAIT_MS)


@action("stats", "Return the counters of the bus", answer="as polybus stats --json")
class StatsGet(Request[answers.Answer]):
    pass


# --- the ticket of a read, which is not an action


@action("read", "Read a range of a topic", answer="batches")
class ReadTicket(Request[answers.Empty]):
    topic: str = param("text", "name of the topic")
    shard: int | All = param("shard", "a shard number, or all", default=ALL)
    start: int | None = param(
        "count",
        "first offset (for all: id); absent: the first that is stored",
        default=None,
        wire="from",
    )
    to: int | None = param("count", "stop before this offset (id)", default=None)
    max_rows: int = param("count", "maximum number of messages; 0: no limit", default=0)
    max_bytes: int = param(
        "count",
        "approximate maximum of bytes of keys, bodies and headers; 0: no limit",
        default=0,
    )
    wait_ms: int = param("count", "time to wait for more at the end", default=0)
    columns: list[str] | None = param("texts", "columns to return; absent: all", default=None)
