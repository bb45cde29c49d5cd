"""`polybus topic create|ls|info|rm|trim|stats`: manage the durable topics of a running bus."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from polybus.cli import flags, start_position
from polybus.cli.bus_connection import Bus, connect_once
from polybus.cli.text_table import print_table
from polybus.cli.topic_stats_command import stats
from polybus.errors import UsageError

if TYPE_CHECKING:
    from polybus.native import Client
    from polybus.native.protocol.answers import TopicInfo

Topic = Annotated[str, typer.Argument(metavar="TOPIC")]
Pattern = Annotated[
    str,
    typer.Argument(metavar="[PATTERN]", help="Only topics that match; * matches any characters."),
]
BEFORE = (
    "Remove messages before this position (exclusive): latest (all messages), @TIME, or"
    " SHARD:OFFSET (repeatable)."
)


def register(root: typer.Typer, name: str, help_line: str) -> None:
    group = typer.Typer()
    group.command("create", help="Create a topic.")(create)
    group.command("ls", help="List topics.")(ls)
    group.command("info", help="Show the settings and bounds of a topic.")(info)
    group.command("rm", help="Remove a topic and its messages.")(rm)
    group.command("trim", help="Remove the oldest messages of a topic.")(trim)
    group.command("stats", help="Show message counts of topics, or of one topic with its readers.")(
        stats
    )
    root.add_typer(group, name=name, help=help_line)


def create(
    topic: Topic,
    shards: Annotated[
        int, typer.Option(min=0, help="Number of shards; 0: the default of the bus.")
    ] = 0,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="all|read", help="Retention: keep all messages, or until they are read."
        ),
    ] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(min=0, help="Refuse messages beyond this size of the topic; 0: no limit."),
    ] = None,
    expired: Annotated[
        str | None,
        typer.Option(
            metavar="drop|dead-letter",
            help="Messages that groups do not get in time: drop them, or keep them in TOPIC.dlq.",
        ),
    ] = None,
    bus: Bus = None,
) -> None:
    given = {"keep": keep, "max_bytes": max_bytes, "expired": expired}
    settings = {name: value for name, value in given.items() if value is not None}
    with connect_once(bus) as client:
        client.create_topic(topic, shards, settings or None)


def ls(pattern: Pattern = "*", as_json: flags.Json = False, bus: Bus = None) -> None:
    with connect_once(bus) as client:
        topics = client.topics(pattern)
    if as_json:
        print(json.dumps(topics, indent=2))
    else:
        columns = ("topic", "shards", "creator", "keep", "max_bytes")
        rows = [topic | topic["settings"] for topic in topics]
        print_table(columns, [[row[name] for name in columns] for row in rows])


def info(topic: Topic, as_json: flags.Json = False, bus: Bus = None) -> None:
    with connect_once(bus) as client:
        description = client.topic(topic)
    if as_json:
        print(json.dumps(description, indent=2))
    else:
        apart = ("settings", "delayed")
        rows = {name: value for name, value in description.items() if name not in apart}
        rows |= description["settings"] | _describe_delayed(description)
        print_table(("", topic), list(rows.items()))


def rm(topic: Topic, yes: flags.Yes = False, bus: Bus = None) -> None:
    with connect_once(bus) as client:
        flags.confirm(yes, lambda: f"Remove {topic} and its {_count(client, topic)} messages?")
        client.drop_topic(topic)


def trim(
    topic: Topic,
    before: Annotated[list[str], typer.Argument(metavar="BEFORE...", help=BEFORE)],
    yes: flags.Yes = False,
    bus: Bus = None,
) -> None:
    offsets = _offsets(before)
    with connect_once(bus) as client:
        if offsets is None:
            shards = client.bounds(topic)["shards"]
            if before[0] == start_position.LATEST:
                offsets = {shard["shard"]: shard["end"] for shard in shards}
            else:
                time_ns = start_position.parse_time_ns(before[0])
                numbers = [shard["shard"] for shard in shards]
                offsets = {number: client.find(topic, time_ns, number) for number in numbers}
        had = _count(client, topic)
        flags.confirm(yes, lambda: f"Remove messages of {topic}? It has {had}")
        client.trim(topic, offsets)
        print(f"{had - _count(client, topic)} messages removed")


def _describe_delayed(description: TopicInfo) -> dict[str, object]:
    delayed = description["delayed"]
    due_ns, next_due = delayed["next_due_ns"], ""
    if due_ns is not None:
        next_due = datetime.fromtimestamp(due_ns / 1e9, UTC).isoformat(timespec="milliseconds")
    return {
        "delayed": delayed["messages"],
        "delayed_bytes": delayed["bytes"],
        "delayed_next_due": next_due,
    }


def _count(client: Client, topic: str) -> int:
    counts = client.topic_stats(topic)["all"]
    return counts["inserted"] - counts["trimmed"]


def _offsets(before: list[str]) -> dict[int, int] | None:
    """Parse SHARD:OFFSET arguments. Returns None if only the bus can resolve the position.

    Raises UsageError if an argument has no valid form.
    """
    if len(before) == 1 and (before[0] == start_position.LATEST or before[0].startswith("@")):
        start_position.parse_start(before[0])
        return None
    offsets = {}
    for text in before:
        shard, _, offset = text.partition(":")
        if not all(part.isascii() and part.isdigit() for part in (shard, offset)):
            raise UsageError(f"BEFORE must be latest, @TIME or SHARD:OFFSET, got {text!r}")
        offsets[int(shard)] = int(offset)
    return offsets
