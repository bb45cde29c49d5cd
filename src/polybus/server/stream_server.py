"""Everything that comes over a stream: dialects with sessions, and the admin socket.

What their listeners share is here: one buffer to read into, one bound of connections, one
certificate, one look-out for peers that hang up. (The native port and ZeroMQ bring their
own connections: port.py, pirate.py.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from polybus.bus.quotas import ConnectionQuota
from polybus.kernel.receive_buffer import SharedBuffer
from polybus.server import folders, socket_files
from polybus.server.certificates import Certificates
from polybus.server.dialect_registry import ADMIN, DIALECTS
from polybus.transports.hangup_monitor import HangupMonitor
from polybus.transports.stream_listener import (
    ConnectionLimit,
    ListenOptions,
    OpenSession,
    StreamListener,
    listen,
)

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from polybus.bus.broker import Broker
    from polybus.server.listener_plan import ListenerSpec
    from polybus.server.settings import Settings


class StreamServer:
    """`gate` counts the connections of all dialects together, `shared` what they bring."""

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        max_connections: int,
        uid: int,
        log: Any,
        listeners: Iterable[ListenerSpec],
        admin: OpenSession,
    ) -> None:
        self._broker = broker
        self._settings = settings
        self._uid = uid
        self._log = log
        self.connection_limit = ConnectionLimit(
            max_connections, self._refusal_handler("max_connections")
        )
        # The admin's places are apart, so that a flood of clients cannot keep the owner of
        # the bus from looking at it.
        places = settings.server.max_admin_connections
        self._admin_gate = ConnectionLimit(places, self._refusal_handler("max_admin_connections"))
        encrypted = any(wanted.address.is_encrypted for wanted in listeners)
        self._certificates = Certificates(settings.tls) if encrypted else None
        self.shared = SharedBuffer()
        self._hangups = HangupMonitor()
        self._openers = {ADMIN: admin}

    async def listen(self, stack: AsyncExitStack, wanted: ListenerSpec) -> StreamListener:
        """Opens it; the stack gets what is to be done at its end."""
        opener = self._opener(stack, wanted.dialect)
        options = self._options(wanted)
        with socket_files.prepared_path(stack, wanted, self._uid):
            listener = await listen(wanted.address, opener, options)
        stack.push_async_callback(listener.drain, 0)
        stack.callback(listener.close)
        return listener

    async def reload(self) -> None:
        """SIGHUP: certificates are read again; `ConfigError` if they are no good."""
        if self._certificates is not None:
            await asyncio.to_thread(self._certificates.reload)
            self._log.info("reloaded", what="certificates")

    def close(self) -> None:
        self._hangups.close()

    def _opener(self, stack: AsyncExitStack, dialect: str) -> OpenSession:
        """All listeners of a dialect share one."""
        if dialect not in self._openers:
            sessions = DIALECTS[dialect].sessions
            assert sessions is not None
            opener = self._openers[dialect] = sessions(self._broker, self._settings)
            if (close := getattr(opener, "close", None)) is not None:
                stack.callback(close)
        return self._openers[dialect]

    def _options(self, wanted: ListenerSpec) -> ListenOptions:
        counted = wanted.dialect != ADMIN and DIALECTS[wanted.dialect].counts_places
        return ListenOptions(
            connection_limit=self._admin_gate if wanted.dialect == ADMIN else self.connection_limit,
            shared=self.shared,
            tls=self._certificates.context if self._certificates else None,
            unix_mode=folders.socket_mode(self._uid),
            hangups=self._hangups,
            caller_limit=ConnectionQuota(self._broker.quotas) if counted else None,
            on_handshake_failed=self._on_handshake_failed,
        )

    def _refusal_handler(self, setting: str) -> Callable[[str], None]:
        """What happens to a connection over a limit, besides being closed."""

        def refused(peer: str) -> None:
            self._broker.counters.count("refused", setting)
            self._log.warning("connection refused", peer=peer, reason=setting)

        return refused

    def _on_handshake_failed(self, peer: str, reason: str) -> None:
        self._broker.counters.count("refused", "tls_handshake")
        self._log.warning("tls handshake failed", peer=peer, reason=reason)
