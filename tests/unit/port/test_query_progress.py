"""Spark queries report their progress, and `topic.stats` returns it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from polybus.durable import query_progress
from polybus.errors import DoesNotExist, MalformedRequest
from polybus.native import Client
from polybus.native.inprocess import open_bus


@pytest.fixture
def bus() -> Iterator[Client]:
    with open_bus("memory:") as bus:
        bus.act("topic.create", topic="t", shards=2)
        bus.producer().produce("t", [b"%d" % n for n in range(10)]).result()
        yield bus


def progress_of(bus: Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = bus.act("topic.stats", topic="t")["queries"]
    return found


def report(bus: Client, query: str, offsets: dict[str, int], **more: str) -> None:
    bus.act("query.progress", topic="t", query=query, offsets=offsets, **more)


def test_lag_of_a_query_counts_unread_messages(bus):
    report(bus, "q", {"0": 0, "1": 0}, name="hourly")
    (one,) = progress_of(bus)
    assert (one["query"], one["name"], one["lag"]) == ("q", "hourly", 10)
    ends = {str(one["shard"]): one["end"] for one in bus.act("bounds", topic="t")["shards"]}
    report(bus, "q", ends)
    (one,) = progress_of(bus)
    assert (one["name"], one["offsets"], one["lag"]) == ("hourly", ends, 0)


def test_report_keeps_offsets_of_other_shards(bus):
    report(bus, "q", {"0": 1, "1": 2})
    report(bus, "q", {"1": 3})
    assert progress_of(bus)[0]["offsets"] == {"0": 1, "1": 3}


def test_unreported_shard_counts_as_unread(bus):
    report(bus, "q", {}, name="new")
    assert progress_of(bus)[0]["lag"] == 10


def test_queries_are_listed_newest_first_and_bounded(bus, monkeypatch):
    monkeypatch.setattr(query_progress, "MAX_QUERIES", 3)
    for name in ("a", "b", "c", "a", "d"):
        report(bus, name, {"0": 1})
    assert [one["query"] for one in progress_of(bus)] == ["d", "a", "c"]


def test_progress_is_deleted_with_the_topic(bus):
    report(bus, "q", {"0": 1})
    bus.act("topic.drop", topic="t")
    bus.act("topic.create", topic="t", shards=2)
    assert progress_of(bus) == []


@pytest.mark.parametrize(
    ("query", "offsets", "name"),
    [
        ("", {"0": 1}, ""),
        ("a\0b", {"0": 1}, ""),
        ("q" * 129, {"0": 1}, ""),
        ("q", {"2": 1}, ""),
        ("q", {"-1": 1}, ""),
        ("q", {"0": -1}, ""),
        ("q", {"0": "1"}, ""),
        ("q", {"0": True}, ""),
        ("q", {"0": 1}, "line\nline"),
    ],
)
def test_malformed_report_is_refused(bus, query, offsets, name):
    with pytest.raises(MalformedRequest):
        report(bus, query, offsets, name=name)
    assert progress_of(bus) == []


def test_progress_of_a_missing_topic_is_refused(bus):
    with pytest.raises(DoesNotExist):
        bus.act("query.progress", topic="other", query="q", offsets={})
