"""`polybus gsb`: calling services, and being one, from a shell.

Answers go to stdout as JSON, a line each; words about them to stderr.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polybus.errors import UsageError

if TYPE_CHECKING:
    from polybus.dialects.gsb.client.client import Client


EXIT_CODES = """\b
Exit codes:
  0   done
  2   a wrong argument, a bad address, or data that is too large
  3   no bus answers, no answer came in time, or the service went away
  4   the bus refused: no such service, not allowed, a name that is taken
  5   what answers there is no bus
  6   the service failed
  1   a defect of polybus, or whoever read the output has left
  130 Ctrl-C; 143 SIGTERM
"""

SYS_SERVICES = "sys/services"
TERMINATED = 128 + signal.SIGTERM
MS = 1000.0

Where = Annotated[
    str | None,
    typer.Option("--at", metavar="ADDRESS", help="The bus, if not at its default: tcp://, ipc://."),
]
Timeout = Annotated[
    float | None, typer.Option("--timeout", metavar="SECONDS", help="For each answer.")
]
Json = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]


def group() -> typer.Typer:
    """The tree of commands."""
    gsb = typer.Typer()
    commands: tuple[tuple[str, Callable[..., Any], str], ...] = (
        ("call", call, "Call a service, and print what it answers."),
        ("ls", ls, "List the services of the bus."),
        ("ping", ping, "Measure the way to the bus and back."),
        ("serve", serve, "Serve with a program: request on stdin, lines out."),
    )
    for name, command, help_line in commands:
        gsb.command(name, help=help_line, epilog=EXIT_CODES)(command)
    return gsb


# --- the commands ------------------------------------------------------------


def call(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="As in greeter, or a/b.")],
    data: Annotated[
        str | None, typer.Argument(metavar="[JSON]", help="What to send; -: all of stdin.")
    ] = None,
    at: Where = None,
    timeout: Timeout = None,
) -> None:
    value = _value(sys.stdin.read() if data == "-" else data)

    async def work(bus: Client) -> None:
        from polybus.dialects.gsb.client.program_service import as_json

        async with bus.stream(address, value, timeout_s=timeout) as items:
            async for item in items:
                print(as_json(item), flush=True)

    _with_bus(at, work)


def ls(as_json: Json = False, at: Where = None) -> None:
    async def work(bus: Client) -> None:
        found: list[dict[str, Any]] = await bus.call(SYS_SERVICES)
        if as_json:
            print(json.dumps(found, indent=2))
        elif not found:
            _print_notice("no services")
        else:
            _print_table(found)

    _with_bus(at, work)


def ping(
    count: Annotated[
        int, typer.Option("-n", "--count", metavar="COUNT", min=1, help="So many.")
    ] = 1,
    at: Where = None,
) -> None:
    async def work(bus: Client) -> None:
        for _ in range(count):
            print(f"{bus.address}: {await bus.ping():.3f} ms", flush=True)

    _with_bus(at, work)


def serve(
    service_id: Annotated[str, typer.Argument(metavar="ID", help="The service's name.")],
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="What to run for each call.")
    ],
    at: Where = None,
) -> None:
    async def work(bus: Client) -> None:
        import asyncio  # in functions: help does without

        from polybus.dialects.gsb.client.program_service import ProgramService

        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, stopped.set)
        await bus.register(service_id, ProgramService(command))
        _print_notice(f"serving {service_id!r}")
        if await _wait_first(stopped.wait(), bus.serve()):
            raise SystemExit(TERMINATED)

    _with_bus(at, work)


# --- what they share ---------------------------------------------------------


def _with_bus(at: str | None, work: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
    import asyncio

    import uvloop

    from polybus.dialects.gsb.client.client import connect

    async def main() -> None:
        async with connect(at) as bus:
            await work(bus)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def _wait_first(stopped: Awaitable[Any], serving: Awaitable[None]) -> bool:
    """Whichever comes first; was it the signal? An end by an error is raised."""
    import asyncio

    tasks = [asyncio.ensure_future(stopped), asyncio.ensure_future(serving)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    was_signal = tasks[0].done()
    for task in tasks:
        if not task.done():
            task.cancel()
    if not was_signal:
        await tasks[1]
    return was_signal


def _value(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(
            f"what to send is JSON, for example '\"text\"' or '{{}}': {error}"
        ) from None


def _print_table(services: list[dict[str, Any]]) -> None:
    import datetime

    columns = ("id", "since", "calls", "pending")
    rows = []
    for one in services:
        moment = datetime.datetime.fromtimestamp(one["since_ms"] / MS, datetime.UTC)
        since = moment.strftime("%Y-%m-%d %H:%M:%SZ")
        rows.append([str(one["id"]), since, str(one["calls"]), str(one["pending"])])
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in [columns, *rows]:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def _print_notice(text: str) -> None:
    with contextlib.suppress(OSError):
        print("polybus:", text, file=sys.stderr, flush=True)


def register(root: typer.Typer, name: str, help_line: str) -> None:
    from polybus.dialects.gsb import cli

    root.add_typer(cli.group(), name=name, help=help_line, epilog=cli.EXIT_CODES)
