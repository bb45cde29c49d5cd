"""`polybus topic`: manage the durable topics of a running bus.

polybus topic create orders --shards 16 --retain-age 7d
polybus topic configure orders --retain-bytes 10GiB --retain-age none
polybus topic reshard orders --shards 32
polybus topic pause orders --produce

`configure` changes only the settings that are named.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polybus.cli import flags, start_position
from polybus.cli.bus_connection import Bus, connect_once
from polybus.cli.progress_bar import format_size
from polybus.cli.text_table import count_of, print_table
from polybus.cli.topic_stats_command import stats
from polybus.durable.retention_limits import NO_LIMIT, parse_limit
from polybus.errors import UsageError
from polybus.model.byte_size import format_size_bytes, parse_size_bytes
from polybus.model.draining import describe_draining
from polybus.model.duration import parse_duration_ms
from polybus.model.topic import MAX_SHARDS

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


SIZE_FORM = "10GiB|none"
Keep = Annotated[
    str | None,
    typer.Option(metavar="all|read", help="Keep all messages, or each until every reader has it."),
]
MaxBytes = Annotated[
    str | None,
    typer.Option(metavar=SIZE_FORM, help="Refuse messages beyond this size of the topic."),
]
Expired = Annotated[
    str | None,
    typer.Option(
        metavar="drop|dead-letter",
        help="Messages that groups do not get in time: drop them, or keep them in TOPIC.dlq.",
    ),
]
RetainAge = Annotated[
    str | None,
    typer.Option(metavar="7d|none", help="Remove older messages; ms, s, m, h or d."),
]
RetainBytes = Annotated[
    str | None,
    typer.Option(metavar=SIZE_FORM, help="Remove the oldest messages beyond this size."),
]
RetainMessages = Annotated[
    str | None,
    typer.Option(metavar="N|none", help="Remove the oldest messages beyond this number."),
]
RetainUnread = Annotated[
    str | None,
    typer.Option(
        metavar="keep|drop", help="Keep messages that a group has not acked, or remove them, too."
    ),
]
Produce = Annotated[bool, typer.Option("--produce", help="Only producing.")]
Consume = Annotated[
    bool, typer.Option("--consume", help="Only consuming, by groups and pirate subscribers.")
]


def register(root: typer.Typer, name: str, help_line: str) -> None:
    group = typer.Typer()
    group.command("create", help="Create a topic.")(create)
    group.command("ls", help="List topics.")(ls)
    group.command("info", help="Show the settings of a topic, its bounds and its retention.")(info)
    group.command("stats", help="Show message counts of topics, or of one topic with its readers.")(
        stats
    )
    group.command("configure", help="Change settings of a topic.")(configure)
    group.command("reshard")(reshard)
    group.command("trim", help="Remove the oldest messages of a topic.")(trim)
    group.command("pause", help="Refuse messages for a topic, or hold back its consumers.")(pause)
    group.command("resume", help="End a pause of a topic.")(resume)
    group.command("rm", help="Remove a topic and its messages.")(rm)
    root.add_typer(group, name=name, help=help_line)


def create(
    topic: Topic,
    shards: Annotated[
        int, typer.Option(min=0, help="Number of shards; 0: the default of the bus.")
    ] = 0,
    keep: Keep = None,
    max_bytes: MaxBytes = None,
    expired: Expired = None,
    retain_age: RetainAge = None,
    retain_bytes: RetainBytes = None,
    retain_messages: RetainMessages = None,
    retain_unread: RetainUnread = None,
    bus: Bus = None,
) -> None:
    retention = retain_age, retain_bytes, retain_messages, retain_unread
    settings = _settings(keep, max_bytes, expired, *retention)
    with connect_once(bus) as client:
        client.create_topic(topic, shards, settings or None)


def configure(
    topic: Topic,
    keep: Keep = None,
    max_bytes: MaxBytes = None,
    expired: Expired = None,
    retain_age: RetainAge = None,
    retain_bytes: RetainBytes = None,
    retain_messages: RetainMessages = None,
    retain_unread: RetainUnread = None,
    bus: Bus = None,
) -> None:
    retention = retain_age, retain_bytes, retain_messages, retain_unread
    change = _settings(keep, max_bytes, expired, *retention)
    if not change:
        raise UsageError("nothing to change: give at least one setting, such as --retain-age 7d")
    with connect_once(bus) as client:
        client.configure_topic(topic, change)


def pause(
    topic: Topic, produce: Produce = False, consume: Consume = False, bus: Bus = None
) -> None:
    with connect_once(bus) as client:
        client.pause_topic(topic, produce=produce, consume=consume)


def resume(
    topic: Topic, produce: Produce = False, consume: Consume = False, bus: Bus = None
) -> None:
    with connect_once(bus) as client:
        client.resume_topic(topic, produce=produce, consume=consume)


def _settings(
    keep: str | None,
    max_bytes: str | None,
    expired: str | None,
    retain_age: str | None,
    retain_bytes: str | None,
    retain_messages: str | None,
    retain_unread: str | None,
) -> dict[str, object]:
    """Return the settings that were given as flags; None removes one. Raises UsageError."""
    settings: dict[str, object] = {}
    if keep is not None:
        settings["keep"] = keep
    if max_bytes is not None:  # 0 is no limit, too
        settings["max_bytes"] = parse_size_bytes(max_bytes) if max_bytes != NO_LIMIT else 0
    if expired is not None:
        settings["expired"] = expired
    limits: dict[str, tuple[str | None, Callable[[str], int]]] = {
        "retain_age_ms": (retain_age, parse_duration_ms),
        "retain_bytes": (retain_bytes, parse_size_bytes),
        "retain_messages": (retain_messages, _parse_count),
    }
    for name, (text, parse) in limits.items():
        if text is not None:
            settings[name] = parse_limit(text, parse)
    if retain_unread is not None:
        settings["retain_unread"] = retain_unread
    return settings


def _parse_count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"number of messages must be a whole number or {NO_LIMIT}, got {text!r}")
    return int(text)


def ls(pattern: Pattern = "*", as_json: flags.Json = False, bus: Bus = None) -> None:
    with connect_once(bus) as client:
        topics = client.topics(pattern)
    if as_json:
        print(json.dumps(topics, indent=2))
    else:
        columns = ("topic", "shards", "creator", "keep", "max_bytes", "paused")
        rows = [topic | topic["settings"] | {"paused": _list(topic["paused"])} for topic in topics]
        print_table(columns, [[row[name] for name in columns] for row in rows])


def info(topic: Topic, as_json: flags.Json = False, bus: Bus = None) -> None:
    with connect_once(bus) as client:
        description = client.topic(topic)
    if as_json:
        print(json.dumps(description, indent=2))
        return
    not_shown = ("settings", "retention", "paused", "delayed")
    rows: dict[str, object] = {
        name: value for name, value in description.items() if name not in not_shown
    }
    settings = {
        name: value
        for name, value in description["settings"].items()
        if not name.startswith("retain_")
    }
    rows["open_shards"] = "{} to {}".format(*description["open_shards"])
    rows["draining"] = describe_draining(description["draining"]) or "nothing"
    paused = {"paused": _list(description["paused"])}
    delayed = _describe_delayed(description)
    print_table(("", topic), list((rows | settings | paused | delayed).items()))
    print()
    print_table(("retention", ""), _retention_rows(description["retention"]))


def _retention_rows(retention: Mapping[str, Any]) -> list[list[object]]:
    """Return the limits of a topic, its stored messages, and the readers that hold some back."""
    age_ms, size, messages = (retention[name] for name in ("age_ms", "bytes", "messages"))
    rows: list[list[object]] = [
        ["retain age", NO_LIMIT if age_ms is None else timedelta(milliseconds=age_ms)],
        ["retain bytes", NO_LIMIT if size is None else format_size_bytes(size)],
        ["retain messages", NO_LIMIT if messages is None else messages],
        ["retain unread", retention["unread"]],
        ["stored messages", retention["stored_messages"]],
        ["stored bytes", format_size(retention["stored_bytes"])],
    ]
    oldest_ns = retention["oldest_timestamp_ns"]
    if oldest_ns is not None:
        age_s = max(0, time.time_ns() - oldest_ns) // 1_000_000_000
        rows.append(["oldest message", f"{timedelta(seconds=age_s)} ago"])
    rows.append(["beyond the limits", f"{retention['due']} messages"])
    rows += [
        [f"held back by {held['reader']}", f"{held['messages']} messages"]
        for held in retention["held_by"]
    ]
    return rows


def _list(sides: list[str]) -> str:
    return ", ".join(sides) or "-"


def reshard(
    topic: Topic,
    shards: Annotated[
        int, typer.Option(min=1, max=MAX_SHARDS, help="New number of shards.", show_default=False)
    ],
    bus: Bus = None,
) -> None:
    """Seal all shards of a topic and open new ones.

    Producers and consumers go on. A group reads a new shard when it has acked the shards that had
    its keys before, so messages of a key keep their order. Refused while a group still drains the
    shards of the last reshard.
    """
    with connect_once(bus) as client:
        client.reshard(topic, shards)
        description = client.topic(topic)
    first, last = description["open_shards"]
    numbers = f"{first}" if shards == 1 else f"{first} to {last}"
    generation = f"generation {description['generation']}"
    print(f"{topic} has {count_of(shards, 'shard')} ({numbers}), {generation}")
    if description["draining"]:
        print(f"draining: {describe_draining(description['draining'])}")


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
