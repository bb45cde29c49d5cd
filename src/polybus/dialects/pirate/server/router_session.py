"""What a ROUTER's session and transport know of each other: nothing but these."""

from __future__ import annotations

from typing import Protocol

from polybus.model.identity import Identity


class RouterSessionPeer(Protocol):
    """One connection, as its messages tell."""

    @property
    def identity(self) -> Identity: ...

    @property
    def key(self) -> bytes | None:
        """The CURVE key that it has shown, its 32 bytes."""

    def is_full(self) -> bool:
        """Does it leave too much of what it was sent?"""

    def send(self, envelope: list[bytes], frames: list[bytes]) -> None:
        """An answer: the envelope of the request, an empty frame, and these."""


class RouterSession(Protocol):
    """The dialect behind a ROUTER: one for all its peers."""

    def receive(self, peer: RouterSessionPeer, frames: list[bytes]) -> None:
        """One message, its envelope first."""

    def on_turn_end(self) -> None:
        """All that had come by now was received."""

    @property
    def unanswered(self) -> int:
        """Requests that wait for the disk."""
