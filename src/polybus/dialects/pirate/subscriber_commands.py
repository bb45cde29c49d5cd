"""`polybus pirate subs|drop`: who is subscribed to what, and freeing what a dead one holds."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from polybus.cli import flags
from polybus.cli.admin_request import ask_admin
from polybus.cli.text_table import print_table
from polybus.dialects.pirate.client_id import format_client_id, parse_client_id

COLUMNS = ("topic", "client", "last", "behind", "seen_s", "user")
Topic = Annotated[str | None, typer.Option("--topic", help="Only of this topic.")]


def register(group: typer.Typer) -> None:
    group.command("subs", help="List subscriptions: who has read up to where.")(subs)
    group.command("drop", help="End subscriptions of a client that will not come again.")(drop)


def subs(
    client: Annotated[
        str | None, typer.Argument(metavar="CLIENT", help="Only of this one.")
    ] = None,
    topic: Topic = None,
    as_json: flags.Json = False,
    admin: flags.Admin = None,
) -> None:
    found = ask_admin("pirate_subs", admin, **_which(client, topic))
    for one in found:
        one["client"] = format_client_id(bytes.fromhex(one["client"]))
    if as_json:
        print(json.dumps(found, indent=2))
    elif found:
        print_table(COLUMNS, [[one[name] for name in COLUMNS] for one in found])
    else:
        print("no subscriptions")


def drop(
    client: Annotated[str, typer.Argument(metavar="CLIENT", help="Its id, as subs shows it.")],
    topic: Topic = None,
    admin: flags.Admin = None,
) -> None:
    told = ask_admin("pirate_drop", admin, **_which(client, topic))
    print(f"dropped: {told['dropped']} subscriptions of {client}")


def _which(client: str | None, topic: str | None) -> dict[str, Any]:
    which: dict[str, Any] = {} if client is None else {"client": parse_client_id(client).hex()}
    return which if topic is None else {**which, "topic": topic}
