"""Pirate's part of a running bus: one ZeroMQ context, one session, its listeners, its keys."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import zmq

from polybus.dialects.pirate.server.curve_key_folder import (
    AllowedKey,
    CurveKeyFolder,
    FolderFingerprint,
)
from polybus.dialects.pirate.server.heap_trim import HeapTrimmer
from polybus.dialects.pirate.server.router_listener import CurveSettings, RouterListener
from polybus.dialects.pirate.server.session import PirateSession
from polybus.errors import ConfigError
from polybus.model.identity import ANONYMOUS, Identity
from polybus.transports.zmq.memory_watch import MemoryBounds
from polybus.transports.zmq.router_connections import RouterConnection
from polybus.transports.zmq.zap import ZapHandler

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.dialects.pirate.server.durable_subscribers import DurableSubscribers
    from polybus.model.address import Address
    from polybus.server.settings import Settings
    from polybus.transports.stream_listener import ConnectionLimit

DIALECT: Final = "pirate"
KEY_POLL_S: Final = 1.0


class PirateServer:
    def __init__(
        self,
        broker: Broker,
        subscribers: DurableSubscribers,
        settings: Settings,
        gate: ConnectionLimit,
        keys: Path,
        log: Any,
    ) -> None:
        assert broker.durable is not None
        self._broker = broker
        self._settings = settings
        self._gate = gate
        self._log = log
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._session = PirateSession(subscribers, broker.counters)
        broker.overview.other_totals.append(self._session.totals)
        self._listeners: list[RouterListener] = []
        self._keys = (
            AllowedKeys(CurveKeyFolder(keys), broker, log) if settings.pirate.curve else None
        )
        self._zap: ZapHandler | None = None
        self._key_poll: asyncio.Future[None] | None = None
        self._next_look_s = 0.0
        self._memory_release = HeapTrimmer()
        broker.on_tick.append(self._tick)
        broker.overview.other_connections.append(self._connections)

    async def open(self) -> None:
        if self._keys is not None:
            await self._keys.load()
            self._zap = ZapHandler(self._context, self._keys.is_allowed, self._keys.count_refusal)

    def listen(self, address: Address) -> RouterListener:
        listener = RouterListener(
            self._context,
            address,
            self._session,
            self._gate,
            self._bounds(),
            time.monotonic,
            self._broker.counters.count,
            self._log,
            self._keys.curve() if self._keys is not None else None,
        )
        self._listeners.append(listener)
        return listener

    async def reload(self) -> None:
        """SIGHUP: the keys are read again; `ConfigError` if one of them is no good."""
        if self._keys is not None:
            await self._keys.reload()
            self._enforce()

    async def close(self) -> None:
        """Behind its listeners: what is still to be sent has a moment left."""
        if self._key_poll is not None:
            self._key_poll.cancel()
        if self._zap is not None:
            self._zap.close()
        await asyncio.to_thread(self._context.term)

    def _bounds(self) -> MemoryBounds:
        own, of_all = self._settings.pirate, self._settings.limits
        return MemoryBounds(
            own.max_unfinished_bytes,
            own.max_unread_bytes,
            of_all.slow_consumer_timeout_s,
            of_all.slow_consumer_min_bytes_per_s,
        )

    def _tick(self, now_s: float) -> None:
        self._memory_release.trim_if_due(now_s)
        for listener in self._listeners:
            listener.tick()
        is_busy = self._key_poll is not None and not self._key_poll.done()
        if self._keys is not None and now_s >= self._next_look_s and not is_busy:
            self._next_look_s = now_s + KEY_POLL_S
            self._key_poll = asyncio.ensure_future(self._poll_keys(self._keys))

    async def _poll_keys(self, keys: AllowedKeys) -> None:
        if await keys.reload_if_changed():
            self._enforce()

    def _enforce(self) -> None:
        for listener in self._listeners:
            listener.enforce()

    def _connections(self) -> list[dict[str, Any]]:
        """As `polybus connections` shows them."""
        open_now = [one for listener in self._listeners for one in listener.connections.open()]
        return [_connection_stats(one) for one in open_now]


class AllowedKeys:
    """Whom the bus lets in, as it was read last."""

    def __init__(self, folder: CurveKeyFolder, broker: Broker, log: Any) -> None:
        self._folder = folder
        self._counters = broker.counters
        self._log = log
        self._secret = b""
        self._names: dict[bytes, str] = {}
        self._mark: FolderFingerprint = frozenset()  # of the folder, when they were read

    async def load(self) -> None:
        self._secret = (await asyncio.to_thread(self._folder.load_own_pair)).secret
        await self.reload()

    async def reload(self) -> None:
        """Raises `ConfigError` and changes nothing if a file is no good."""
        mark = await asyncio.to_thread(
            self._folder.read_fingerprint
        )  # first: what changes then is seen later
        allowed = await asyncio.to_thread(self._folder.allowed)
        self._mark, self._names = mark, {one.key: one.name for one in allowed}

    async def reload_if_changed(self) -> bool:
        """Reads them again if somebody has changed the folder; whether it was read."""
        mark = await asyncio.to_thread(self._folder.read_fingerprint)
        if mark == self._mark:
            return False
        try:
            await self.reload()
        except ConfigError as error:
            self._mark = mark
            self._log.error("reload failed", what="pirate keys", reason=str(error))
            return False
        self._log.info("reloaded", what="pirate keys", keys=len(self._names))
        return True

    def curve(self) -> CurveSettings:
        return CurveSettings(self._secret, self._identify, self.is_allowed)

    def is_allowed(self, key: bytes) -> bool:
        return key in self._names

    def count_refusal(self, key: bytes, address: str) -> None:
        client = AllowedKey("", key).fingerprint
        self._counters.count("refused", "pirate_unknown_key")
        self._log.warning("unknown key", dialect=DIALECT, peer=address, client=client)

    def _identify(self, key: bytes) -> Identity:
        name = self._names.get(key)
        return Identity(key=name) if name else ANONYMOUS


def _connection_stats(one: RouterConnection) -> dict[str, Any]:
    return {
        "id": one.number,
        "dialect": DIALECT,
        "peer": one.peer_text,
        "identity": one.identity.name,
        "age_s": round(time.monotonic() - one.since_s, 3),
        "subscriptions": 0,
        "received_messages": one.received,
        "received_bytes": one.received_bytes,
        "sent_messages": one.sent,
        "sent_bytes": one.sent_bytes,
        "outbox_bytes": one.unacknowledged_bytes,
        "state": "open",
    }
