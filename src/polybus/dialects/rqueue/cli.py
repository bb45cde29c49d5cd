"""`polybus rqueue`: the rqueue server alone, and two clients that measure throughput.

    polybus rqueue --port 6567       run the server
    polybus rqueue sink              subscribe and print the rate each second
    polybus rqueue pusher            publish as fast as the server accepts, or at a rate

`sink` and `pusher` end with a summary, after `--count` messages or at Ctrl-C. They
measure the bus and the Python clients together; `make bench` has load generators that
cost less than the bus they measure.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from polybus.cli import flags
from polybus.cli.server_launch import launch
from polybus.errors import UsageError
from polybus.model.address import Address
from polybus.server.config import Flag, load
from polybus.server.program import plan_without_store

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 6567  # the port of the original rqueue server
DEFAULT_TOPIC = "bench"
DEFAULT_SIZE = 128

Topic = Annotated[str, typer.Option(help="Topic to publish or to subscribe.")]
Count = Annotated[int, typer.Option(min=0, help="Stop after this many messages; 0: at Ctrl-C.")]
Host = Annotated[str, typer.Option(help="Host of the server.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port of the server.")]
MaxPayload = Annotated[int, typer.Option(help="The server's --max-payload, in bytes.")]


def register(root: typer.Typer, name: str, help_line: str) -> None:
    """Add the `rqueue` group to the `polybus` command."""
    group = typer.Typer(invoke_without_command=True)
    group.callback()(server)
    group.command("sink", help="Subscribe, and print messages/s and MB/s.")(sink)
    group.command("pusher", help="Publish at full speed, or at a rate.")(pusher)
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
    threads: flags.Threads = None,
    admin: Annotated[
        bool | None, typer.Option("--admin", help="Open the admin socket, for polybus stats.")
    ] = None,
    insecure: flags.Insecure = None,
    log_format: flags.LogFormat = None,
    log_level: flags.LogLevel = None,
) -> int | None:
    """Run the server, unless a subcommand follows."""
    given = {
        "listen": Flag("--port", (f"rqueue={_address(host, port)}",)),
        "server.threads": Flag("--threads", threads),
        "rqueue.max_payload": Flag("--max-payload", max_payload),
        "insecure": Flag("--insecure", insecure),
        "log.format": Flag("--log-format", log_format),
        "log.level": Flag("--log-level", log_level),
    }
    if context.invoked_subcommand is not None:
        _check_no_flags(context)
        return None
    return launch(plan_without_store(load(None, os.environ, given), os.environ, admin=bool(admin)))


def sink(
    topic: Topic = DEFAULT_TOPIC,
    size: Annotated[int, typer.Option(min=-1, help="Bytes each message must have; -1: any.")] = -1,
    count: Count = 0,
    host: Host = DEFAULT_HOST,
    port: Port = DEFAULT_PORT,
    max_payload: MaxPayload = 2048,
) -> int:
    from polybus.dialects.rqueue.client import throughput_meter

    target = throughput_meter.MeterTarget(host, port, topic, max_payload)
    return _run(throughput_meter.sink(target, size, count))


def pusher(
    topic: Topic = DEFAULT_TOPIC,
    size: Annotated[int, typer.Option(min=0, help="Bytes of each message.")] = DEFAULT_SIZE,
    count: Count = 0,
    rate: Annotated[
        float, typer.Option(min=0, help="Messages per second; 0: as many as the server accepts.")
    ] = 0,
    host: Host = DEFAULT_HOST,
    port: Port = DEFAULT_PORT,
    max_payload: MaxPayload = 2048,
) -> int:
    from polybus.dialects.rqueue.client import throughput_meter

    target = throughput_meter.MeterTarget(host, port, topic, max_payload)
    return _run(throughput_meter.pusher(target, size, count, rate))


def _run(work: Coroutine[Any, Any, int]) -> int:
    import asyncio

    import uvloop

    from polybus.kernel.allocator import keep_freed_buffers

    keep_freed_buffers()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _address(host: str | None, port: int | None) -> Address:
    host = DEFAULT_HOST if host is None else host
    port = DEFAULT_PORT if port is None else port
    shown = f"[{host}]" if ":" in host else host  # IPv6
    return Address.parse(f"tcp://{shown}:{port}")


def _check_no_flags(context: typer.Context) -> None:
    """Raise UsageError if a flag precedes a subcommand.

    `rqueue --port 1 sink` would otherwise silently use another port.
    """
    given = [name for name, value in context.params.items() if value is not None]
    if given:
        flag = "--" + given[0].replace("_", "-")
        raise UsageError(f"{flag} must follow {context.invoked_subcommand!r}, not precede it")
