"""The registration of the GSB dialect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.bus.dialect import RUNTIME, Command, Dialect
from polybus.dialects.gsb.limits import BOUNDS, CALL_LOG_TOPIC, GsbLimits

if TYPE_CHECKING:
    from polybus.bus.dialect import DialectServer, ServerContext


async def open_server(context: ServerContext) -> DialectServer:
    import asyncio
    import os

    from polybus.dialects.gsb.server.session import GsbServer
    from polybus.model.identity import Identity

    # The topic of logged calls belongs to the user that the bus runs as.
    owner = Identity(uid=os.geteuid())
    loop = asyncio.get_running_loop()
    return context.serve_streams(GsbServer(context.broker, context.section, loop, owner))


DIALECT = Dialect(
    name="gsb",
    default_addresses=("tcp://127.0.0.1:6569", f"ipc://{RUNTIME}/gsb.sock"),
    schemes=("tcp", "tls+tcp", "ipc"),
    limits=GsbLimits,
    bounds=BOUNDS,
    client="polybus.dialects.gsb",
    commands=(
        Command(
            "gsb",
            "polybus.dialects.gsb.cli",
            "Services that call each other: call, ls, serve, ping.",
        ),
    ),
    open_server=open_server,
    reserved_topics={CALL_LOG_TOPIC: "the log of GSB calls"},
)
