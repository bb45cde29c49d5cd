"""Listeners on byte streams: dialects with stream sessions, and the admin socket.

They share one receive buffer, one bound on connections, one certificate and one monitor of
peers that hang up.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from polybus.bus.quotas import ConnectionQuota
from polybus.kernel.pump import Pump
from polybus.kernel.receive_buffer import SharedBuffer
from polybus.server import folders
from polybus.server.certificates import Certificates, own_context
from polybus.server.connection_shares import ConnectionPlaces, ConnectionShares
from polybus.transports.hangup_monitor import HangupMonitor
from polybus.transports.peer_identity import socket_table
from polybus.transports.stream_dialler import StreamDialler
from polybus.transports.stream_listener import (
    ConnectionLimit,
    ListenOptions,
    OpenSession,
    StreamListener,
    listen,
)
from polybus.transports.unfinished_frames import UnfinishedFrames

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.model.address import Address
    from polybus.model.unfinished_frame import UnfinishedFrame
    from polybus.server.listener_plan import ListenerSpec
    from polybus.server.settings import Settings
    from polybus.transports.stream_connection import StreamConnection


class StreamListeners:
    """The stream listeners of one dialect: a `DialectServer`."""

    def __init__(
        self,
        dialect: str,
        open_session: OpenSession,
        options: ListenOptions,
        unfinished: UnfinishedFrames,
    ) -> None:
        self._dialect = dialect
        self._open_session = open_session
        self._options = options
        self._unfinished = unfinished

    async def listen(self, address: Address) -> StreamListener:
        listener = await listen(address, self._open_session, self._options)
        self._unfinished.add(self._dialect, listener.connections)
        return listener

    def dialler(self, open_session: OpenSession) -> StreamDialler:
        """Return an object that dials, for sessions that `open_session` opens."""
        dialler = StreamDialler(open_session, self._options)
        self._unfinished.add(self._dialect, dialler.connections)
        return dialler

    def forget(self, dialler: StreamDialler) -> None:
        """Watch the connections of a dialler no longer; they have ended."""
        self._unfinished.remove(dialler.connections)

    async def reload(self) -> None:
        """Do nothing: the certificate is shared, `StreamServer` reads it again."""

    def stop(self) -> None:
        """End the requests that wait, if the dialect has such; the broker ends the connections."""
        stop = getattr(self._open_session, "stop", None)
        if stop is not None:
            stop()

    async def close(self) -> None:
        close = getattr(self._open_session, "close", None)
        if close is not None:
            await close()


class StreamServer:
    """The parts that all stream listeners share.

    `places` counts connections that another library accepts, `shared` the bytes of all others.
    """

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        max_connections: int,
        uid: int,
        log: Any,
        listeners: Iterable[ListenerSpec],
    ) -> None:
        self._broker = broker
        self._uid = uid
        socket_table()  # opened while there are descriptors
        self._log = log
        self._limit = ConnectionLimit(max_connections, self._refusal_handler("max_connections"))
        self._shares = broker.shares.new_table(
            "max_connections", max_connections, partial(broker.counters.count, "refused")
        )
        self.places = ConnectionPlaces(self._limit, ConnectionShares(self._shares, None, log))
        # Admin connections have a bound of their own, so that a flood of clients cannot keep
        # the owner of the bus from inspecting it.
        self._max_admin_connections = settings.server.max_admin_connections
        self._admin_limit = ConnectionLimit(
            self._max_admin_connections, self._refusal_handler("max_admin_connections")
        )
        encrypted = any(wanted.address.is_encrypted for wanted in listeners)
        has_files = settings.tls.certificate is not None
        self._certificates = Certificates(settings.tls) if encrypted and has_files else None
        self.shared = SharedBuffer()
        self._pump = Pump(asyncio.get_running_loop(), broker.turn, self.shared)
        if settings.stream_threads:
            self._pump.start_threads(settings.stream_threads, broker.fanout)
        self._hangups = HangupMonitor()
        self._unfinished = UnfinishedFrames(settings.limits.unfinished_frame_s, self._on_unfinished)
        broker.on_tick.append(self._unfinished.tick)

    def serve(
        self,
        dialect: str,
        open_session: OpenSession,
        *,
        charge_user: bool = False,
        certificate: tuple[bytes, bytes] | None = None,
    ) -> StreamListeners:
        """Return the listeners of a dialect; `charge_user` applies quota_connections.

        Encrypted ones use `certificate` and its key, in PEM, if [tls] has none.
        """
        quota = ConnectionQuota(self._broker.quotas) if charge_user else None
        shares = ConnectionShares(self._shares, quota, self._log)
        options = self._options(self._limit, shares, self._max_admin_connections)
        if options.tls is None and certificate is not None:
            options = replace(options, tls=own_context(*certificate))
        return StreamListeners(dialect, open_session, options, self._unfinished)

    def own_places(self, dialect: str, max_connections: int) -> ListenOptions:
        """Return the options of listeners whose connections have a bound of their own."""
        limit = f"{dialect}_max_connections"
        count = partial(self._broker.counters.count, "refused")
        shares = self._broker.shares.new_table(limit, max_connections, count)
        options = self._options(
            ConnectionLimit(max_connections, self._refusal_handler(limit)),
            ConnectionShares(shares, None, self._log),
            sys.maxsize,  # the reserve is for the connections of `limits.max_connections`
        )
        on_failed = partial(self._on_accept_failed, reason=f"{dialect}_no_descriptor")
        return replace(options, on_accept_failed=on_failed)

    def serve_admin(self, open_session: OpenSession) -> StreamListeners:
        options = self._options(self._admin_limit, None, 0)
        return StreamListeners("admin", open_session, options, self._unfinished)

    async def reload(self) -> None:
        """Read the certificate again. Raises `ConfigError` if it is invalid."""
        if self._certificates is not None:
            await asyncio.to_thread(self._certificates.reload)
            self._log.info("reloaded", what="certificates")

    def close(self) -> None:
        self._hangups.close()
        self._pump.close()

    def _options(
        self, limit: ConnectionLimit, shares: ConnectionShares | None, spared: int
    ) -> ListenOptions:
        return ListenOptions(
            connection_limit=limit,
            shared=self.shared,
            pump=self._pump,
            tls=self._certificates.context if self._certificates else None,
            unix_mode=folders.socket_mode(self._uid),
            hangups=self._hangups,
            caller_limit=shares,
            spared_descriptors=spared,
            on_handshake_failed=self._on_handshake_failed,
            on_accept_failed=self._on_accept_failed,
        )

    def _refusal_handler(self, setting: str) -> Callable[[str], None]:
        """Return the callback that counts and logs a connection over a limit."""

        def refused(peer: str) -> None:
            self._broker.counters.count("refused", setting)
            self._log.warning("connection refused", peer=peer, reason=setting)

        return refused

    def _on_unfinished(
        self, dialect: str, connection: StreamConnection, frame: UnfinishedFrame
    ) -> None:
        self._broker.counters.count("unfinished_frames", dialect)
        self._log.warning(
            "unfinished frame",
            dialect=dialect,
            peer=connection.peer,
            received_bytes=connection.held_bytes,
            missing_bytes=frame.missing_bytes,
            likely_cause=frame.likely_cause,
        )

    def _on_handshake_failed(self, peer: str, reason: str) -> None:
        self._broker.counters.count("refused", "tls_handshake")
        self._log.warning("tls handshake failed", peer=peer, reason=reason)

    def _on_accept_failed(self, error: OSError, reason: str = "no_descriptor") -> None:
        self._broker.counters.count("refused", reason)
        self._log.warning("connections wait", reason=error.strerror)
