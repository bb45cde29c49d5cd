"""The table of dialects: what this bus speaks, and where by default.

A new dialect is one line in `DIALECTS`. Sessions are imported when a listener
of theirs is opened, so that a bus pays only for what it serves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polybus.server.settings import Settings

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.bus.connection import ConnectionIO
    from polybus.transports.stream_session import StreamSession

    OpenSession = Callable[[ConnectionIO], StreamSession]
    MakeOpener = Callable[[Broker, Settings], OpenSession]

# The admin socket is no dialect of messages, but it is listened on and listed like one.
ADMIN = "admin"
NATIVE = "native"
PIRATE = "pirate"
RUNTIME = "<runtime>"


@dataclass(frozen=True, slots=True)
class Dialect:
    """One row: `sessions` gives what opens a session on a new connection.

    With `counts_places` each connection is charged to its user's quota_connections. Those
    without sessions bring their own connections: the native port (`server.port`) and ZeroMQ
    (`server.pirate`).
    """

    name: str
    defaults: tuple[str, ...]
    schemes: tuple[str, ...]
    sessions: MakeOpener | None
    counts_places: bool = False


def _rqueue(broker: Broker, settings: Settings) -> OpenSession:
    from polybus.dialects.rqueue.server.session import RqueueServer

    return RqueueServer(broker, settings.rqueue)


def _freud(broker: Broker, settings: Settings) -> OpenSession:
    import asyncio  # here: the commands that only read the table do without

    from polybus.dialects.freud.server.session import FreudServer

    return FreudServer(broker, settings.freud, asyncio.get_running_loop())


def _gsb(broker: Broker, settings: Settings) -> OpenSession:
    import asyncio
    import os

    from polybus.dialects.gsb.server.session import GsbServer
    from polybus.model.identity import Identity

    return GsbServer(broker, settings.gsb, asyncio.get_running_loop(), Identity(uid=os.geteuid()))


DIALECTS = {
    row.name: row
    for row in (
        Dialect("rqueue", ("tcp://127.0.0.1:6567",), ("tcp", "tls", "unix"), _rqueue),
        Dialect("freud", (f"unix:{RUNTIME}/freud.sock",), ("unix",), _freud, counts_places=True),
        Dialect(
            "gsb",
            ("tcp://127.0.0.1:6569", f"ipc://{RUNTIME}/gsb.sock"),
            ("tcp", "tls+tcp", "ipc"),
            _gsb,
        ),
        Dialect(PIRATE, ("tcp://127.0.0.1:6568",), ("tcp", "ipc"), None),
        Dialect(NATIVE, ("grpc://127.0.0.1:6570",), ("grpc", "grpc+tls"), None),
    )
}

ADMIN_DEFAULT = f"unix:{RUNTIME}/admin.sock"
ADMIN_SCHEMES = ("unix",)
