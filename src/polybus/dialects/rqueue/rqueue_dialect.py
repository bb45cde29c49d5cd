"""The registration of the rqueue dialect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.bus.dialect import Command, Contradiction, Dialect
from polybus.dialects.rqueue.limits import BOUNDS, RqueueLimits

if TYPE_CHECKING:
    from polybus.bus.dialect import DialectServer, ServerContext
    from polybus.model.limits import Limits


async def open_server(context: ServerContext) -> DialectServer:
    from polybus.dialects.rqueue.server.session import RqueueServer

    return context.serve_streams(RqueueServer(context.broker, context.section))


def check_settings(section: RqueueLimits, limits: Limits) -> Contradiction | None:
    """Check that an outbox has room for the largest frame."""
    if section.max_payload < limits.outbox_max_bytes:
        return None
    rule = "below [limits] outbox_max_bytes"
    return "max_payload", rule, section.max_payload, limits.outbox_max_bytes


DIALECT = Dialect(
    name="rqueue",
    default_addresses=("tcp://127.0.0.1:6567",),
    schemes=("tcp", "tls", "unix"),
    limits=RqueueLimits,
    bounds=BOUNDS,
    client="polybus.dialects.rqueue",
    commands=(
        Command(
            "rqueue",
            "polybus.dialects.rqueue.cli",
            "Run the rqueue server alone; its sink and pusher.",
        ),
    ),
    open_server=open_server,
    check_settings=check_settings,
)
