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
