"""Requests of the native port, one class per action, in the order of docs/spec/native.md."""

from __future__ import annotations

from polybus.model.stamp import KEPT_RESULTS
from polybus.model.start_point import EARLIEST
from polybus.model.topic import ALL
from polybus.native.protocol import answers
from polybus.native.protocol.fields import (
    A,
    Count,
    Flag,
    Object,
    Objects,
    Request,
    Seconds,
    ShardOrAll,
    Target,
    Text,
    Texts,
    param,
)
from polybus.store.contract import LEASE_S

MAX_WAIT_MS = 30_000
SETTINGS = (
    "keep (all, read), max_bytes (0: no limit), expired (drop, dead-letter), retain_age_ms,"
    " retain_bytes, retain_messages and retain_unread (keep, drop), each optional; null: the"
    " default"
)


class TopicRequest(Request[A]):
    topic: Text = param("name of the topic")


class GroupRequest(TopicRequest[A]):
    group: Text = param("name of the group, 1 to 128 bytes", default="default")


class MemberRequest(GroupRequest[A]):
    consumer: Text = param("name of the member")
    epoch: Count = param("the epoch that group.join returned")


# --- producers


class ProducerOpen(
    Request[answers.ProducerOpened],
    action="producer.open",
    answer="producer, epoch, last_counter (0 if none)",
):
    """Open a producer, new or known; stamps of its earlier epochs are refused from then on."""

    producer: Text = param("name; empty: a new anonymous producer", default="")
    dense: Flag = param("counters must not leave gaps", default=True)
    kept_results: Count = param("number of answers kept for repeated stamps", default=KEPT_RESULTS)


class ProducerClose(Request[answers.Empty], action="producer.close", answer="nothing"):
    """Delete a producer and its stamps."""

    producer: Text = param("name of the producer")
    epoch: Count = param("the epoch that the caller holds")


# --- topics


class TopicCreate(
    TopicRequest[answers.TopicDescription],
    action="topic.create",
    answer="topic, number, shards, generation, generations, creator, settings, paused",
):
    """Create a topic."""

    shards: Count = param("number of shards; 0: the default of the bus", default=0)
    settings: Object | None = param(SETTINGS, default=None)


class TopicConfigure(
    TopicRequest[answers.TopicDescription], action="topic.configure", answer="as topic.create"
):
    """Replace the settings of a topic, or change some of them (its creator, admins)."""

    settings: Object | None = param(SETTINGS, default=None)
    change: Object | None = param("settings to change, as above; the others stay", default=None)


class PauseRequest(TopicRequest[A]):
    produce: Flag = param("producing; with neither flag, both", default=False)
    consume: Flag = param("consuming by groups and pirate subscribers", default=False)


class TopicPause(
    PauseRequest[answers.TopicDescription], action="topic.pause", answer="as topic.create"
):
    """Refuse messages for a topic, or hold back its consumers (its creator, admins)."""


class TopicResume(
    PauseRequest[answers.TopicDescription], action="topic.resume", answer="as topic.create"
):
    """End a pause of a topic, or a part of it (its creator, admins)."""


class TopicGet(
    TopicRequest[answers.TopicInfo],
    action="topic.info",
    answer="as topic.create, first_id, next_id, timestamp_ns, open_shards (first and last),"
    " draining (sealed shards that groups have not acked, by group), retention,"
    " delayed: see below",
):
    """Describe a topic and its bounds."""


class TopicsGet(
    Request[answers.TopicList], action="topic.list", answer="topics: a list, each as topic.create"
):
    """List the topics that are visible to the caller."""

    pattern: Text = param("only matching names; * matches any characters", default="*")


class TopicDrop(TopicRequest[answers.Empty], action="topic.drop", answer="nothing"):
    """Drop a topic and its messages (its creator, admins)."""


class TopicTrim(TopicRequest[answers.TopicBounds], action="topic.trim", answer="as bounds"):
    """Remove the oldest messages of a topic (its creator, admins)."""

    before: Object = param('first offset to keep, by shard: {"0": 17}')


class TopicReshard(
    TopicRequest[answers.TopicDescription], action="topic.reshard", answer="as topic.create"
):
    """Seal all shards and open new ones (its creator, admins); a conflict while groups drain."""

    shards: Count = param("new number of shards, 1 to 512; no change if it has that many")


class BoundsGet(
    TopicRequest[answers.TopicBounds],
    action="bounds",
    answer="first_id, next_id, timestamp_ns, shards: shard, start, end, bytes each",
):
    """Return the bounds of a topic and of its shards."""


