"""Pirate's part of a running bus: the ZeroMQ context, the session, listeners and keys."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import zmq

from polybus.bus.broker import Broker
from polybus.bus.dialect import ServerContext
from polybus.dialects.pirate.limits import PirateSettings
from polybus.dialects.pirate.pirate_dialect import locate_keys
from polybus.dialects.pirate.server.curve_key_folder import (
    AllowedKey,
    CurveKeyFolder,
    FolderFingerprint,
)
from polybus.dialects.pirate.server.router_listener import CurveSettings, RouterListener
from polybus.dialects.pirate.server.session import PirateSession
from polybus.errors import ConfigError
from polybus.kernel.allocator import trim_heap
from polybus.model.address import Address
from polybus.model.identity import ANONYMOUS, Identity
from polybus.transports.zmq.memory_watch import MemoryBounds, process_bytes
from polybus.transports.zmq.router_connections import RouterConnection
from polybus.transports.zmq.zap import ZapHandler

DIALECT: Final = "pirate"
KEY_POLL_S: Final = 1.0
TRIM_THRESHOLD_BYTES: Final = 64 << 20
EVERY_S: Final = 5.0


class HeapTrimmer:
    """Returns freed memory to the system when it is much.

    The allocator keeps freed memory for reuse (`kernel/allocator`), which suits buffers that are
    allocated all the time. Messages of many megabytes are rare, and their memory would be kept
    forever. Returning it takes some milliseconds, so it is done every EVERY_S at most.
    """

    def __init__(
        self,
        measure: Callable[[], int] = process_bytes,
        give_back: Callable[[], object] = trim_heap,
    ) -> None:
        self._measure = measure
        self._give_back = give_back
        self._least_bytes = measure()
        self._next_s = 0.0

    def trim_if_due(self, now_s: float) -> None:
        if now_s < self._next_s:
            return
        self._next_s = now_s + EVERY_S
        if self._measure() > self._least_bytes + TRIM_THRESHOLD_BYTES:
            self._give_back()
            self._least_bytes = self._measure()
        else:
            self._least_bytes = min(self._least_bytes, self._measure())


class PirateServer:
    """The pirate dialect of a bus."""

    def __init__(self, context: ServerContext) -> None:
        broker, section = context.broker, context.section
        self._broker = broker
        self._settings: PirateSettings = section
        self._gate = context.connections
        self._log = context.log
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._session = PirateSession(context.attached, broker.counters)
        broker.overview.other_totals.append(self._session.totals)
        self._listeners: list[RouterListener] = []
        self._keys: AllowedKeys | None = None
        if section.curve:
            assert context.data is not None
            folder = CurveKeyFolder(locate_keys(section, context.data))
            self._keys = AllowedKeys(folder, broker, context.log)
        self._zap: ZapHandler | None = None
        self._key_poll: asyncio.Future[None] | None = None
        self._next_poll_s = 0.0
        self._heap_trimmer = HeapTrimmer()
        broker.on_tick.append(self._tick)

    @classmethod
    async def open(cls, context: ServerContext) -> PirateServer:
        """Open the server side of a bus with a store. Raises `ConfigError` if a key is invalid."""
        server = cls(context)
        try:
            if server._keys is not None:
                await server._keys.load()
                server._zap = ZapHandler(
                    server._context, server._keys.is_allowed, server._keys.count_refusal
                )
        except BaseException:
            await server.close()
            raise
        return server

    async def listen(self, address: Address) -> RouterListener:
        limits = self._broker.limits
        bounds = MemoryBounds(
            self._settings.max_unfinished_bytes,
            self._settings.max_unread_bytes,
            limits.slow_consumer_timeout_s,
            limits.slow_consumer_min_bytes_per_s,
        )
        listener = RouterListener(
            self._context,
            address,
            self._session,
            self._gate,
            bounds,
            time.monotonic,
            self._broker.counters.count,
            self._log,
            self._keys.curve() if self._keys is not None else None,
        )
        self._listeners.append(listener)
        self._broker.overview.connections.add_source(PirateConnections(listener))
        return listener

    async def reload(self) -> None:
        """Read the keys again (SIGHUP). Raises `ConfigError` if one is invalid."""
        if self._keys is not None:
            await self._keys.reload()
            self._enforce()

    def stop(self) -> None:
        """Store the read positions. No request waits at the server."""
        self._session.flush()

    async def close(self) -> None:
        """Close after the listeners. Queued replies are still sent."""
        if self._key_poll is not None:
            self._key_poll.cancel()
        if self._zap is not None:
            self._zap.close()
        await asyncio.to_thread(self._context.term)

    def _tick(self, now_s: float) -> None:
        self._heap_trimmer.trim_if_due(now_s)
        for listener in self._listeners:
            listener.tick()
        is_polling = self._key_poll is not None and not self._key_poll.done()
        if self._keys is not None and now_s >= self._next_poll_s and not is_polling:
            self._next_poll_s = now_s + KEY_POLL_S
            self._key_poll = asyncio.ensure_future(self._poll_keys(self._keys))

    async def _poll_keys(self, keys: AllowedKeys) -> None:
        if await keys.reload_if_changed():
            self._enforce()

    def _enforce(self) -> None:
        for listener in self._listeners:
            listener.enforce()


class PirateConnections:
    """The connections of one listener, for `polybus connections`."""

    def __init__(self, listener: RouterListener) -> None:
        self._connections = listener.connections

    @property
    def count(self) -> int:
        return self._connections.count

    def page(self, after: int, limit: int) -> list[tuple[int, dict[str, Any]]]:
        later = [one for one in self._connections.open() if one.number > after]
        later.sort(key=lambda connection: connection.number)
        return [(one.number, _describe(one)) for one in later[:limit]]


def _describe(connection: RouterConnection) -> dict[str, Any]:
    return {
        "id": connection.number,
        "dialect": DIALECT,
        "peer": connection.peer_text,
        "identity": connection.identity.name,
        "age_s": round(time.monotonic() - connection.since_s, 3),
        "subscriptions": 0,
        "received_messages": connection.received,
        "received_bytes": connection.received_bytes,
        "sent_messages": connection.sent,
        "sent_bytes": connection.sent_bytes,
        "outbox_bytes": connection.unacknowledged_bytes,
        "state": "open",
    }


class AllowedKeys:
    """The allowed keys, as last read from the folder."""

    def __init__(self, folder: CurveKeyFolder, broker: Broker, log: Any) -> None:
        self._folder = folder
        self._counters = broker.counters
        self._log = log
        self._secret = b""
        self._names: dict[bytes, str] = {}
        self._read_mark: FolderFingerprint = frozenset()  # of the folder when the keys were read

    async def load(self) -> None:
        self._secret = (await asyncio.to_thread(self._folder.load_own_pair)).secret
        await self.reload()

    async def reload(self) -> None:
        """Read the keys. Raises `ConfigError` and changes nothing if a file is invalid."""
        # The fingerprint before the keys, so that a later change is noticed.
        mark = await asyncio.to_thread(self._folder.read_fingerprint)
        allowed = await asyncio.to_thread(self._folder.allowed)
        self._read_mark, self._names = mark, {key.key: key.name for key in allowed}

    async def reload_if_changed(self) -> bool:
        """Read the keys again if the folder has changed. Returns True if they were read."""
        mark = await asyncio.to_thread(self._folder.read_fingerprint)
        if mark == self._read_mark:
            return False
        try:
            await self.reload()
        except ConfigError as error:
            self._read_mark = mark  # logged once per change
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
