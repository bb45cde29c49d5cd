"""The registration of the GSB dialect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.bus.dialect import FRAMING, RUNTIME, Command, Dialect, ServeFlag
from polybus.dialects.gsb.limits import BOUNDS, CALL_LOG_TOPIC, GsbLimits

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from polybus.bus.admin_verb import AdminVerb
    from polybus.bus.dialect import Contradiction, DialectServer, ServerContext
    from polybus.model.limits import Limits

# The framings: nng's, and that of the deployed Golem service bus.
SP, YA = "sp", "ya"


async def open_server(context: ServerContext) -> DialectServer:
    import asyncio
    import os

    from polybus.bus.framing_listeners import FramingListeners
    from polybus.dialects.gsb.network.link_dialler import LinkDialler
    from polybus.dialects.gsb.network.node_key import NodeKey
    from polybus.dialects.gsb.network.node_rules import NodeRules
    from polybus.dialects.gsb.server.session import GsbServer
    from polybus.dialects.gsb.ya.session import YaServer
    from polybus.model.identity import Identity

    check_files(context.section, context.data)
    # The topic of logged calls belongs to the user that the bus runs as.
    owner = Identity(uid=os.geteuid())
    loop = asyncio.get_running_loop()
    key = NodeKey.generate() if context.data is None else NodeKey.load(context.data)
    server = GsbServer(context.broker, context.section, loop, owner, key)
    streams = context.serve_streams(server, certificate=key.certificate)
    server.dialler = LinkDialler(server, streams, context.section.links, context.log)
    server.network.rules = NodeRules(context.broker.policy, context.rule_verbs, server.calls)
    context.attached = server
    ya_streams = context.serve_streams(YaServer(server), certificate=key.certificate)
    return FramingListeners(FRAMING, {SP: streams, YA: ya_streams})


def check_files(section: GsbLimits, _data: Path | None) -> None:
    """Check the ids and addresses of nodes. Raises `ConfigError`."""
    from polybus.dialects.gsb.network.link_dialler import LinkTarget
    from polybus.errors import AddressError, ConfigError
    from polybus.model.identity import is_node_id

    for node in section.link_nodes:
        if not is_node_id(node):
            raise ConfigError(f"gsb.link_nodes: must be 0x and 40 hex digits, got {node!r:.60}")
    for address in section.links.values():
        try:
            LinkTarget(address)
        except AddressError as error:
            raise ConfigError(f"gsb.links: {error}") from None


def check_settings(section: GsbLimits, _limits: Limits) -> Contradiction | None:
    if len(section.links) > section.max_links:
        return "links", "at most max_links of them", len(section.links), section.max_links
    return None


def admin_verbs(context: ServerContext) -> Mapping[str, AdminVerb]:
    from polybus.dialects.gsb.network.link_admin import LinkAdmin

    return LinkAdmin(context).verbs()


DIALECT = Dialect(
    name="gsb",
    default_addresses=("tcp://127.0.0.1:6569", f"ipc://{RUNTIME}/gsb.sock"),
    schemes=("tcp", "tls+tcp", "ipc"),
    framings={YA: ("tcp", "tls+tcp", "unix")},
    limits=GsbLimits,
    serve_flags=(
        ServeFlag("--link", "links", "ADDRESS", "Link to another bus: tls+tcp://HOST:PORT[#ID]."),
    ),
    bounds=BOUNDS,
    client="polybus.dialects.gsb",
    commands=(
        Command(
            "gsb",
            "polybus.dialects.gsb.cli",
            "Services that call each other, also on other buses.",
        ),
    ),
    open_server=open_server,
    makes_certificate=True,
    check_settings=check_settings,
    check_files=check_files,
    admin_verbs=admin_verbs,
    reserved_topics={CALL_LOG_TOPIC: "the log of GSB calls"},
)
