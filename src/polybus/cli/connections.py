"""`polybus connections`: who is connected to the running bus."""

from __future__ import annotations

import json
import os

import typer

from polybus.cli import flags
from polybus.cli.table import show
from polybus.server.adminclient import ask, default_path


def register(root: typer.Typer, name: str, help_line: str) -> None:
    root.command(name, help=help_line)(connections)


def connections(as_json: flags.Json = False, admin: flags.Admin = None) -> None:
    answer = ask(admin or default_path(os.environ), "connections")
    if as_json:
        print(json.dumps(answer, indent=2))
    elif answer:
        columns = list(dict.fromkeys(name for one in answer for name in one))
        show(columns, [[one.get(name, "") for name in columns] for one in answer])
    else:
        print("nobody is connected")
