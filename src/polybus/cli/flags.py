"""Flags that several commands take, with one wording each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Read settings from this TOML file.")
]
Insecure = Annotated[
    bool | None,
    typer.Option("--insecure", help="Serve other machines without encryption."),
]
LogFormat = Annotated[
    str | None, typer.Option("--log-format", metavar="human|json", help="How log lines look.")
]
LogLevel = Annotated[
    str | None,
    typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error."),
]
Admin = Annotated[
    str | None,
    typer.Option("--admin", metavar="PATH", help="The admin socket, if not at its default."),
]
Json = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]

# --- of commands that print messages, or take them in

Count = Annotated[int, typer.Option("-n", "--count", min=0, help="End after so many; 0: no bound.")]
Format = Annotated[
    str | None,
    typer.Option(
        "-f",
        "--format",
        help="What a message looks like: %s body, %k key, %i id, %p shard, %o offset, %T "
        "milliseconds since 1970, %S bytes of the body, %t topic, \\n \\t \\xFF. "
        "[default: %s\\n]",
    ),
]
JsonLines = Annotated[
    bool,
    typer.Option(
        "--json",
        help="One object a line. A body that is no UTF-8 is in body_base64 instead of body.",
    ),
]
Messages = Annotated[
    list[str] | None, typer.Argument(metavar="[MESSAGE]...", help="Instead of stdin.")
]
Key = Annotated[
    str | None, typer.Option("--key", help="The key of all of them; else they have none.")
]
KeySeparator = Annotated[
    str | None,
    typer.Option("--key-sep", metavar="TEXT", help="Lines are KEY, this, and the message."),
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No summary.")]
