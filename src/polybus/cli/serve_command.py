"""`polybus serve`: run the bus."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from polybus.bus.dialect_registry import installed_dialects
from polybus.cli import flags
from polybus.cli.server_launch import launch
from polybus.server.config import Flag, load
from polybus.server.program import check_exclusive, plan_serve

LISTEN = "Listen only at the given addresses; repeatable. E.g. rqueue=tcp://127.0.0.1:6567"


def register(root: typer.Typer, name: str, help_line: str) -> None:
    root.command(name, help=help_line)(with_dialect_flags(serve))


def with_dialect_flags(command: Callable[..., int]) -> Callable[..., int]:
    """Add the flags of the dialects: typer reads them from the signature."""
    keys: dict[str, tuple[str, str]] = {}  # parameter → flag, dotted key
    signature = inspect.signature(command, eval_str=True)
    parameters = dict(signature.parameters)
    for dialect in installed_dialects():
        for flag in dialect.serve_flags:
            option = typer.Option(flag.name, metavar=flag.metavar, help=flag.help_line)
            parameter = flag.name.lstrip("-").replace("-", "_")
            keys[parameter] = flag.name, f"{dialect.name}.{flag.key}"
            parameters[parameter] = inspect.Parameter(
                parameter,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[list[str] | None, option],
            )

    def run(**given: Any) -> int:
        own = {name: value for name, value in given.items() if name not in keys}
        dialect_flags = {
            dotted: Flag(flag, ",".join(given[parameter]) if given[parameter] else None)
            for parameter, (flag, dotted) in keys.items()
        }
        return command(**own, dialect_flags=dialect_flags)

    del parameters["dialect_flags"]
    run.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: one.annotation for name, one in parameters.items()}
    return run


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
    threads: flags.Threads = None,
    insecure: flags.Insecure = None,
    log_format: flags.LogFormat = None,
    log_level: flags.LogLevel = None,
    dialect_flags: Mapping[str, Flag] | None = None,
) -> int:
    folder, url = Flag("--data", data and str(data)), Flag("--engine", engine)
    check_exclusive(folder, url)
    given = {
        "listen": Flag("--listen", tuple(listen) if listen else None),
        "data": folder,
        "engine": url,
        "durability": Flag("--durability", durability),
        "server.threads": Flag("--threads", threads),
        "insecure": Flag("--insecure", insecure),
        "log.format": Flag("--log-format", log_format),
        "log.level": Flag("--log-level", log_level),
        **(dialect_flags or {}),
    }
    return launch(plan_serve(load(config, os.environ, given), os.environ))
