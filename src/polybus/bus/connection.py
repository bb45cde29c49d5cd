"""A connection in the bus: identity, source of messages, outbox."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from polybus.kernel.fanout import PlainRoute, Source
    from polybus.kernel.framing import Encoding
    from polybus.kernel.outbox import Outbox, SocketOutput
    from polybus.model.identity import Identity


class ConnectionIO(Protocol):
    """A connection as a transport offers it. Nothing here blocks."""

    @property
    def peer(self) -> str: ...
    @property
    def identity(self) -> Identity: ...
    @property
    def is_unix(self) -> bool:
        """Return True for a Unix socket."""

    @property
    def certificate_digest(self) -> bytes:
        """Return the SHA-256 of the certificate of the end that was dialled; empty without TLS."""

    @property
    def output(self) -> SocketOutput | None:
        """Return the queue of the socket if the pump serves it."""

    def write(self, data: bytes) -> None: ...
    def write_many(self, chunks: list[bytes]) -> None: ...
    def backlog_bytes(self) -> int:
        """Return the written bytes that the socket has not accepted yet."""

    def unconfirmed_bytes(self) -> int:
        """Return the bytes in the kernel's send queue that the peer has not acknowledged."""

    def use_plain_route(self, route: PlainRoute) -> None:
        """Route plain publishes before the session gets the bytes that are left."""

    def pause_reading(self) -> None: ...
    def watch_hangup(self, hung_up: Callable[[], None]) -> None:
        """While reading is paused, call `hung_up` once if the peer hangs up."""

    def resume_reading(self) -> None:
        """Pass unconsumed bytes to the session again, then continue reading."""

    def redeliver(self) -> None:
        """Pass unconsumed bytes to the session again, without reading."""

    def has_failed(self) -> bool:
        """Return True if the connection is broken or closing: writes do not reach the peer."""

    def retain_slot(self) -> None:
        """Within `on_ended`: keep counting the connection until the session is done."""

    def release_slot(self) -> None:
        """Stop counting the connection, if `retain_slot` was called before."""

    def close(self) -> None:
        """End the connection after written bytes have been sent."""

    def abort(self) -> None:
        """End the connection at once."""


@dataclass(eq=False, slots=True)
class Connection:
    """A connection that has joined the bus. `number` is its place in the fan-out."""

    id: int
    dialect: str
    pipe: ConnectionIO
    source: Source
    outbox: Outbox
    encoding: Encoding
    number: int
    since_s: float
    identity: Identity  # when it joined: shares are released from the same account
    on_resume: Callable[[], None]  # continues reading after back-pressure
    blocked_by: Outbox | None = None
    free_probes: set[bytes] = field(default_factory=set)
    is_closed: bool = False
    uncommitted_bytes: int = 0  # submitted to the store
    is_committing: bool = False  # over the limit: reading is paused
    # Fields of `polybus connections` that the dialect knows better than the fan-out.
    describe: Callable[[], dict[str, int | str]] | None = None
