"""One connection as the bus sees it: who it is, what it sends, what it is owed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from polybus.bus.outbox import Outbox
    from polybus.kernel.fanout import Source
    from polybus.kernel.framing import Encoding
    from polybus.model.identity import Identity


class ConnectionIO(Protocol):
    """A connection as a transport offers it. Nothing here blocks."""

    @property
    def peer(self) -> str: ...
    @property
    def identity(self) -> Identity: ...
    @property
    def is_unix(self) -> bool:
        """Is it a Unix socket?"""

    def write(self, data: bytes) -> None: ...
    def write_many(self, chunks: list[bytes]) -> None: ...
    def backlog_bytes(self) -> int:
        """Bytes that were written and have not reached the socket yet."""

    def unconfirmed_bytes(self) -> int:
        """Bytes in the host's own queue that the peer's host has not confirmed."""

    def pause_reading(self) -> None: ...
    def watch_hangup(self, hung_up: Callable[[], None]) -> None:
        """While it is not read from: calls `hung_up` once if the peer hangs up."""

    def resume_reading(self) -> None:
        """Offers what was left unconsumed first, then reads on."""

    def redeliver(self) -> None:
        """Offers what was left unconsumed once more, without reading."""

    def has_failed(self) -> bool:
        """The connection is broken or closing: what is written now does not reach the peer."""

    def retain_slot(self) -> None:
        """Within `ended`: the session is not done, and still counts as a connection."""

    def release_slot(self) -> None:
        """It is done now. Without `keep_place` before it, nothing to do."""

    def close(self) -> None:
        """Ends the connection once what is written has gone out."""

    def abort(self) -> None:
        """Ends it at once."""


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
    on_resume: Callable[[], None]  # how it goes on after having waited for a full reader
    blocked_by: Outbox | None = None
    free_probes: set[bytes] = field(default_factory=set)
    is_closed: bool = False
    uncommitted_bytes: int = 0  # on their way to the disk
    is_committing: bool = False  # so much of it that it is not read from
    # What its dialect knows better than the fan-out does, in the fields of `connections`.
    describe: Callable[[], dict[str, int | str]] | None = None
