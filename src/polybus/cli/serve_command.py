"""`polybus serve`: run the bus."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from polybus.cli import flags
from polybus.cli.server_launch import launch
from polybus.server.config import Flag, load
from polybus.server.program import check_exclusive, plan_serve

LISTEN = "Listen only at the given addresses; repeatable. E.g. rqueue=tcp://127.0.0.1:6567"


def register(root: typer.Typer, name: str, help_line: str) -> None:
    root.command(name, help=help_line)(serve)


def serve(
    config: flags.Config = None,
    data: Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Data folder.")] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", metavar="URL", help="Store engine, instead of --data.")
    ] = None,
    listen: Annotated[
        list[str] | None, typer.Option("--listen", metavar="DIALECT=ADDRESS", help=LISTEN)
    ] = None,
    durability: Annotated[
        str | None,
        typer.Option(
            "--durability",
            metavar="fsync|interval",
            help="Acknowledge writes after fdatasync, or after the write to the page cache.",
        ),
    ] = None,
    insecure: flags.Insecure = None,
    log_format: flags.LogFormat = None,
    log_level: flags.LogLevel = None,
) -> int:
    folder, url = Flag("--data", data and str(data)), Flag("--engine", engine)
    check_exclusive(folder, url)
    given = {
        "listen": Flag("--listen", tuple(listen) if listen else None),
        "data": folder,
        "engine": url,
        "durability": Flag("--durability", durability),
        "insecure": Flag("--insecure", insecure),
        "log.format": Flag("--log-format", log_format),
        "log.level": Flag("--log-level", log_level),
    }
    return launch(plan_serve(load(config, os.environ, given), os.environ))
