"""`polybus group`: list, pause and remove consumer groups, and set their positions in a topic.

polybus group ls
polybus group info orders billing
polybus group reset orders billing --to @2026-01-31T12:00

A group with live consumers is neither reset nor removed unless `--force` is given; then the
consumers lose their shards, and the bus refuses their late acks. Exit codes are those of all
commands: 2 usage, 3 no bus, 4 refused (no such group, or it has live consumers).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polybus.cli import flags, start_position
from polybus.cli.bus_connection import Bus, open_bus_or_store
from polybus.cli.group_table import show_groups
from polybus.cli.text_table import print_table
from polybus.errors import Conflict
from polybus.native.protocol.requests import GroupGet, GroupRemove, GroupReset, GroupsGet

if TYPE_CHECKING:
    from polybus.native import Client

Topic = Annotated[str, typer.Argument(metavar="TOPIC")]
Group = Annotated[str, typer.Argument(metavar="GROUP")]
Force = Annotated[
    bool, typer.Option("--force", help="Proceed even if the group has live consumers.")
]
COLUMNS = ("topic", "group", "members", "shards", "acked", "lag", "paused")


def register(root: typer.Typer, name: str, help_line: str) -> None:
    group = typer.Typer()
    group.command("ls", help="List groups with their lag.")(ls)
    group.command("info", help="Show the members of a group and its position in each shard.")(info)
    group.command("pause", help="Hold back the messages of a group; its consumers stay.")(pause)
    group.command("resume", help="End the pause of a group.")(resume)
    group.command("rm", help="Remove a group and its positions.")(rm)
    group.command("reset", help="Set the position of a group.")(reset)
    root.add_typer(group, name=name, help=help_line)


def ls(
    pattern: Annotated[
        str,
        typer.Argument(
            metavar="[TOPICS]", help="Only groups of topics that match; * matches any characters."
        ),
    ] = "*",
    as_json: flags.Json = False,
    bus: Bus = None,
) -> None:
    with open_bus_or_store(bus) as client:
        groups = client.call(GroupsGet(topic=pattern))["groups"]
    if as_json:
        print(json.dumps(groups, indent=2))
    elif groups:
        rows = [one | {"paused": _yes(one)} for one in groups]
        print_table(COLUMNS, [[row[name] for name in COLUMNS] for row in rows])
    else:
        print("no groups")


def info(topic: Topic, group: Group, as_json: flags.Json = False, bus: Bus = None) -> None:
    with open_bus_or_store(bus) as client:
        found = _info(client, topic, group)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _show(found)


def pause(topic: Topic, group: Group, bus: Bus = None) -> None:
    with open_bus_or_store(bus) as client:
        client.pause_group(topic, group)


def resume(topic: Topic, group: Group, bus: Bus = None) -> None:
    with open_bus_or_store(bus) as client:
        client.resume_group(topic, group)


def rm(
    topic: Topic, group: Group, force: Force = False, yes: flags.Yes = False, bus: Bus = None
) -> None:
    with open_bus_or_store(bus) as client:
        flags.confirm(yes, lambda: f"Remove group {group} of {topic} and its positions?")
        with _hint_force():
            client.call(GroupRemove(topic=topic, group=group, force=force))


def reset(
    topic: Topic,
    group: Group,
    to: Annotated[
        str, typer.Option("--to", metavar="PLACE", help=f"New position: {start_position.FORMS}.")
    ],
    force: Force = False,
    yes: flags.Yes = False,
    bus: Bus = None,
) -> None:
    place = _place(to)
    with open_bus_or_store(bus) as client:
        flags.confirm(yes, lambda: f"Move group {group} of {topic} to {to}?")
        with _hint_force():
            client.call(GroupReset(topic=topic, group=group, to=place, force=force))
        print(f"{_info(client, topic, group)['lag']} messages to read")


@contextmanager
def _hint_force() -> Iterator[None]:
    try:
        yield
    except Conflict as error:
        raise Conflict(f"{error}; use --force to take their shards") from None


def _info(client: Client, topic: str, group: str) -> dict[str, Any]:
    from polybus.native.port.topic_statistics import add_group_totals

    return add_group_totals(client.call(GroupGet(topic=topic, group=group)))


def _place(text: str) -> Any:
    place = start_position.parse_start(text)
    if isinstance(place, int):
        return {"id": place}
    return {"time_ns": start_position.parse_time_ns(text)} if place.startswith("@") else place


def _show(found: dict[str, Any]) -> None:
    if found["members"]:
        rows = [[one["consumer"], one["epoch"], _list(one["shards"])] for one in found["members"]]
        print_table(("consumer", "epoch", "shards"), rows)
    else:
        print("no consumers")
    if found.get("paused"):
        print("the group is paused")
    print()
    show_groups([found], by_shard=True)


def _yes(group: dict[str, Any]) -> str:
    return "yes" if group.get("paused") else "-"  # older buses do not send it


def _list(shards: list[int]) -> str:
    return ", ".join(map(str, shards)) or "-"