class PositionFind(TopicRequest[answers.FoundPosition], action="find", answer="position"):
    """Find the first position that was committed at a time or later; the end if there is none."""

    shard: ShardOrAll = param("return an offset of this shard, or an id for all", default=ALL)
    timestamp_ns: Count = param("clock of the bus, nanoseconds since 1970")


class TopicStatsGet(
    TopicRequest[answers.TopicStats],
    action="topic.stats",
    answer="topic, paused, all, shards, groups, queries, subscribers, delayed: see below",
):
    """Count messages, for the whole topic and by shard, with its groups, Spark queries and pirate
    subscribers, and how far each is behind."""


# --- groups


class GroupJoin(
    GroupRequest[answers.GroupJoined],
    action="group.join",
    answer="epoch, heartbeat_ms, dead_ms, shards (the number of shards of the topic)",
):
    """Make a consumer a member of a group, which is created if it does not exist."""

    consumer: Text = param("name, 1 to 128 bytes; an older consumer of it is fenced")
    start: Text = param("where a new group starts: earliest or latest", default=EARLIEST)
    max_deliver: Count = param("failed runs after which a message is a dead letter", default=5)
    heartbeat_ms: Count = param("interval at which the member sends heartbeats", default=2000)
    dead_ms: Count = param("time without a heartbeat after which it is dropped", default=5000)


class GroupHeartbeat(
    MemberRequest[answers.GroupShards],
    action="group.heartbeat",
    answer="release (shards to drain and release), assigned (all shards of the member)",
):
    """Keep a membership alive and report the messages that the member runs."""

    running: Object | None = param('offsets by shard: {"0": [17]}', default=None)


class GroupFetch(
    MemberRequest[answers.GroupFetched],
    action="group.fetch",
    answer="assigned, release, lost, sealed, rows; the rows themselves in a second result",
):
    """Fetch messages of the member's shards and changes of the assignment."""

    held: Objects | None = param(
        "shards it holds: shard, epoch, next, paused, releasing each", default=None
    )
    max_rows: Count = param("maximum number of messages", default=8192)
    max_bytes: Count = param(
        "approximate maximum of bytes of keys, bodies and headers", default=4 << 20
    )
    wait_ms: Count = param("time to wait if there is nothing to return", default=0)
    follow: Flag = param("continue after rows, within the same limits", default=False)


class GroupAck(
    MemberRequest[answers.ShardReports],
    action="group.ack",
    answer="shards: shard, low, attempts, dead, error each, in the order of the request",
):
    """Ack messages and report failed runs, of several shards in one commit."""

    shards: Objects = param(
        "shard, epoch, and optionally acked, failed, running, emitted, redelivered, release each"
    )


class GroupCommit(
    MemberRequest[answers.Committed],
    action="group.commit",
    answer="duplicate (it was acked already: nothing is written), spans, timestamp_ns",
):
    """Ack one message and write the messages produced with it, in one commit."""

    shard: Count = param("shard of the message")
    shard_epoch: Count = param("epoch of the shard, as assigned")
    offset: Count = param("offset of the message")
    attempt: Count = param("failed runs of it that the member knows of", default=0)
    messages: Objects | None = param("topic, body, shard_key, headers, insertion_ms", default=None)
    stages: Texts | None = param("published with it, after the messages", default=None)


class GroupLeave(
    MemberRequest[answers.ShardReports], action="group.leave", answer="shards, as group.ack"
):
    """End a membership; the member's shards are reassigned at once."""

    shards: Objects | None = param("last acks, as in group.ack", default=None)


class GroupReset(
    GroupRequest[answers.GroupOffsets],
    action="group.reset",
    answer="offsets, by shard, of the shards that were moved",
):
    """Move a group to another position; refused while it has members, unless forced."""

    to: Target = param("see below")
    force: Flag = param("also if it has members", default=False)


class GroupsGet(
    Request[answers.GroupList],
    action="group.list",
    answer="groups: topic, group, members, shards, acked, lag, paused each",
):
    """List the groups of topics that the caller may subscribe to."""

    topic: Text = param("only of matching topics; * matches any characters", default="*")


class GroupGet(
    GroupRequest[answers.Answer],
    action="group.info",
    answer="topic, group, paused, members, shards, ack_latency",
):
    """Describe a group: its members, and its progress in each shard."""


