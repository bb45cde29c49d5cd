"""Actions on consumer groups: join, fetch, ack, and administration.

Every action requires the right to subscribe to the topic; pause and resume require the right to
delete it. Output messages and stages of `group.commit` also require the right to produce to their
topics.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from polybus.errors import Damaged, Denied, MalformedRequest
from polybus.groups.coordinator import Coordinator
from polybus.groups.dead_letter_queue import DeadLetterTargets, check_dead_letter_name
from polybus.groups.group_records import Member, check_name
from polybus.groups.group_registry import STARTS
from polybus.groups.group_state import GroupContext
from polybus.groups.member_fetch import EMPTY_FETCH
from polybus.groups.message_block import build_block
from polybus.model.access_rule import DELETE, PRODUCE, SUBSCRIBE
from polybus.model.name_pattern import Pattern
from polybus.native.port.group_entries import (
    read_entries,
    read_held,
    read_messages,
    read_running,
)
from polybus.native.protocol.requests import (
    GroupAck,
    GroupCommit,
    GroupFetch,
    GroupGet,
    GroupHeartbeat,
    GroupJoin,
    GroupLeave,
    GroupPause,
    GroupRemove,
    GroupRequest,
    GroupReset,
    GroupResume,
    GroupsGet,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from polybus.bus.alarms import Alarms
    from polybus.bus.shares import ShareTable
    from polybus.groups.member_fetch import FetchResult
    from polybus.groups.shard_ends import ShardEnds
    from polybus.model.commit import Append
    from polybus.model.limits import NativeLimits
    from polybus.model.rows import Rows
    from polybus.model.topic import Topic
    from polybus.native.port.actions import Handlers
    from polybus.native.port.native_port import Caller, NativePort
    from polybus.native.port.shard_waits import ShardWaits
    from polybus.native.port.topic_access import TopicAccess
    from polybus.native.protocol.answers import (
        Answer,
        Committed,
        Empty,
        GroupFetched,
        GroupJoined,
        GroupList,
        GroupOffsets,
        GroupShards,
        ShardReports,
    )

MAX_DELIVER: Final = 1_000_000
# Below the minimum a slow disk looks like a dead member; above the maximum a dead member
# blocks its shards for hours.
MIN_DEAD_MS, MAX_DEAD_MS = 100, 3_600_000
GROUP_CHANGES: Final = -1  # pseudo shard of a topic: waits on it end when its groups change

FetchPart = tuple["GroupFetched | None", "Rows"]  # without an object there are only rows


def open_coordinator(
    access: TopicAccess,
    ends: ShardEnds,
    waits: ShardWaits,
    group_shares: ShareTable,
    limits: NativeLimits,
    clock: Callable[[], float],
    wall_ns: Callable[[], int],
    alarms: Alarms,
) -> Coordinator:
    """Return a coordinator of all groups in the store."""

    def wake(number: int) -> None:
        waits.wake(number, GROUP_CHANGES)

    dead_letters = DeadLetterTargets(access.open_dead_letters, alarms, clock)
    context = GroupContext(access.durable, ends, clock, wall_ns, wake, dead_letters)
    return Coordinator(context, group_shares, limits.max_members)


# --- members


def _join(port: NativePort, caller: Caller, request: GroupJoin) -> GroupJoined:
    topic = _get_group_topic(port, caller, request)
    if request.start not in STARTS:
        raise MalformedRequest(f"start must be one of {', '.join(STARTS)}")
    check_name("consumer", request.consumer)
    check_dead_letter_name(topic)
    if not 1 <= request.max_deliver <= MAX_DELIVER:
        raise MalformedRequest(f"max_deliver must be from 1 to {MAX_DELIVER}")
    if not MIN_DEAD_MS <= request.dead_ms <= MAX_DEAD_MS:
        raise MalformedRequest(f"dead_ms must be from {MIN_DEAD_MS} to {MAX_DEAD_MS}")
    if not 1 <= request.heartbeat_ms < request.dead_ms:
        raise MalformedRequest("heartbeat_ms must be >= 1 and less than dead_ms")
    member = Member(0, request.max_deliver, request.heartbeat_ms, request.dead_ms)
    joined = port.groups.join(
        topic, request.group, request.consumer, member, request.start, caller.identity
    )
    return {
        "epoch": joined.epoch,
        "heartbeat_ms": joined.heartbeat_ms,
        "dead_ms": joined.dead_ms,
        "shards": len(topic.shards),
    }


def _heartbeat(port: NativePort, caller: Caller, request: GroupHeartbeat) -> GroupShards:
    topic = _get_group_topic(port, caller, request)
    running = read_running(request.running or {})
    release, assigned = port.groups.heartbeat(
        topic, request.group, request.consumer, request.epoch, running
    )
    return {"release": release, "assigned": assigned}


def _leave(port: NativePort, caller: Caller, request: GroupLeave) -> ShardReports:
    topic = _get_group_topic(port, caller, request)
    entries = read_entries(request.shards or [])
    member = request.group, request.consumer, request.epoch
    return {"shards": port.groups.leave(topic, *member, entries)}


# --- messages


def _fetch(port: NativePort, caller: Caller, request: GroupFetch) -> GroupFetched:
    raise MalformedRequest("group.fetch returns several results; call stream_fetch")


def stream_fetch(port: NativePort, caller: Caller, request: GroupFetch) -> Iterator[FetchPart]:
    """Yield one answer with its rows or, with `follow`, rows as they are committed.

    Following saves a request per commit, which would take longer than the commit. It ends
    after the requested number of rows, at the timeout, or with an answer that reports more
    than rows.
    """
    topic = _get_group_topic(port, caller, request)
    held = read_held(request.held or [])
    limits = port.limits
    most = (
        min(request.max_rows, limits.max_fetch_rows),
        min(request.max_bytes, limits.max_fetch_bytes),
    )
    member = request.consumer, request.epoch
    wait_s = min(request.wait_ms / 1000, limits.max_wait_s)
    fetch = port.groups.open_fetch(topic, request.group, member, held, most, not wait_s)
    result = fetch.poll()
    if result or not wait_s:
        yield _fetch_part(port, result, request.follow)
        if result.is_change or not (request.follow and fetch.advance(result)):
            return
    active = [shard for shard, position in held.items() if not position.paused]
    places = [(topic.number, shard) for shard in (GROUP_CHANGES, *active)]
    with port.waits.open_wait(places, wait_s, caller.is_gone, caller.identity) as waiting:
        # Poll again: news before the wait was registered did not wake it.
        result = fetch.poll()
        while True:
            while not result:
                _get_group_topic(port, caller, request)  # a change of the rules wakes the wait
                if not waiting.sleep():
                    break
                result = fetch.poll()
            _get_group_topic(port, caller, request)  # access rules may have changed meanwhile
            yield _fetch_part(port, result, request.follow)
            if result.is_change or not (result and request.follow and fetch.advance(result)):
                return
            # News since the last poll have set the event, so sleep returns at once.
            result = EMPTY_FETCH


def _fetch_part(port: NativePort, result: FetchResult, is_following: bool) -> FetchPart:
    rows = result.rows
    if rows.count:
        port.access.durable.traffic.deliver(rows.count, rows.size_bytes)
        if is_following and not result.is_change:
            return None, rows
    answer: GroupFetched = {
        "assigned": result.assigned,
        "release": result.release,
        "lost": result.lost,
        "sealed": result.sealed,
        "rows": result.places,
    }
    return answer, rows


def _ack(port: NativePort, caller: Caller, request: GroupAck) -> ShardReports:
    topic = _get_group_topic(port, caller, request)
    entries = read_entries(request.shards)
    member = request.group, request.consumer, request.epoch
    return {"shards": port.groups.ack(topic, *member, entries)}


def _commit(port: NativePort, caller: Caller, request: GroupCommit) -> Committed:
    topic = _get_group_topic(port, caller, request)
    access = port.access
    appends: list[Append] = []
    messages_by_topic = read_messages(request.messages or [], port.wall_ns() // 1_000_000)
    for name, messages in messages_by_topic.items():
        access.check_allowed(caller.identity, PRODUCE, name)
        target = access.get_or_create(caller.identity, name, port.limits.default_shards)
        appends += access.durable.build_appends(target, build_block(messages))
    stages = tuple(request.stages or ())
    access.check_staged(caller.identity, stages)
    position = request.shard, request.shard_epoch, request.offset, request.attempt
    member = request.consumer, request.epoch
    size = sum(append.block.size_bytes for append in appends)
    with port.budget.reserve(size):
        done = port.groups.commit(topic, request.group, member, position, appends, stages)
    if done is None:  # the message was acked already
        return {"duplicate": True, "spans": [], "timestamp_ns": 0, "deliver_at_ns": None}
    port.stages.end(request.stages or ())
    access.durable.traffic.receive(sum(append.block.count for append in appends), size)
    return port.describe_commit(done)


# --- administration


def _reset(port: NativePort, caller: Caller, request: GroupReset) -> GroupOffsets:
    topic = _get_group_topic(port, caller, request)
    offsets = port.groups.reset(topic, request.group, request.to, request.force)
    return {"offsets": {str(shard): offset for shard, offset in offsets.items()}}


def _list(port: NativePort, caller: Caller, request: GroupsGet) -> GroupList:
    pattern = Pattern(request.topic)
    names_by_topic = port.groups.names_by_topic()
    groups = []
    for topic in port.access.list_visible(caller.identity):
        names = names_by_topic.get(topic.number)
        if not names or not pattern.matches(topic.name.encode()):
            continue
        try:  # a visible topic is not always readable
            port.access.check_allowed(caller.identity, SUBSCRIBE, topic.name)
        except Denied:
            continue
        for name in names:
            # A damaged group is not listed: calls for it raise, and the log names it.
            with suppress(Damaged):
                summary = port.groups.summarize(topic, name)
                groups += [summary] if summary else []
    return {"groups": groups}


def _info(port: NativePort, caller: Caller, request: GroupGet) -> Answer:
    topic = _get_group_topic(port, caller, request)
    return {"topic": topic.name, **port.groups.info(topic, request.group)}


def _pause(port: NativePort, caller: Caller, request: GroupPause) -> Empty:
    return _set_paused(port, caller, request, True)


def _resume(port: NativePort, caller: Caller, request: GroupResume) -> Empty:
    return _set_paused(port, caller, request, False)


def _set_paused(
    port: NativePort, caller: Caller, request: GroupPause | GroupResume, is_paused: bool
) -> Empty:
    check_name("group", request.group)
    # As for `topic.pause`: a member must not stop the others.
    topic = port.access.get_topic(caller.identity, DELETE, request.topic)
    port.groups.pause(topic, request.group, is_paused)
    return {}


def _remove(port: NativePort, caller: Caller, request: GroupRemove) -> Empty:
    topic = _get_group_topic(port, caller, request)
    port.groups.remove(topic, request.group, request.force)
    return {}


def _get_group_topic(port: NativePort, caller: Caller, request: GroupRequest[Any]) -> Topic:
    check_name("group", request.group)
    return port.access.get_topic_cached(caller.identity, SUBSCRIBE, request.topic)


ACTIONS: Handlers = {
    GroupJoin: _join,
    GroupHeartbeat: _heartbeat,
    GroupFetch: _fetch,
    GroupAck: _ack,
    GroupCommit: _commit,
    GroupLeave: _leave,
    GroupReset: _reset,
    GroupsGet: _list,
    GroupGet: _info,
    GroupPause: _pause,
    GroupResume: _resume,
    GroupRemove: _remove,
}
