"""The table of actions. A new one is a row in one of the files named here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from polybus.durable import query_progress
from polybus.errors import LimitReached, MalformedRequest
from polybus.model.access_rule import SUBSCRIBE
from polybus.native.port import (
    acl_actions,
    group_actions,
    producer_registry,
    stage_actions,
    topic_actions,
    topic_statistics,
)
from polybus.native.protocol.fields import ActionSchema, Answer, Arguments, Field, is_count

if TYPE_CHECKING:
    from polybus.native.port.native_port import Caller, NativePort

Perform = Callable[["NativePort", "Caller", Arguments], Answer]
MAX_WAIT_POSITIONS = 16_384  # of one wait: four topics with as many shards as there can be


def _wait(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    places = given["positions"]
    port.waits.check_room()
    if not 1 <= len(places) <= MAX_WAIT_POSITIONS:
        raise LimitReached("max_places", f"a wait is for 1 to {MAX_WAIT_POSITIONS} shards")
    wanted: dict[tuple[int, int], int] = {}
    topics_by_name = port.access.get_topics(caller.identity, SUBSCRIBE, _check_positions(places))
    for place in places:
        topic = topics_by_name[place["topic"]]
        if place["shard"] not in topic.shards:
            raise MalformedRequest(f"topic {topic.name} has no shard {place['shard']}")
        wanted[topic.number, place["shard"]] = place["offset"]
    timeout_s = min(given["timeout_ms"] / 1000, port.limits.max_wait_s)
    found = port.waits.wait(wanted, timeout_s, caller.is_gone)
    names = {topic.number: name for name, topic in topics_by_name.items()}
    news = [
        {"topic": names[number], "shard": shard, "end": end}
        for (number, shard), end in found.items()
    ]
    return {"news": news}


def _check_positions(places: list[dict[str, object]]) -> set[str]:
    for place in places:
        whole = set(place) == {"topic", "shard", "offset"}
        if not whole or not isinstance(place["topic"], str):
            raise MalformedRequest("a position has topic, shard and offset, and nothing else")
        for key in ("shard", "offset"):
            if not is_count(place[key]):
                raise MalformedRequest(f"of a position, {key} is an integer from 0 on")
    return {str(place["topic"]) for place in places}


def _stats(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    return port.stats()


ACTIONS: dict[str, tuple[ActionSchema, Perform]] = {
    action.name: (action, perform)
    for table in (
        producer_registry.ACTIONS,
        topic_actions.ACTIONS,
        topic_statistics.ACTIONS,
        group_actions.ACTIONS,
        query_progress.ACTIONS,
        stage_actions.ACTIONS,
        acl_actions.ACTIONS,
    )
    for action, perform in table.items()
}
ACTIONS["wait"] = (
    ActionSchema(
        "wait",
        "Waits until a shard reaches beyond an offset, or time is up",
        (
            Field("positions", "objects", "topic, shard, offset each"),
            Field("timeout_ms", "count", "at most 30000", 30_000),
        ),
        "news: topic, shard, end each; empty if time is up",
    ),
    _wait,
)
ACTIONS["stats"] = (
    ActionSchema("stats", "The bus's counters", (), "as polybus stats --json"),
    _stats,
)


def find_action(name: str) -> tuple[ActionSchema, Perform]:
    found = ACTIONS.get(name)
    if found is None:
        raise MalformedRequest(f"unknown action {name[:64]!r}: {', '.join(sorted(ACTIONS))}")
    return found
