"""`polybus rqueue`: the rqueue server alone, and its two benchmark clients.

polybus rqueue --port 6567       the server
polybus rqueue sink | pusher     the clients, from the dialect's own folder
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from polybus.cli import flags
from polybus.cli.server_launch import launch
from polybus.errors import UsageError
from polybus.model.address import Address
from polybus.server.config import Flag, load
from polybus.server.program import plan_without_store

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 6567  # the seed's


def register(root: typer.Typer, name: str, help_line: str) -> None:
    from polybus.dialects.rqueue import cli

    group = typer.Typer(invoke_without_command=True)
    group.callback()(server)
    cli.register(group)
    root.add_typer(group, name=name, help=help_line)


def server(
    context: typer.Context,
    port: Annotated[
        int | None, typer.Option("--port", help="Port; 0 picks a free one. [default: 6567]")
    ] = None,
    host: Annotated[
        str | None, typer.Option("--host", help="Address to bind. [default: 127.0.0.1]")
    ] = None,
    max_payload: Annotated[
        int | None, typer.Option("--max-payload", help="Largest frame, in bytes. [default: 2048]")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", help="Cores to serve on.")] = None,
    admin: Annotated[
        bool | None, typer.Option("--admin", help="Open the admin socket, for polybus stats.")
    ] = None,
    insecure: flags.Insecure = None,
    log_format: flags.LogFormat = None,
    log_level: flags.LogLevel = None,
) -> int | None:
    given = {
        "listen": Flag("--port", (f"rqueue={_address(host, port)}",)),
        "rqueue.max_payload": Flag("--max-payload", max_payload),
        "insecure": Flag("--insecure", insecure),
        "log.format": Flag("--log-format", log_format),
        "log.level": Flag("--log-level", log_level),
    }
    if context.invoked_subcommand is not None:
        _check_no_flags(context)
        return None
    if threads not in (None, 1):
        raise UsageError(
            f"--threads {threads}: only 1 works yet; serving on several cores comes later"
        )
    return launch(plan_without_store(load(None, os.environ, given), os.environ, admin=bool(admin)))


def _address(host: str | None, port: int | None) -> Address:
    host = DEFAULT_HOST if host is None else host
    port = DEFAULT_PORT if port is None else port
    shown = f"[{host}]" if ":" in host else host
    return Address.parse(f"tcp://{shown}:{port}")


def _check_no_flags(context: typer.Context) -> None:
    """`rqueue --port 1 sink` would otherwise silently use another port."""
    given = [name for name, value in context.params.items() if value is not None]
    if given:
        flag = "--" + given[0].replace("_", "-")
        raise UsageError(f"{flag} stands before {context.invoked_subcommand!r}: write it after")
