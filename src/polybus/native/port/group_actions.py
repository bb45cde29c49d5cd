"""Actions on consumer groups: joining, fetching, acking, and looking after them.

All of them need the right to subscribe to the topic; what a transaction produces needs
the right to produce, for each topic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from polybus.durable.topic_names import creator_of
from polybus.errors import Denied, MalformedRequest
from polybus.groups.coordinator import Coordinator
from polybus.groups.dead_letter_queue import SUFFIX, check_dead_letter_name
from polybus.groups.group_records import Member, check_name
from polybus.groups.group_registry import EARLIEST, STARTS
from polybus.groups.group_state import GroupContext
from polybus.groups.message_block import block_of
from polybus.model.access_rule import PRODUCE, SUBSCRIBE
from polybus.model.name_pattern import Pattern
from polybus.native.port.group_entries import read_entries, read_messages, read_running
from polybus.native.protocol.fields import ActionSchema, Answer, Arguments, Field

if TYPE_CHECKING:
    from collections.abc import Callable

    from polybus.groups.shard_ends import ShardEnds
    from polybus.model.commit import Append, CommitResult
    from polybus.model.limits import NativeLimits
    from polybus.model.topic import Topic
    from polybus.native.port.native_port import Caller, NativePort
    from polybus.native.port.shard_waits import ShardWaits
    from polybus.native.port.topic_access import TopicAccess

MAX_DELIVER: Final = 1_000_000
MIN_DEAD_MS, MAX_DEAD_MS = 100, 3_600_000  # below, a slow disk is a death; above, nobody is
GROUP_CHANGES: Final = -1  # the place of a topic that stands for changes of its groups


def open_coordinator(
    access: TopicAccess,
    ends: ShardEnds,
    waits: ShardWaits,
    limits: NativeLimits,
    clock: Callable[[], float],
    wall_ns: Callable[[], int],
) -> Coordinator:
    def dead_letters(topic: Topic) -> Topic:
        """Made for who made the topic, with as many shards."""
        name = topic.name + SUFFIX
        found = access.durable.find(name)
        return (
            found or access.find_or_create(creator_of(topic), name, len(topic.open_shards), {})[0]
        )

    def wake(number: int) -> None:
        waits.wake(number, GROUP_CHANGES)

    means = GroupContext(access.durable, ends, clock, wall_ns, wake, dead_letters)
    return Coordinator(means, limits.max_groups, limits.max_user_groups, limits.max_members)


# --- members


def _join(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    topic = get_group_topic(port, caller, given)
    if given["start"] not in STARTS:
        raise MalformedRequest(f"start is one of {', '.join(STARTS)}")
    check_name("consumer", given["consumer"])
    check_dead_letter_name(topic)
    asked = Member(0, given["max_deliver"], given["heartbeat_ms"], given["dead_ms"])
    if not 1 <= asked.max_deliver <= MAX_DELIVER:
        raise MalformedRequest(f"max_deliver is from 1 to {MAX_DELIVER}")
    if not MIN_DEAD_MS <= asked.dead_ms <= MAX_DEAD_MS:
        raise MalformedRequest(f"dead_ms is from {MIN_DEAD_MS} to {MAX_DEAD_MS}")
    if not 1 <= asked.heartbeat_ms < asked.dead_ms:
        raise MalformedRequest("heartbeat_ms is from 1 on, and less than dead_ms")
    joined = port.groups.join(
        topic,
        given["group"],
        given["consumer"],
        asked,
        given["start"],
        caller.identity.name,
    )
    return {
        "epoch": joined.epoch,
        "heartbeat_ms": joined.heartbeat_ms,
        "dead_ms": joined.dead_ms,
        "shards": len(topic.shards),
    }


def _heartbeat(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    topic = get_group_topic(port, caller, given)
    running = read_running(given["running"] or {})
    release, assigned = port.groups.heartbeat(
        topic, given["group"], given["consumer"], given["epoch"], running
    )
    return {"release": release, "assigned": assigned}


def _leave(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    topic = get_group_topic(port, caller, given)
    entries = read_entries(given["shards"] or [])
    member = given["group"], given["consumer"], given["epoch"]
    return {"shards": port.groups.leave(topic, *member, entries)}


# --- messages


def _fetch(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    raise MalformedRequest("a fetch has several results: it is asked for by a call of its own")


def _ack(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    topic = get_group_topic(port, caller, given)
    entries = read_entries(given["shards"])
    member = given["group"], given["consumer"], given["epoch"]
    return {"shards": port.groups.ack(topic, *member, entries)}


def _commit(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    topic = get_group_topic(port, caller, given)
    messages = read_messages(given["messages"] or [], port.wall_ns() // 1_000_000)
    appends: list[Append] = []
    for name, some in messages.items():
        target = _output(port, caller, name)
        appends += port.access.durable.build_appends(target, block_of(some))
    place = given["shard"], given["shard_epoch"], given["offset"], given["attempt"]
    member = given["consumer"], given["epoch"]
    size = sum(one.block.size_bytes for one in appends)
    with port.budget.reserve(size):
        done = port.groups.commit(
            topic, given["group"], member, place, appends, tuple(given["stages"] or ())
        )
    if done is not None:
        count = sum(one.block.count for one in appends)
        port.access.durable.traffic.receive(count, size)
    return _describe_commit(port, done)


def _output(port: NativePort, caller: Caller, name: str) -> Topic:
    access, identity = port.access, caller.identity
    access.check_allowed(identity, PRODUCE, name)
    found = access.durable.find(name)
    return found or access.find_or_create(identity, name, port.limits.default_shards, {})[0]


def _describe_commit(port: NativePort, done: CommitResult | None) -> Answer:
    if done is None:
        return {"duplicate": True, "spans": [], "timestamp_ns": 0}
    spans: list[dict[str, Any]] = []
    for one in done.spans:
        topic = port.access.durable.find_by_number(one.topic)
        place = {"shard": one.shard, "first_offset": one.first_offset, "first_id": one.first_id}
        spans.append({"topic": topic.name if topic else None, **place, "count": one.count})
    return {"duplicate": False, "spans": spans, "timestamp_ns": done.timestamp_ns}


# --- groups


def _reset(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    topic = get_group_topic(port, caller, given)
    offsets = port.groups.reset(topic, given["group"], given["to"], given["force"])
    return {"offsets": {str(shard): offset for shard, offset in offsets.items()}}


def _list(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    pattern = Pattern(given["topic"])
    known = port.groups.names_by_topic()
    found = []
    for topic in port.access.list_visible(caller.identity):
        names = known.get(topic.number)
        if names and pattern.matches(topic.name.encode()) and _can_subscribe(port, caller, topic):
            found += [told for name in names if (told := port.groups.summarize(topic, name))]
    return {"groups": found}


def _info(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    topic = get_group_topic(port, caller, given)
    return {"topic": topic.name, **port.groups.info(topic, given["group"])}


def _rm(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    port.groups.remove(get_group_topic(port, caller, given), given["group"], given["force"])
    return {}


def get_group_topic(port: NativePort, caller: Caller, given: Arguments) -> Topic:
    check_name("group", given["group"])
    return port.access.get_topic_cached(caller.identity, SUBSCRIBE, given["topic"])


def _can_subscribe(port: NativePort, caller: Caller, topic: Topic) -> bool:
    try:
        port.access.check_allowed(caller.identity, SUBSCRIBE, topic.name)
    except Denied:
        return False
    return True


TOPIC = Field("topic", "text", "its name")
GROUP = Field("group", "text", "the group's name, 1 to 128 bytes", "default")
CONSUMER = Field("consumer", "text", "the member's name")
EPOCH = Field("epoch", "count", "what group.join answered")
MEMBER = (TOPIC, GROUP, CONSUMER, EPOCH)
FORCE = Field("force", "flag", "also if it has members", False)
ENTRIES = "shard, epoch, and optionally acked, failed, running, emitted, redelivered, release each"

FETCH = ActionSchema(
    "group.fetch",
    "Messages of the member's shards, and what has changed about these",
    (
        *MEMBER,
        Field("held", "objects", "shards it has: shard, epoch, next, paused, releasing each", None),
        Field("max_rows", "count", "at most so many", 8192),
        Field("max_bytes", "count", "about so many bytes of keys, bodies and headers", 4 << 20),
        Field("wait_ms", "count", "how long to wait if there is nothing to tell", 0),
        Field("follow", "flag", "to go on after rows, within the same bounds", False),
    ),
    "assigned, release, lost, rows; and in a second result what is in the rows",
)

ACTIONS = {
    ActionSchema(
        "group.join",
        "Makes a consumer a member of a group, which is made if need be",
        (
            TOPIC,
            GROUP,
            Field("consumer", "text", "a name, 1 to 128 bytes; an older one of it is fenced"),
            Field("start", "text", "where a new group starts: earliest or latest", EARLIEST),
            Field("max_deliver", "count", "failed runs after which a message is given up", 5),
            Field("heartbeat_ms", "count", "how often it is going to give a sign of life", 2000),
            Field("dead_ms", "count", "how long without one until it is dropped", 5000),
        ),
        "epoch, heartbeat_ms, dead_ms, shards (how many the topic has)",
    ): _join,
    ActionSchema(
        "group.heartbeat",
        "A sign of life, with what the member is running",
        (
            *MEMBER,
            Field("running", "object", 'offsets by shard: {"0": [17]}', None),
        ),
        "release (shards to drain and release), assigned (all that are the member's)",
    ): _heartbeat,
    FETCH: _fetch,
    ActionSchema(
        "group.ack",
        "Acks messages and reports failed runs, of several shards in one commit",
        (*MEMBER, Field("shards", "objects", ENTRIES)),
        "shards: shard, low, attempts, dead, error each, in the order asked",
    ): _ack,
    ActionSchema(
        "group.commit",
        "Acks one message and writes what was produced with it, in one commit",
        (
            *MEMBER,
            Field("shard", "count", "the message's"),
            Field("shard_epoch", "count", "of the shard, as assigned"),
            Field("offset", "count", "the message's"),
            Field("attempt", "count", "how many failed runs of it the member knew of", 0),
            Field("messages", "objects", "topic, body, shard_key, headers, insertion_ms", None),
            Field("stages", "texts", "published with it, after the messages", None),
        ),
        "duplicate (it was acked already: nothing is written), spans, timestamp_ns",
    ): _commit,
    ActionSchema(
        "group.leave",
        "Ends a membership; the member's shards go to others at once",
        (*MEMBER, Field("shards", "objects", "last acks, as group.ack takes them", None)),
        "shards, as group.ack",
    ): _leave,
    ActionSchema(
        "group.reset",
        "Moves a group to another position; refused while it has members, unless forced",
        (
            TOPIC,
            GROUP,
            Field("to", "target", "see below"),
            FORCE,
        ),
        "offsets, by shard, of those that were moved",
    ): _reset,
    ActionSchema(
        "group.list",
        "The groups of topics that the caller may subscribe to",
        (Field("topic", "text", "only of topics it matches; * is any run of characters", "*"),),
        "groups: topic, group, members, shards, acked, lag each",
    ): _list,
    ActionSchema(
        "group.info",
        "A group: its members, and how far it has come in each shard",
        (TOPIC, GROUP),
        "topic, group, members, shards, ack_latency",
    ): _info,
    ActionSchema(
        "group.rm",
        "Removes a group and its positions; refused while it has members, unless forced",
        (TOPIC, GROUP, FORCE),
        "nothing",
    ): _rm,
}