class GroupPause(GroupRequest[answers.Empty], action="group.pause", answer="nothing"):
    """Hold back the messages of a group (the creator of its topic, admins)."""


class GroupResume(GroupRequest[answers.Empty], action="group.resume", answer="nothing"):
    """End the pause of a group (the creator of its topic, admins)."""


class GroupRemove(GroupRequest[answers.Empty], action="group.rm", answer="nothing"):
    """Remove a group and its positions; refused while it has members, unless forced."""

    force: Flag = param("also if it has members", default=False)


# --- Spark queries


class QueryProgress(Request[answers.Empty], action="query.progress", answer="nothing"):
    """Record how far a Spark query has read a topic, for topic.stats."""

    query: Text = param("id that the query keeps across restarts")
    topic: Text = param("name of the topic")
    offsets: Object = param('first unread offset, by shard: {"0": 17}')
    name: Text = param("name for people; empty: as reported before", default="")


# --- stages


class StageOpen(Request[answers.StageOpened], action="stage.new", answer="stage"):
    """Open a new, empty stage; every caller that knows its name may use it."""

    lease_s: Seconds = param("time to keep it unless renewed", default=LEASE_S)


class StageRenew(Request[answers.Empty], action="stage.renew", answer="nothing"):
    """Restart the lease of a stage."""

    stage: Text = param("the name that stage.new returned")
    lease_s: Seconds = param("time to keep it unless renewed", default=LEASE_S)


class StagePublish(
    Request[answers.Committed],
    action="stage.publish",
    answer="spans: topic, shard, first_offset, first_id, count each; timestamp_ns, duplicate,"
    " deliver_at_ns",
):
    """Make all batches of the stages visible at once, over all their topics."""

    stages: Texts = param("in this order")
    stamp: Object | None = param(
        "producer, epoch, counter; a repeated stamp publishes nothing", default=None
    )
    run: Object | None = param(
        "id, on_new (refuse, continue); the stamp has no epoch", default=None
    )


class StageDiscard(Request[answers.Empty], action="stage.discard", answer="nothing"):
    """Remove a stage, if it still exists."""

    stage: Text = param("the name that stage.new returned")


# --- access rules


class RulesGet(
    Request[answers.RuleList], action="acl.ls", answer="rules: rule, source, by, names_nobody each"
):
    """List the rules that apply to a topic (its creator, admins)."""

    topic: Text = param("name of the topic; empty: all rules (admins)", default="")


class RuleAdd(Request[answers.RuleChanged], action="acl.add", answer="rule, changed, kept"):
    """Add a rule (a topic's creator for produce, subscribe and delete of it; admins)."""

    rule: Text = param("as in: deny user:bob produce orders")


class RuleRemove(Request[answers.RuleChanged], action="acl.rm", answer="rule, changed, kept"):
    """Remove a rule that was added this way."""

    rule: Text = param("as in: deny user:bob produce orders")


class RuleTest(Request[answers.RuleVerdict], action="acl.test", answer="allowed, why, rule"):
    """Return whether an action would be allowed, and the rule that decides."""

    who: Text = param("user:NAME, group:NAME, service:NAME, key:NAME or anonymous")
    action: Text = param("create, produce, subscribe, delete, call or admin")
    topic: Text = param("name of the topic")


# --- the whole bus


class ShardsWait(
    Request[answers.WaitResult],
    action="wait",
    answer="news: topic, shard, end each; empty after the timeout",
):
    """Wait until a shard has messages at an offset or later, or until the timeout."""

    positions: Objects = param("topic, shard, offset each")
    timeout_ms: Count = param(f"at most {MAX_WAIT_MS}", default=MAX_WAIT_MS)


class StatsGet(Request[answers.Answer], action="stats", answer="as polybus stats --json"):
    """Return the counters of the bus."""


# --- the ticket of a read, which is not an action


class ReadTicket(TopicRequest[answers.Empty], action="read", answer="batches"):
    """Read a range of a topic."""

    shard: ShardOrAll = param("a shard number, or all", default=ALL)
    start: Count | None = param(
        "first offset (for all: id); absent: the first that is stored", default=None, wire="from"
    )
    to: Count | None = param("stop before this offset (id)", default=None)
    max_rows: Count = param("maximum number of messages; 0: no limit", default=0)
    max_bytes: Count = param(
        "approximate maximum of bytes of keys, bodies and headers; 0: no limit", default=0
    )
    wait_ms: Count = param("time to wait for more at the end", default=0)
    columns: Texts | None = param("columns to return; absent: all", default=None)
