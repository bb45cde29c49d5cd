"""`polybus stats`: show the counters of the running bus."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import typer

from polybus.cli import flags
from polybus.cli.admin_request import ask_admin
from polybus.cli.text_table import print_table


def register(root: typer.Typer, name: str, help_line: str) -> None:
    root.command(name, help=help_line)(stats)


def stats(as_json: flags.Json = False, admin: flags.Admin = None) -> None:
    answer = ask_admin("stats", admin)
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        alarms = answer.pop("alarms")
        print_table(("counter", "value"), list(_rows(answer)))
        if alarms:
            print()
            rows = [
                (one["kind"], _time(one["since"]), one["object"], one["text"]) for one in alarms
            ]
            print_table(("alarm", "since", "object", "text"), rows)


def _rows(counters: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested counters with dotted names."""
    for name, value in counters.items():
        if isinstance(value, dict):
            yield from _rows(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
