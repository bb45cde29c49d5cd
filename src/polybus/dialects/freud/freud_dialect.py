"""The registration of the Freud dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from polybus.bus.dialect import RUNTIME, Command, Dialect
from polybus.dialects.freud.limits import BOUNDS, LENGTH, LENGTHS, PAYLOAD, WITH_HEADER, FreudLimits

if TYPE_CHECKING:
    from polybus.bus.admin_verb import AdminVerb
    from polybus.bus.dialect import DialectServer, ServerContext


async def open_server(context: ServerContext) -> DialectServer:
    import asyncio

    from polybus.bus.framing_listeners import FramingListeners
    from polybus.dialects.freud.server.session import FreudServer

    server = FreudServer(context.broker, context.section, asyncio.get_running_loop())
    streams = context.serve_streams(server, charge_user=True)
    with_header = context.serve_streams(server.open_with_header, charge_user=True)
    return FramingListeners(LENGTH, {PAYLOAD: streams, WITH_HEADER: with_header})


def admin_verbs(context: ServerContext) -> Mapping[str, AdminVerb]:
    from polybus.dialects.freud.server.subscription_admin import SubscriptionAdmin

    return SubscriptionAdmin(context).verbs()


DIALECT = Dialect(
    name="freud",
    default_addresses=(f"unix:{RUNTIME}/freud.sock",),
    schemes=("unix",),
    listen_options={LENGTH: LENGTHS},
    limits=FreudLimits,
    bounds=BOUNDS,
    client="polybus.dialects.freud",
    commands=(
        Command(
            "freud",
            "polybus.dialects.freud.cli",
            "Freud's topics and subscriptions: create, publish, read.",
        ),
    ),
    open_server=open_server,
    admin_verbs=admin_verbs,
)
