"""Answers of the native port. At run time they are plain dicts, as JSON carries them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

Answer = Mapping[str, Any]


class Empty(TypedDict):
    """The answer of actions that return nothing."""


# --- producers and stages


class ProducerOpened(TypedDict):
    producer: str
    epoch: int
    last_counter: int  # 0 if the producer has written nothing


class StageOpened(TypedDict):
    stage: str


class WrittenSpan(TypedDict):
    """Messages of one shard that one commit has written; `topic` is None if it was dropped."""

    topic: str | None
    shard: int
    first_offset: int
    first_id: int
    count: int


class Committed(TypedDict):
    spans: list[WrittenSpan]
    timestamp_ns: int
    duplicate: bool
    deliver_at_ns: int | None  # of delayed messages, which have no spans yet


# --- topics


class TopicDescription(TypedDict):
    topic: str
    number: int
    shards: int  # of the open generation
    generation: int  # 1, and one more after each reshard
    generations: list[int]  # number of shards of each
    creator: str
    settings: dict[str, object]
    paused: list[str]


class DelayedCounts(TypedDict):
    """Messages that are not due yet; `next_due_ns` is None if there are none."""

    messages: int
    bytes: int
    next_due_ns: int | None


class TopicInfo(TopicDescription):
    first_id: int
    next_id: int
    timestamp_ns: int
    open_shards: list[int]  # first and last
    draining: dict[str, list[int]]  # by group: sealed shards that it has not acked completely
    retention: dict[str, Any]
    delayed: DelayedCounts


class TopicList(TypedDict):
    topics: list[TopicDescription]


class ShardExtent(TypedDict):
    shard: int
    start: int
    end: int
    bytes: int


class TopicBounds(TypedDict):
    first_id: int
    next_id: int
    timestamp_ns: int
    shards: list[ShardExtent]


class FoundPosition(TypedDict):
    position: int


class TopicStats(TypedDict):
    topic: str
    paused: list[str]
    all: dict[str, int]
    shards: list[dict[str, int]]
    groups: list[dict[str, Any]]
    queries: list[Mapping[str, Any]]
    subscribers: list[Mapping[str, Any]]
    delayed: DelayedCounts


class ShardNews(TypedDict):
    topic: str
    shard: int
    end: int


class WaitResult(TypedDict):
    news: list[ShardNews]


# --- groups


class GroupJoined(TypedDict):
    epoch: int
    heartbeat_ms: int
    dead_ms: int
    shards: int


class GroupShards(TypedDict):
    release: list[int]
    assigned: list[int]


class GroupFetched(TypedDict):
    """The object of a fetch; its rows follow in a second result."""

    assigned: list[dict[str, Any]]
    release: list[int]
    lost: list[int]
    sealed: list[int]
    rows: list[dict[str, Any]]


class ShardReports(TypedDict):
    shards: list[dict[str, Any]]


class GroupOffsets(TypedDict):
    offsets: dict[str, int]


class GroupList(TypedDict):
    groups: list[dict[str, Any]]


# --- access rules


class RuleList(TypedDict):
    rules: list[dict[str, Any]]


class RuleChanged(TypedDict):
    rule: str
    changed: bool
    kept: bool


class RuleVerdict(TypedDict):
    allowed: bool
    why: str
    rule: str | None
