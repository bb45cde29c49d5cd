"""`polybus connections`: list the connections of the running bus.

A terminal gets a short table with rounded counts; a pipe and `--json` get every field.
"""

from __future__ import annotations

import json
import sys

import typer

from polybus.cli import flags
from polybus.cli.admin_request import ask_admin_pages
from polybus.cli.text_table import print_table, round_count

# heading → field of the short table
SHORT = {
    "id": "id",
    "dialect": "dialect",
    "peer": "peer",
    "who": "identity",
    "topics": "subscriptions",
    "in": "received_messages",
    "out": "sent_messages",
    "owed": "outbox_bytes",
    "state": "state",
}
ROUNDED = ("subscriptions", "received_messages", "sent_messages", "outbox_bytes")


def register(root: typer.Typer, name: str, help_line: str) -> None:
    root.command(name, help=help_line)(connections)


def connections(as_json: flags.Json = False, admin: flags.Admin = None) -> None:
    answer = ask_admin_pages("connections", "connections", admin)
    if as_json:
        print(json.dumps(answer, indent=2))
    elif not answer:
        print("no connections")
    elif sys.stdout.isatty():
        rows = [
            [
                round_count(connection[field]) if field in ROUNDED else connection.get(field, "")
                for field in SHORT.values()
            ]
            for connection in answer
        ]
        print_table(list(SHORT), rows)
    else:
        columns = list(dict.fromkeys(name for one in answer for name in one))
        print_table(columns, [[one.get(name, "") for name in columns] for one in answer])
