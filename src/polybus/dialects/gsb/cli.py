"""`polybus gsb`: call services, and serve, from a shell.

Replies go to stdout as one line of JSON each; notices go to stderr.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polybus.cli.flags import Admin, Raw
from polybus.cli.terminal import print_raw
from polybus.cli.text_table import print_table
from polybus.dialects.gsb.service_address import NET, PUBLIC_PING
from polybus.errors import UsageError
from polybus.model.identity import is_node_id

if TYPE_CHECKING:
    from polybus.dialects.gsb.client.client import Client


EXIT_CODES = """\b
Exit codes:
  0   done
  2   wrong argument, bad address, or data that is too large
  3   no bus answers, no reply in time, or the service disconnected
  4   the bus refused: no such service, not allowed, name is taken
  5   the peer is not a bus
  6   the service failed
  1   a defect of polybus, or the reader of the output has closed it
  130 Ctrl-C; 143 SIGTERM
"""

SYS_SERVICES, SYS_NODES = "sys/services", "sys/nodes"
TERMINATED = 128 + signal.SIGTERM
MS = 1000.0

Where = Annotated[
    str | None,
    typer.Option(
        "--at", metavar="ADDRESS", help="Address of the bus (tcp://, ipc://), if not the default."
    ),
]
Timeout = Annotated[
    float | None, typer.Option("--timeout", metavar="SECONDS", help="For each reply.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def group() -> typer.Typer:
    """Return the command group."""
    gsb = typer.Typer()
    commands: tuple[tuple[str, Callable[..., Any], str], ...] = (
        ("call", call, "Call a service and print its replies."),
        ("ls", ls, "List the services of the bus."),
        ("ping", ping, "Measure the round trip to the bus, or to another node."),
        ("id", node_id, "Print the id of the bus's node."),
        ("nodes", nodes, "List the nodes of the network that the bus can reach."),
        ("serve", serve, "Serve with a program: request on stdin, one item per output line."),
    )
    for name, command, help_line in commands:
        gsb.command(name, help=help_line, epilog=EXIT_CODES)(command)
    link = typer.Typer()
    link_commands: tuple[tuple[str, Callable[..., Any], str], ...] = (
        ("add", link_add, "Link the bus to another one, until it stops."),
        ("rm", link_rm, "End a link, and dial it no longer."),
        ("ls", link_ls, "List the links of the bus."),
    )
    for name, command, help_line in link_commands:
        link.command(name, help=help_line)(command)
    gsb.add_typer(link, name="link", help="Links to other buses: add, rm, ls.")
    return gsb


# --- commands


def call(
    address: Annotated[
        str,
        typer.Argument(metavar="ADDRESS", help="Of a service: greeter, a/b, /net/0x…/public/a."),
    ],
    data: Annotated[
        str | None, typer.Argument(metavar="[JSON]", help="The data to send; - reads stdin.")
    ] = None,
    at: Where = None,
    timeout: Timeout = None,
    raw: Raw = False,
) -> None:
    print_raw(raw)
    value = _value(sys.stdin.read() if data == "-" else data)

    async def work(bus: Client) -> None:
        from polybus.dialects.gsb.client.program_service import as_json

        async with bus.stream(address, value, timeout_s=timeout) as items:
            async for item in items:
                print(as_json(item), flush=True)

    _with_bus(at, work)


def ls(as_json: Json = False, at: Where = None) -> None:
    async def work(bus: Client) -> None:
        services: list[dict[str, Any]] = await bus.call(SYS_SERVICES)
        if as_json:
            print(json.dumps(services, indent=2))
        elif not services:
            _print_notice("no services")
        else:
            rows = []
            for service in services:
                moment = datetime.datetime.fromtimestamp(service["since_ms"] / MS, datetime.UTC)
                since = moment.strftime("%Y-%m-%d %H:%M:%SZ")
                rows.append((service["id"], since, service["calls"], service["pending"]))
            print_table(("id", "since", "calls", "pending"), rows)

    _with_bus(at, work)


def ping(
    node: Annotated[
        str | None,
        typer.Argument(metavar="[NODE]", help="Another node: its id, or /net/ and its id."),
    ] = None,
    count: Annotated[
        int, typer.Option("-n", "--count", metavar="COUNT", min=1, help="Number of pings.")
    ] = 1,
    at: Where = None,
) -> None:
    target = None
    if node is not None:
        node_id = node.removeprefix(NET).rstrip("/")
        if not is_node_id(node_id):
            raise UsageError(
                "NODE must be 0x and 40 hex digits, as `polybus gsb nodes` lists them,"
                f" got {node_id!r}"
            )
        target = f"{NET}{node_id}"

    async def work(bus: Client) -> None:
        for _ in range(count):
            if target is None:
                print(f"{bus.address}: {await bus.ping():.3f} ms", flush=True)
                continue
            began_s = time.perf_counter()
            await bus.call(f"{target}/{PUBLIC_PING}")
            print(f"{target}: {(time.perf_counter() - began_s) * MS:.3f} ms", flush=True)

    _with_bus(at, work)


def node_id(at: Where = None) -> None:
    async def work(bus: Client) -> None:
        print((await bus.call(SYS_NODES))["id"])

    _with_bus(at, work)


def nodes(as_json: Json = False, at: Where = None) -> None:
    async def work(bus: Client) -> None:
        found: dict[str, Any] = await bus.call(SYS_NODES)
        if as_json:
            print(json.dumps(found, indent=2))
        elif not found["nodes"]:
            _print_notice("no other nodes")
        else:
            columns = ("id", "hops", "link_ms", "via")
            nearest_first = sorted(found["nodes"], key=lambda one: int(one["hops"]))
            print_table(columns, [[one[column] for column in columns] for one in nearest_first])

    _with_bus(at, work)


# --- links, by the admin socket


LinkAddress = Annotated[
    str, typer.Argument(metavar="ADDRESS", help="tls+tcp://HOST:PORT[#NODE_ID].")
]


def link_add(address: LinkAddress, admin: Admin = None) -> None:
    from polybus.cli.admin_request import ask_admin

    ask_admin("gsb_link_add", admin, address=address)
    _print_notice(f"dialling {address}; `polybus gsb link ls` shows its state")


def link_rm(address: LinkAddress, admin: Admin = None) -> None:
    from polybus.cli.admin_request import ask_admin

    ask_admin("gsb_link_rm", admin, address=address)
    _print_notice(f"dialling {address} no longer")


def link_ls(as_json: Json = False, admin: Admin = None) -> None:
    from polybus.cli.admin_request import ask_admin

    links = ask_admin("gsb_links", admin)["links"]
    if as_json:
        print(json.dumps(links, indent=2))
    elif not links:
        _print_notice("no links")
    else:
        columns = ("address", "node", "state", "peer", "error")
        print_table(columns, [tuple(one[column] or "-" for column in columns) for one in links])


def serve(
    service_id: Annotated[str, typer.Argument(metavar="ID", help="The service's name.")],
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="Program to run for each call.")
    ],
    at: Where = None,
) -> None:
    async def work(bus: Client) -> None:
        import asyncio  # in functions, so that --help is fast

        from polybus.dialects.gsb.client.program_service import ProgramService

        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, stopped.set)
        await bus.register(service_id, ProgramService(command))
        _print_notice(f"serving {service_id!r}")
        signalled = asyncio.ensure_future(stopped.wait())
        serving = asyncio.ensure_future(bus.serve())
        await asyncio.wait([signalled, serving], return_when=asyncio.FIRST_COMPLETED)
        if signalled.done():
            serving.cancel()
            raise SystemExit(TERMINATED)
        signalled.cancel()
        await serving  # raises the error that ended it

    _with_bus(at, work)


# --- helpers


def _with_bus(at: str | None, work: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
    import asyncio

    import uvloop

    from polybus.dialects.gsb.client.client import connect

    async def main() -> None:
        async with connect(at) as bus:
            await work(bus)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def _value(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(
            f"the data must be JSON, for example '\"text\"' or '{{}}': {error}"
        ) from None


def _print_notice(text: str) -> None:
    with contextlib.suppress(OSError):
        print("polybus:", text, file=sys.stderr, flush=True)


def register(root: typer.Typer, name: str, help_line: str) -> None:
    """Add the command group to the `polybus` command."""
    root.add_typer(group(), name=name, help=help_line, epilog=EXIT_CODES)
