"""The registration of the pirate dialect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from polybus.bus.dialect import Command, Dialect
from polybus.dialects.pirate.limits import BOUNDS, PirateSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from polybus.bus.admin_verb import AdminVerb
    from polybus.bus.dialect import DialectServer, ServerContext
    from polybus.dialects.pirate.server.durable_subscribers import DurableSubscribers
    from polybus.model.topic import Bounds, Topic
    from polybus.store.contract import Store

KEY_FOLDER = "pirate"  # in the data folder


def locate_keys(section: PirateSettings, data: Path) -> Path:
    """Return the folder of the CURVE keys of a bus."""
    return (section.keys or data / KEY_FOLDER).absolute()


async def attach_store(context: ServerContext) -> DurableSubscribers:
    """Load the stored subscribers. They hold back collection even if no pirate is served."""
    import asyncio
    import time

    from polybus.dialects.pirate.server.durable_subscribers import DurableSubscribers
    from polybus.dialects.pirate.server.subscriber_context import SubscriberContext
    from polybus.dialects.pirate.server.subscription_table import StoredSubscribers
    from polybus.durable.durable_bus import durable_bus

    broker = context.broker
    durable = durable_bus(broker)
    assert durable is not None
    assert context.call_on_loop is not None
    assert context.workers is not None
    shared = SubscriberContext(
        durable.topics,
        durable.names,
        broker.policy,
        broker.counters,
        broker.shares,
        context.section,
        context.call_on_loop,
        context.workers,
        time.monotonic,
        time.time_ns,
        context.log,
    )
    stored = await asyncio.to_thread(StoredSubscribers, shared)
    subscribers = DurableSubscribers(shared, stored)
    broker.on_tick.append(subscribers.tick)
    broker.overview.sections["pirate"] = subscribers.stats
    return subscribers


async def open_server(context: ServerContext) -> DialectServer:
    from polybus.dialects.pirate.server.pirate_server import PirateServer

    return await PirateServer.open(context)


def admin_verbs(context: ServerContext) -> Mapping[str, AdminVerb]:
    from polybus.dialects.pirate.server.client_admin import ClientAdmin
    from polybus.dialects.pirate.server.subscriber_admin import SubscriberAdmin

    return {**SubscriberAdmin(context).verbs(), **ClientAdmin(context).verbs()}


def check_files(section: PirateSettings, data: Path) -> None:
    if section.curve:
        from polybus.dialects.pirate.server.curve_key_folder import CurveKeyFolder

        CurveKeyFolder(locate_keys(section, data)).allowed()


def is_encrypted(section: PirateSettings) -> bool:
    return section.curve


def read_subscribers(store: Store, topic: Topic, bounds: Bounds) -> Sequence[Mapping[str, Any]]:
    from polybus.dialects.pirate.server.subscriber_records import read_subscriber_lags

    return read_subscriber_lags(store, topic, bounds)


DIALECT = Dialect(
    name="pirate",
    default_addresses=("tcp://127.0.0.1:6568",),
    schemes=("tcp", "ipc"),
    limits=PirateSettings,
    bounds=BOUNDS,
    client="polybus.dialects.pirate",
    may_take_all_descriptors=True,  # libzmq
    commands=(
        Command(
            "pirate",
            "polybus.dialects.pirate.cli",
            "A shell for durable topics, exactly once: SUB, PUT, GET.",
        ),
        Command(
            "keys",
            "polybus.dialects.pirate.cli",
            "CURVE keys: make them, let clients in, shut them out.",
        ),
    ),
    open_server=open_server,
    attach_store=attach_store,
    admin_verbs=admin_verbs,
    check_files=check_files,
    is_encrypted=is_encrypted,
    encryption_hint="set curve = true in [pirate]",
    read_subscribers=read_subscribers,
    reserved_producers={"pirate:": "pirate's clients"},
)
