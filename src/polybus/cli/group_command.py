"""`polybus group ls|info|rm|reset`: consumer groups, each with its place in a topic.

polybus group ls
polybus group info orders billing
polybus group reset orders billing --to @2026-01-31T12:00

A group that has live consumers is neither moved nor removed, unless `--force` is given:
then what they hold is taken from them, and their late acks are refused. Exit codes are those
of all commands: 2 you, 3 no bus, 4 refused (no such group; it has live consumers).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polybus.cli import flags, start_position
from polybus.cli.bus_connection import Bus, open_bus_or_store
from polybus.cli.group_table import show_groups
from polybus.cli.text_table import print_table
from polybus.errors import Conflict

if TYPE_CHECKING:
    from polybus.native import bus_client as buses

Topic = Annotated[str, typer.Argument(metavar="TOPIC")]
Group = Annotated[str, typer.Argument(metavar="GROUP")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Force = Annotated[bool, typer.Option("--force", help="Also while it has live consumers.")]
COLUMNS = ("topic", "group", "members", "shards", "acked", "lag")


def register(root: typer.Typer, name: str, help_line: str) -> None:
    group = typer.Typer()
    group.command("ls", help="List groups, and how far they are behind.")(ls)
    group.command("info", help="Say who is in a group, and where it is in each shard.")(info)
    group.command("rm", help="Remove a group: the next of its name starts anew.")(rm)
    group.command("reset", help="Move a group to another place.")(reset)
    root.add_typer(group, name=name, help=help_line)


def ls(
    pattern: Annotated[
        str, typer.Argument(metavar="[TOPICS]", help="Only of these; * is any run of characters.")
    ] = "*",
    as_json: flags.Json = False,
    bus: Bus = None,
) -> None:
    with open_bus_or_store(bus) as client:
        groups = client.act("group.list", topic=pattern)["groups"]
    if as_json:
        print(json.dumps(groups, indent=2))
    elif groups:
        print_table(COLUMNS, [[one[name] for name in COLUMNS] for one in groups])
    else:
        print("no groups")


def info(topic: Topic, group: Group, as_json: flags.Json = False, bus: Bus = None) -> None:
    with open_bus_or_store(bus) as client:
        found = _info(client, topic, group)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _show(found)


def rm(topic: Topic, group: Group, force: Force = False, yes: Yes = False, bus: Bus = None) -> None:
    with open_bus_or_store(bus) as client:
        _confirm(yes, f"Remove group {group} of {topic}, and its place in it?")
        with _hint_force():
            client.act("group.rm", topic=topic, group=group, force=force)


def reset(
    topic: Topic,
    group: Group,
    to: Annotated[str, typer.Option("--to", metavar="PLACE", help=f"{start_position.FORMS}.")],
    force: Force = False,
    yes: Yes = False,
    bus: Bus = None,
) -> None:
    place = _place(to)
    with open_bus_or_store(bus) as client:
        _confirm(yes, f"Move group {group} of {topic} to {to}?")
        with _hint_force():
            client.act("group.reset", topic=topic, group=group, to=place, force=force)
        print(f"{_info(client, topic, group)['lag']} messages to go")


@contextmanager
def _hint_force() -> Iterator[None]:
    try:
        yield
    except Conflict as error:
        raise Conflict(f"{error}; --force takes their shards from them") from None


def _info(client: buses.BusClient, topic: str, group: str) -> dict[str, Any]:
    from polybus.native.port.topic_statistics import add_group_totals

    return add_group_totals(client.act("group.info", topic=topic, group=group))


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
    print()
    show_groups([found], by_shard=True)


def _list(shards: list[int]) -> str:
    return ", ".join(map(str, shards)) or "-"


def _confirm(yes: bool, question: str) -> None:
    """On a terminal only: a script that runs it means it."""
    if not yes and sys.stdin is not None and sys.stdin.isatty():
        typer.confirm(question, abort=True, err=True)
