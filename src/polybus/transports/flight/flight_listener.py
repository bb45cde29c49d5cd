"""The Flight port as a listener of the bus: opened, monitored, drained and closed.

gRPC reads its certificate only when a service is created, so a new certificate needs a new
service on the same port. The old service is shut down: it releases the port at once and ends
when its calls have ended, so that open streams go on. If the authorities for client certificates
have changed, its connections are cut: their certificates may no longer be valid.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

from polybus.errors import AddressError, AddressInUse, ConfigError, StoreClosed
from polybus.kernel.flight_port import BatchQueue
from polybus.model.address import Address
from polybus.transports.flight import grpc_sockets
from polybus.transports.flight.authentication import CallIdentifier, TokenFile, parse_peer
from polybus.transports.flight.call_tracker import CallTracker
from polybus.transports.flight.flight_handler import FlightHandler
from polybus.transports.flight.flight_status import to_flight_status
from polybus.transports.flight.put_intake import PutIntake
from polybus.transports.flight.slow_consumers import SlowConsumerMonitor
from polybus.transports.flight.token_calls import TokenCalls
from polybus.transports.peer_identity import open_socket_table
from polybus.transports.socket_table import NetlinkSocketTable, SocketEnd

if TYPE_CHECKING:
    from polybus.model.limits import NativeLimits
    from polybus.transports.flight.port_interface import PortInterface

STOP_TIMEOUT_S = 2.0  # once its connections are cut, gRPC stops in milliseconds
# gRPC may still hold data that it accepted, and has no call to ask for it.
FLUSH_S = 0.1
RETRY_S = 0.01  # gRPC does not report when it has released a port
TICK_S = 0.25
TICKS_A_COUNT = 4  # connections are counted every fourth tick...
FEW_CONNECTIONS = 1024  # ...unless there may be fewer than this, which a flood exceeds at once


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
    def __init__(
        self,
        address: Address,
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
        self._on_refused = on_refused
        self._log = log
        self._on_cut = on_cut
        self._on_error = on_error
        self._queue = BatchQueue(
            limits.max_uncommitted_bytes,
            limits.max_calls,
            limits.max_resets_per_s,
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
        self._security = security
        self._calls = CallTracker()
        self._token_calls = TokenCalls(security.tokens, clock)
        identifier = CallIdentifier(
            address.host, security.tokens, on_in_doubt, require_token=security.require_token
        )
        self._max_connections = limits.max_connections
        grpc_sockets.reserve_spare()
        self._sockets = open_socket_table()  # while there are descriptors
        self._tls = _tls(address, security)
        _check_address_free(address)
        self._open = partial(
            FlightHandler,
            verbs=verbs,
            limits=limits,
            calls=self._calls,
            queue=self._queue,
            identify=identifier.identify,
            token_calls=self._token_calls,
            on_error=on_error,
            on_resets=partial(self._cut, "rapid_reset"),
        )
        self._serving = Lock()  # held while the service is opened or replaced
        self._service: FlightHandler | None = self._serve(address, self._tls)
        self.address = address.with_port(self._service.port)
        if not self._service.is_bounded:
            self._log.warning(
                "gRPC is not bounded",
                dialect="native",
                text="this pyarrow does not take max_streams; let trusted clients alone connect",
            )
        self._intake = PutIntake(self._queue, limits.max_batch_bytes, now_ms, on_error)
        self._closed = Event()
        self._closing = Event()
        self._stopping: list[Thread] = []
        # Searching thousands of connections takes too long for the event loop.
        self._watch_thread = Thread(target=self._watch, name="polybus-port", daemon=True)
        self._watch_thread.start()

    def close(self) -> None:
        """Refuse new calls and batches; accepted batches are still answered."""
        if not self._closing.is_set():
            self._closing.set()
            self._calls.stop()
            code, text, extra = to_flight_status(StoreClosed("the bus is stopping"))
            self._queue.stop(code, text.encode(), extra)
            self._retire()

    def reload(self) -> None:
        """Use the current certificate file for new connections. Not for the loop's thread.

        Raises:
            ConfigError: the file cannot be read and nothing has changed, or another process
                has taken the port, which is then opened as soon as it is free.
        """
        tls = _tls(self.address, self._security)
        with self._serving:
            if tls == self._tls or self._closing.is_set():
                return
            must_cut = tls.get("client_authorities") != self._tls.get("client_authorities")
            self._tls = tls
            self._retire()
            self._service = None
            try:
                self._reopen()
            finally:
                if must_cut:
                    self._cut_all("certificates_changed")

    def _reopen(self) -> None:
        """Open a service as soon as the old one has released the port."""
        until_s = time.monotonic() + STOP_TIMEOUT_S
        while self._service is None:
            try:
                self._serve_again()
            except (AddressError, AddressInUse) as error:
                if time.monotonic() > until_s:
                    raise ConfigError(str(error)) from None
                time.sleep(RETRY_S)

    def _serve_again(self) -> None:
        """Open a new service on the same port, under the lock."""
        _check_address_free(self.address)
        self._service = self._serve(self.address, self._tls)
        if self._closing.is_set():  # closed since the caller's check
            self._retire()

    def _serve(self, address: Address, tls: dict[str, Any]) -> FlightHandler:
        scheme = "grpc+tls" if address.is_encrypted else "grpc"
        host = f"[{address.host}]" if ":" in address.host else address.host
        try:
            return self._open(f"{scheme}://{host}:{address.port}", **tls)
        except OSError as error:
            text = str(error).splitlines()[0]
            raise AddressError(f"{address}: cannot be listened on: {text}") from None

    def _retire(self) -> None:
        """Shut the service down on a thread; it ends when its calls have ended."""
        service = self._service
        if service is not None:
            ending = Thread(target=service.shutdown, daemon=True)
            ending.start()
            self._stopping = [*filter(Thread.is_alive, self._stopping), ending]

    async def drain(self, timeout_s: float) -> None:
        """Wait until all answers are sent, then close all connections."""
        self.close()
        await asyncio.to_thread(self._end, timeout_s)

    def _end(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        self._queue.wait_settled(timeout_s)
        self._calls.wait_settled(max(0.0, end_s - time.monotonic()))
        self._await_stopped()
        end_s = time.monotonic() + STOP_TIMEOUT_S
        while any(map(Thread.is_alive, self._stopping)) and time.monotonic() < end_s:
            grpc_sockets.close_all(self.address.port)  # gRPC waits forever for idle streams
            self._await_stopped()
        self._closed.set()
        self._queue.close()
        if not self._intake.join(STOP_TIMEOUT_S):
            self._log.warning("batches are still pending", dialect="native")
        self._watch_thread.join()

    def _await_stopped(self) -> None:
        for stopping in self._stopping[-1:]:
            stopping.join(FLUSH_S)

    def _watch(self) -> None:
        for tick in count():
            if self._closed.wait(TICK_S):
                return
            try:
                self._token_calls.tick(partial(self._cut, "token"))
                self._slow_consumers.tick()
                self._count_refused()
                if (service := self._service) is not None:
                    service.uncount_ended()
                if tick % TICKS_A_COUNT == 0 or self._max_connections < FEW_CONNECTIONS:
                    self._close_surplus()
                with self._serving:
                    # A reload has failed: open the service once the port is free.
                    if self._service is None and not self._closing.is_set():
                        self._serve_again()
                        address = str(self.address)
                        self._log.info("listening again", dialect="native", address=address)
            except (AddressError, AddressInUse):
                pass  # the next tick retries
            except Exception as error:
                self._on_error(error)

    def _close_surplus(self) -> None:
        most = self._max_connections
        closed = grpc_sockets.close_surplus(self.address.port, most, self._owner_of)
        self._report_closed(closed, "max_connections")

    def _owner_of(self, far: SocketEnd, near: SocketEnd) -> int | bytes:
        """Return the user of a local connection, the address of any other."""
        # A table of text takes milliseconds per connection, and there are thousands.
        if not isinstance(self._sockets, NetlinkSocketTable):
            return far.ip
        uid = self._sockets.owner(far, near)
        return far.ip if uid is None else uid

    def _cut_all(self, reason: str) -> None:
        self._report_closed(grpc_sockets.close_all(self.address.port), reason)

    def _report_closed(self, closed: int, reason: str) -> None:
        for _ in range(closed):
            self._on_cut(reason)
        if closed:
            self._log.warning("connections ended", dialect="native", count=closed, reason=reason)

    def _confirmed_bytes(self, peer: str) -> int | None:
        far = parse_peer(peer)
        return None if far is None else grpc_sockets.confirmed_bytes(self.address.port, far.port)

    def _count_refused(self) -> None:
        """Count the calls that the compiled port has refused since the last tick."""
        calls, resets = self._queue.take_refused()
        for reason, refused in (("limit_reached", calls), ("rapid_reset", resets)):
            if refused:
                self._on_refused(reason, refused)

    def _cut(self, reason: str, peer: str) -> None:
        far = parse_peer(peer)
        if far is not None and grpc_sockets.close_one(self.address.port, far.port):
            self._on_cut(reason)
            self._log.warning("connection cut", dialect="native", peer=peer, reason=reason)


def _tls(address: Address, security: SecurityOptions) -> dict[str, Any]:
    if not address.is_encrypted:
        return {}
    try:
        assert security.certificate is not None
        assert security.key is not None
        # gRPC accepts any bytes and then fails at each handshake, so check them here.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            security.certificate, security.key, password=""
        )
        pair = (security.certificate.read_bytes(), security.key.read_bytes())
        options: dict[str, Any] = {"certificates": [pair]}
        if security.client_authorities is not None:
            options["client_authorities"] = security.client_authorities.read_bytes()
    except ssl.SSLError as error:
        reason = error.reason or "not a certificate with its key in PEM form"
        raise ConfigError(f"[tls] {security.certificate} and {security.key}: {reason}") from None
    except OSError as error:
        where = error.filename or f"{security.certificate} or {security.key}"
        raise ConfigError(f"[tls] {where}: {error.strerror}") from None
    return options


def _check_address_free(address: Address) -> None:
    """Bind the address once: gRPC neither reports why it cannot listen nor fails quietly."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((address.host, address.port))
            trial.listen(1)  # SO_REUSEADDR allows two binds, but only one listener
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"{address} is in use by another listener") from None
        reason = error.strerror or str(error)
        raise AddressError(f"{address}: cannot be listened on: {reason}") from None
