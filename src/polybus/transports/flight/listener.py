"""The port as one of the bus's listeners: opened, watched, drained and closed like any."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import pyarrow.flight as flight

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


@dataclass(frozen=True, slots=True)
class Security:
    """The certificate of the port, whose clients' certificates it trusts, and its tokens."""

    tokens: Tokens
    certificate: Path | None = None
    key: Path | None = None
    client_authorities: Path | None = None


class FlightListener:
    def __init__(
        self,
        address: Address,
        verbs: Verbs,
        limits: NativeLimits,
        security: Security,
        slow_timeout_s: float,
        clock: Callable[[], float],
        now_ms: Callable[[], int],
        log: Any,
        on_fault: Callable[[BaseException], None],
        on_cut: Callable[[str], None],
    ) -> None:
        self._log = log
        self._on_cut = on_cut
        self._pace = Pace(slow_timeout_s, clock, self._cut)
        identifier = Identifier(address.host)
        try:
            self._service = Service(
                _location(address),
                verbs,
                limits,
                identifier.identify,
                self._pace,
                now_ms,
                on_fault,
                middleware={MIDDLEWARE: TokenCheck(security.tokens)},
                **_tls(address, security),
            )
        except (OSError, flight.FlightError) as error:
            raise _explained(address, error) from None
        self.address = address.with_port(self._service.port)
        self._thread = Thread(target=self._service.serve, name="polybus-port", daemon=True)
        self._thread.start()
        self._stopping: Thread | None = None

    def tick(self) -> None:
        self._pace.tick()

    def close(self) -> None:
        """Accepts no new calls; those under way may end."""
        if self._stopping is None:
            self._stopping = Thread(target=self._service.shutdown, daemon=True)
            self._stopping.start()

    async def drain(self, timeout_s: float) -> None:
        """Waits for calls to end, then ends those that do not."""
        self.close()
        assert self._stopping is not None
        await asyncio.to_thread(self._stopping.join, timeout_s)
        if self._stopping.is_alive():
            await asyncio.to_thread(sockets.end_all, self.address.port)
            await asyncio.to_thread(self._stopping.join, STOP_TIMEOUT_S)

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


def _explained(address: Address, error: Exception) -> AddressError | AddressInUse:
    text = str(error)
    if "in use" in text.lower():
        return AddressInUse(f"{address}: something else listens there already")
    return AddressError(f"{address}: cannot be listened on: {text.splitlines()[0]}")
