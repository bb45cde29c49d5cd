"""The Flight port as a listener of the bus: opened, monitored, drained and closed.

gRPC listens on a private socket, and `FrontListener` accepts the clients in front of it.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from polybus.errors import AddressError, ConfigError, StoreClosed
from polybus.kernel.flight_port import BatchQueue
from polybus.transports.flight.authentication import CallIdentifier, TokenFile
from polybus.transports.flight.call_tracker import CallTracker
from polybus.transports.flight.flight_handler import FlightHandler
from polybus.transports.flight.flight_status import to_flight_status
from polybus.transports.flight.front_listener import FrontListener
from polybus.transports.flight.grpc_socket import GrpcSocket
from polybus.transports.flight.put_intake import PutIntake
from polybus.transports.flight.slow_consumers import SlowConsumerMonitor
from polybus.transports.flight.token_calls import TokenCalls

if TYPE_CHECKING:
    from polybus.kernel.flight_port import FlightCall
    from polybus.model.address import Address
    from polybus.model.identity import Identity
    from polybus.model.limits import NativeLimits
    from polybus.transports.flight.port_interface import PortInterface
    from polybus.transports.stream_listener import ListenOptions

STOP_TIMEOUT_S = 2.0  # once its connections are cut, gRPC stops in milliseconds
# gRPC and the relay may still hold data that gRPC has accepted.
FLUSH_S = 0.1
TICK_S = 0.25
IDLE_TICK_S = 0.9  # without a client; a call must end within a second of the loss of its token
ALPN = "h2"  # gRPC's clients insist on it


@dataclass(frozen=True, slots=True)
class SecurityOptions:
    """Certificate and key of the port, authorities for client certificates, and tokens."""

    tokens: TokenFile
    require_token: bool = False
    certificate: Path | None = None
    key: Path | None = None
    client_authorities: Path | None = None


@dataclass(frozen=True, slots=True)
class SlowConsumerLimits:
    """Limits below which a client is disconnected: a rate over a time."""

    timeout_s: float
    min_bytes_per_s: int


class FlightListener:
    """`on_cut`, `on_in_doubt`, `on_refused` and `on_error` are called on any thread."""

    def __init__(
        self,
        verbs: PortInterface,
        limits: NativeLimits,
        security: SecurityOptions,
        slow: SlowConsumerLimits,
        clock: Callable[[], float],
        now_ms: Callable[[], int],
        log: Any,
        on_error: Callable[[Exception], None],
        on_cut: Callable[[str], None],
        on_in_doubt: Callable[[], None],
        on_refused: Callable[[str, int], None],
    ) -> None:
        self._limits = limits
        self._security = security
        self._on_refused = on_refused
        self._log = log
        self._on_cut = on_cut
        self._on_error = on_error
        self._queue = BatchQueue(
            limits.max_uncommitted_bytes,
            limits.max_calls,
            limits.max_unpacked_bytes,
            limits.max_user_unpacked_bytes,
        )
        self._slow_consumers = SlowConsumerMonitor(
            slow.timeout_s,
            slow.min_bytes_per_s,
            clock,
            self._queue.pending_handovers,
            self._confirmed_bytes,
            partial(self._cut, "slow_consumer"),
        )
        self._calls = CallTracker()
        self._token_calls = TokenCalls(security.tokens, clock)
        self._identifier = CallIdentifier(
            security.tokens, self._find_identity, on_in_doubt, require_token=security.require_token
        )
        self._open_service = partial(
            FlightHandler,
            verbs=verbs,
            limits=limits,
            calls=self._calls,
            queue=self._queue,
            identify=self._identifier.identify,
            token_calls=self._token_calls,
            on_error=on_error,
        )
        self._open_intake = partial(
            PutIntake, self._queue, limits.max_batch_bytes, now_ms, on_error
        )
        self._closed = Event()
        self._stopping: Thread | None = None  # since the listener is closed
        self._watch_thread = Thread(target=self._watch, name="polybus-port", daemon=True)

    async def open(self, address: Address, options: ListenOptions) -> None:
        """Accept clients. Raises `AddressError`, `AddressInUse` or `ConfigError`."""
        if address.is_encrypted:
            self._tls = await asyncio.to_thread(_load_tls, self._security)
            options = replace(options, tls=self._tls.context)
        self._grpc = GrpcSocket()
        self._service = await asyncio.to_thread(self._serve)
        self._intake = self._open_intake()
        self._front = FrontListener(
            options, self._grpc, self._limits.max_resets_per_s, self._report_cut
        )
        try:
            await self._front.open(address)
        except BaseException:
            await asyncio.to_thread(self._stop)
            self._front.stop_relay()
            raise
        self._watch_thread.start()

    @property
    def address(self) -> Address:
        return self._front.address

    def close(self) -> None:
        """Refuse new clients, calls and batches; accepted batches are still answered."""
        if self._stopping is None:
            self._front.close()
            self._calls.stop()
            code, text, extra = to_flight_status(StoreClosed("the bus is stopping"))
            self._queue.stop(code, text.encode(), extra)
            # It ends when its calls have ended.
            self._stopping = Thread(target=self._service.shutdown, daemon=True)
            self._stopping.start()

    async def reload(self) -> None:
        """Use the current certificate files for new connections.

        Raises:
            ConfigError: a file is invalid, and nothing has changed.
        """
        if not self.address.is_encrypted:
            return
        tls = await asyncio.to_thread(_load_tls, self._security)
        self._front.use_certificate(tls.context)
        before, self._tls = self._tls, tls
        if tls.authorities != before.authorities:  # certificates of clients may not be valid now
            closed = self._front.cut_all()
            for _ in range(closed):
                self._on_cut("certificates_changed")
            if closed:
                self._log.warning(
                    "connections ended",
                    dialect="native",
                    count=closed,
                    reason="certificates_changed",
                )

    async def drain(self, timeout_s: float) -> None:
        """Wait until all answers are sent, then close all connections."""
        self.close()
        await asyncio.to_thread(self._settle, timeout_s)
        await self._front.drain(0)
        await asyncio.to_thread(self._stop)
        self._front.stop_relay()

    def _serve(self) -> FlightHandler:
        try:
            service = self._open_service(self._grpc.location)
        except OSError as error:
            text = str(error).splitlines()[0]
            raise AddressError(f"gRPC cannot listen on a private socket: {text}") from None
        finally:
            self._grpc.hide()
        if not service.is_bounded:
            self._log.warning(
                "gRPC is not bounded",
                dialect="native",
                text="this pyarrow does not take max_streams; let trusted clients alone connect",
            )
        return service

    def _settle(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        self._queue.wait_settled(timeout_s)
        self._calls.wait_settled(max(0.0, end_s - time.monotonic()))
        assert self._stopping is not None
        self._stopping.join(FLUSH_S)

    def _stop(self) -> None:
        """Stop what the clients have left; gRPC would wait forever for their idle streams."""
        stopping = self._stopping or Thread(target=self._service.shutdown, daemon=True)
        if self._stopping is None:
            stopping.start()
        stopping.join(STOP_TIMEOUT_S)
        self._grpc.close()
        self._closed.set()
        self._queue.close()
        if not self._intake.join(STOP_TIMEOUT_S):
            self._log.warning("batches are still pending", dialect="native")
        if self._watch_thread.ident is not None:
            self._watch_thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(TICK_S if self._front.has_clients else IDLE_TICK_S):
            try:
                self._token_calls.tick(partial(self._cut, "token"))
                self._slow_consumers.tick()
                refused = self._queue.take_refused()
                if refused:
                    self._on_refused("limit_reached", refused)
                self._service.uncount_ended()
            except Exception as error:
                self._on_error(error)

    def _find_identity(self, call: FlightCall) -> Identity | None:
        peer = self._front.find(call.peer)
        return None if peer is None else peer.identity

    def _confirmed_bytes(self, peer: str) -> int | None:
        client = self._front.find(peer)
        return None if client is None else self._front.confirmed_bytes(client)

    def _cut(self, reason: str, peer: str) -> None:
        client = self._front.find(peer)
        if client is not None and self._front.cut(client):
            self._report_cut(reason, client.connection.peer)

    def _report_cut(self, reason: str, peer: str) -> None:
        self._on_cut(reason)
        self._log.warning("connection cut", dialect="native", peer=peer, reason=reason)


@dataclass(frozen=True, slots=True)
class PortTls:
    """The TLS of the port, and the authorities for client certificates as they were read."""

    context: ssl.SSLContext
    authorities: bytes


def _load_tls(security: SecurityOptions) -> PortTls:
    assert security.certificate is not None
    assert security.key is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([ALPN])
    authorities = b""
    try:
        # An empty password: a key that has one would stop the bus to ask for it.
        context.load_cert_chain(security.certificate, security.key, password="")
        if security.client_authorities is not None:
            authorities = security.client_authorities.read_bytes()
            context.load_verify_locations(security.client_authorities)
            context.verify_mode = ssl.CERT_REQUIRED
    except ssl.SSLError as error:
        reason = error.reason or "not a certificate with its key in PEM form"
        raise ConfigError(f"[tls] {security.certificate} and {security.key}: {reason}") from None
    except OSError as error:
        where = error.filename or f"{security.certificate} or {security.key}"
        raise ConfigError(f"[tls] {where}: {error.strerror}") from None
    return PortTls(context, authorities)
