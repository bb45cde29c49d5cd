"""The table of actions: request class to handler, and the actions on rules and the whole bus."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from polybus.errors import LimitReached, MalformedRequest
from polybus.model.access_rule import SUBSCRIBE
from polybus.native.port import (
    group_actions,
    producer_registry,
    stage_actions,
    topic_actions,
    topic_statistics,
)
from polybus.native.port.shard_waits import MAX_WAIT_POSITIONS
from polybus.native.protocol.answers import Answer, RuleList, WaitResult
from polybus.native.protocol.fields import Request, is_count
from polybus.native.protocol.requests import (
    QueryProgress,
    RuleAdd,
    RuleRemove,
    RulesGet,
    RuleTest,
    ShardsWait,
    StatsGet,
)

if TYPE_CHECKING:
    from polybus.native.port.native_port import Caller, NativePort

Handler = Callable[["NativePort", "Caller", Any], Answer]
RequestClass = type[Request[Any]]
Handlers = dict[RequestClass, Handler]


def _wait(port: NativePort, caller: Caller, request: ShardsWait) -> WaitResult:
    positions = request.positions
    port.waits.check_room(caller.identity)  # before the work on up to MAX_WAIT_POSITIONS positions
    if not 1 <= len(positions) <= MAX_WAIT_POSITIONS:
        text = f"positions must have 1 to {MAX_WAIT_POSITIONS} entries, got {len(positions)}"
        raise LimitReached("max_places", text)
    for position in positions:
        is_complete = position.keys() == {"topic", "shard", "offset"}
        if not is_complete or not isinstance(position["topic"], str):
            raise MalformedRequest("a position must have topic, shard and offset, nothing else")
        for key in ("shard", "offset"):
            if not is_count(position[key]):
                raise MalformedRequest(f"position.{key} must be an integer >= 0")
    names = {position["topic"] for position in positions}
    generation = port.access.generation
    topics_by_name = port.access.get_topics(caller.identity, SUBSCRIBE, names)

    def check_access() -> None:
        nonlocal generation
        if generation != port.access.generation:
            generation = port.access.generation
            port.access.get_topics(caller.identity, SUBSCRIBE, names)

    offsets: dict[tuple[int, int], int] = {}
    for position in positions:
        topic = topics_by_name[position["topic"]]
        if position["shard"] not in topic.shards:
            raise MalformedRequest(f"topic {topic.name} has no shard {position['shard']}")
        offsets[topic.number, position["shard"]] = position["offset"]
    timeout_s = min(request.timeout_ms / 1000, port.limits.max_wait_s)
    ends = port.waits.wait(offsets, timeout_s, caller.is_gone, caller.identity, check_access)
    name_of = {topic.number: name for name, topic in topics_by_name.items()}
    return {
        "news": [
            {"topic": name_of[number], "shard": shard, "end": end}
            for (number, shard), end in ends.items()
        ]
    }


def _list_rules(port: NativePort, caller: Caller, request: RulesGet) -> RuleList:
    return {"rules": port.rules("acl_ls", request.encode(), caller.identity)}


def _run_rule_verb(
    port: NativePort, caller: Caller, request: RuleAdd | RuleRemove | RuleTest
) -> Answer:
    """Run the admin verb of this name, which decides whether the caller may: acl.add is acl_add."""
    verb = request.action_name.replace(".", "_")
    answer: Answer = port.rules(verb, request.encode(), caller.identity)
    return answer


def _stats(port: NativePort, caller: Caller, request: StatsGet) -> Answer:
    return port.access.on_loop(port.stats)


ACTIONS: Handlers = {
    **producer_registry.ACTIONS,
    **topic_actions.ACTIONS,
    **topic_statistics.ACTIONS,
    **group_actions.ACTIONS,
    QueryProgress: topic_statistics.record_query_progress,
    **stage_actions.ACTIONS,
    RulesGet: _list_rules,
    RuleAdd: _run_rule_verb,
    RuleRemove: _run_rule_verb,
    RuleTest: _run_rule_verb,
    ShardsWait: _wait,
    StatsGet: _stats,
}
_BY_NAME = {request.action_name: (request, handler) for request, handler in ACTIONS.items()}


def find_action(name: str) -> tuple[RequestClass, Handler]:
    """Return request class and handler of an action; raise `MalformedRequest` if unknown."""
    found = _BY_NAME.get(name)
    if found is None:
        text = f"unknown action {name[:64]!r}: expected one of {', '.join(sorted(_BY_NAME))}"
        raise MalformedRequest(text)
    return found
