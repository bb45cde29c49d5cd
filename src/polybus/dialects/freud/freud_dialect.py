"""The registration of the Freud dialect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.bus.dialect import RUNTIME, Command, Dialect
from polybus.dialects.freud.limits import BOUNDS, FreudLimits

if TYPE_CHECKING:
    from polybus.bus.dialect import DialectServer, ServerContext


async def open_server(context: ServerContext) -> DialectServer:
    import asyncio

    from polybus.dialects.freud.server.session import FreudServer

    server = FreudServer(context.broker, context.section, asyncio.get_running_loop())
    return context.serve_streams(server, charge_user=True)


DIALECT = Dialect(
    name="freud",
    default_addresses=(f"unix:{RUNTIME}/freud.sock",),
    schemes=("unix",),
    limits=FreudLimits,
    bounds=BOUNDS,
    client="polybus.dialects.freud",
    commands=(
        Command(
            "freud",
            "polybus.dialects.freud.cli",
            "Freud's topics: create, publish, subscribe.",
        ),
    ),
    open_server=open_server,
)
