"""The port as one of the bus's listeners: opened, watched, drained and closed like any."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from polybus.errors import AddressError, AddressInUse, ConfigError
from polybus.model.address import Address
from polybus.transports.flight import sockets
from polybus.transports.flight.pace import Pace
from polybus.transports.flight.server import Service
from polybus.transports.flight.who import MIDDLEWARE, Identifier, TokenCheck, Tokens, peer_end

if TYPE_CHECKING:
    from polybus.model.limits import NativeLimits
    from polybus.transports.flight.verbs import Verbs

STOP_TIMEOUT_S = 2.0  # once its connections are cut, gRPC stops in milliseconds
# What was handed to gRPC is not yet on its way. Nobody can ask it when that is so.
FLUSH_S = 0.1
TICK_S = 0.25


@dataclass(frozen=True, slots=True)
class Security:
    """The certificate of the port, whose clients' certificates it trusts, and its tokens."""

    tokens: Tokens
    certificate: Path | None = None
    key: Path | None = None
    client_authorities: Path | None = None


@dataclass(frozen=True, slots=True)
class Slow:
    """A client that takes less than the rate over this long is cut."""

    timeout_s: float
    min_bytes_per_s: int


class FlightListener:
    def __init__(
        self,
        address: Address,
        verbs: Verbs,
        limits: NativeLimits,
        security: Security,
        slow: Slow,
        clock: Callable[[], float],
        now_ms: Callable[[], int],
        log: Any,
        on_error: Callable[[Exception], None],
        on_cut: Callable[[str], None],
    ) -> None:
        self._log = log
        self._on_cut = on_cut
        self._on_error = on_error
        self._pace = Pace(slow.timeout_s, slow.min_bytes_per_s, clock, self._taken, self._cut)
        identifier = Identifier(address.host)
        _check_free(address)
        try:
            self._service = Service(
                _location(address),
                verbs,
                limits,
                identifier.identify,
                self._pace,
                now_ms,
                on_error,
                middleware={MIDDLEWARE: TokenCheck(security.tokens)},
                **_tls(address, security),
            )
        except (OSError, pa.ArrowException) as error:
            text = str(error).splitlines()[0]
            raise AddressError(f"{address}: cannot be listened on: {text}") from None
        self.address = address.with_port(self._service.port)
        self._closed = Event()
        self._stopping: Thread | None = None
        # Its own thread: finding a connection among thousands is nothing for the loop.
        self._watching = Thread(target=self._watch, name="polybus-port", daemon=True)
        self._watching.start()

    def close(self) -> None:
        """Accepts no new calls, and no more batches; what was taken is answered."""
        if self._stopping is None:
            self._service.calls.stop()
            self._stopping = Thread(target=self._service.shutdown, daemon=True)
            self._stopping.start()

    async def drain(self, timeout_s: float) -> None:
        """Waits until nobody is owed an answer, then ends all connections."""
        self.close()
        await asyncio.to_thread(self._end, timeout_s)

    def _end(self, timeout_s: float) -> None:
        assert self._stopping is not None
        self._service.calls.wait_settled(timeout_s)
        self._stopping.join(FLUSH_S)
        end_s = time.monotonic() + STOP_TIMEOUT_S
        while self._stopping.is_alive() and time.monotonic() < end_s:
            sockets.end_all(self.address.port)
            self._stopping.join(FLUSH_S)
        self._closed.set()
        self._watching.join()

    def _watch(self) -> None:
        while not self._closed.wait(TICK_S):
            try:
                self._pace.tick()
            except Exception as error:
                self._on_error(error)

    def _taken(self, peer: str) -> int | None:
        far = peer_end(peer)
        return None if far is None else sockets.confirmed_bytes(self.address.port, far.port)

    def _cut(self, peer: str) -> None:
        far = peer_end(peer)
        if far is not None and sockets.end_one(self.address.port, far.port):
            self._on_cut("slow_consumer")
            self._log.warning("connection cut", dialect="native", peer=peer, reason="slow_consumer")


def _location(address: Address) -> str:
    scheme = "grpc+tls" if address.is_encrypted else "grpc"
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{scheme}://{host}:{address.port}"


def _tls(address: Address, security: Security) -> dict[str, Any]:
    if not address.is_encrypted:
        return {}
    try:
        assert security.certificate is not None
        assert security.key is not None
        pair = (security.certificate.read_bytes(), security.key.read_bytes())
        options: dict[str, Any] = {"tls_certificates": [pair]}
        if security.client_authorities is not None:
            options |= {
                "verify_client": True,
                "root_certificates": security.client_authorities.read_bytes(),
            }
    except OSError as error:
        raise ConfigError(f"[tls] {error.filename}: {error.strerror}") from None
    return options


def _check_free(address: Address) -> None:
    """gRPC does not say why it cannot listen, and logs lines of its own: a trial does better."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((address.host, address.port))
            trial.listen(1)  # two may be bound with that option, but only one listens
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"{address}: something else listens there already") from None
        reason = error.strerror or str(error)
        raise AddressError(f"{address}: cannot be listened on: {reason}") from None
