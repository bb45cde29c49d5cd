"""The interface that a stream transport needs of a dialect's session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing_extensions import Buffer


class StreamSession(Protocol):
    def receive(self, buffer: Buffer, start: int, end: int) -> int:
        """Consume bytes of buffer[start:end]. Returns the number of consumed bytes.

        The rest is offered again, from its first byte, with what comes after it.
        The buffer belongs to the transport: nothing may keep a view of it.
        """

    def on_stalled(self) -> None:
        """Handle a full socket buffer: stop writing."""

    def on_writable(self) -> None:
        """Handle an empty write queue: resume writing."""

    def on_half_closed(self) -> bool:
        """Handle the end of the peer's data. Returns True if the session will close itself."""

    def on_ended(self) -> None:
        """Handle the end of the connection. Always called, as the last call."""
