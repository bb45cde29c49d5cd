"""Flags that several commands take, with one wording each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Read settings from this TOML file.")
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        help="Threads for plain publishes of rqueue clients; 0: one per core. [default: 1]",
    ),
]
Insecure = Annotated[
    bool | None,
    typer.Option("--insecure", help="Allow listeners for other machines without TLS."),
]
LogFormat = Annotated[
    str | None, typer.Option("--log-format", metavar="human|json", help="Format of log lines.")
]
LogLevel = Annotated[
    str | None,
    typer.Option(
        "--log-level",
        metavar="LEVEL",
        help="Least severe level to log: debug, info, warning or error.",
    ),
]
Admin = Annotated[
    str | None,
    typer.Option(
        "--admin", metavar="PATH", help="Path of the admin socket, if it is not the default."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]

# --- flags of commands that print or publish messages

Count = Annotated[
    int, typer.Option("-n", "--count", min=0, help="Exit after N messages; 0: no limit.")
]
Format = Annotated[
    str | None,
    typer.Option(
        "-f",
        "--format",
        help="Format of a message: %s body, %k key, %i id, %p shard, %o offset, %T "
        "milliseconds since 1970, %S bytes of the body, %t topic, \\n \\t \\xFF. "
        "[default: %s\\n]",
    ),
]
JsonLines = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON object per line; body_base64 replaces a body that is not UTF-8.",
    ),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Print control characters to a terminal as they are.")
]
Messages = Annotated[
    list[str] | None,
    typer.Argument(metavar="[MESSAGE]...", help="Messages to publish instead of stdin."),
]
Key = Annotated[str | None, typer.Option("--key", help="Key of every message. [default: no key]")]
KeySeparator = Annotated[
    str | None,
    typer.Option("--key-sep", metavar="TEXT", help="Split each line at TEXT into key and message."),
]
Delay = Annotated[
    str | None,
    typer.Option(
        "--delay", metavar="DURATION", help="Append the messages after it: 500ms, 2s, 15m, 1h, 7d."
    ),
]
TimeToLive = Annotated[
    str | None,
    typer.Option(
        "--ttl", metavar="DURATION", help="Groups get no message that is older: 2s, 15m, 1h."
    ),
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Do not print a summary.")]


def confirm(yes: bool, question: Callable[[], str]) -> None:
    """Ask for confirmation, on a terminal only. Raises Abort if the answer is no."""
    if not yes and sys.stdin is not None and sys.stdin.isatty():
        typer.confirm(question(), abort=True, err=True)
