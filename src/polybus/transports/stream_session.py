"""What a transport asks of a dialect's session, and nothing more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing_extensions import Buffer


class StreamSession(Protocol):
    def receive(self, buffer: Buffer, start: int, end: int) -> int:
        """Takes what it can of buffer[start:end] and says how many bytes that was.

        The rest is offered again, from its first byte, with what comes after it.
        The buffer belongs to the transport: nothing may keep a view of it.
        """

    def on_stalled(self) -> None:
        """The socket takes no more for now."""

    def on_writable(self) -> None:
        """The socket has taken everything, and takes more."""

    def on_half_closed(self) -> bool:
        """The peer sends no more. True: the session will close the connection itself."""

    def on_ended(self) -> None:
        """The connection is gone. Always the last call, and always made."""
