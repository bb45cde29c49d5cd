"""What calls ask of a connection. A dialect's session is one; the state is the kernel's."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from polybus.dialects.gsb.server.call_table import End

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.bus.connection import Connection
    from polybus.dialects.gsb.server.call_table import Call


class CallPeer(End):
    party: Connection
    wants_pings: bool = False
    waiting_for: CallPeer | None = None

    @abstractmethod
    def send_call(self, call: Call, data: Buffer) -> None:
        """To a service: somebody calls it."""

    @abstractmethod
    def send_reply(self, request_id: bytes, code: int, kind: int, data: Buffer) -> None:
        """To a caller: one reply."""

    @abstractmethod
    def send_failure(self, request_id: bytes, code: int, message: str) -> None:
        """To a caller: the FULL reply that says what the bus has to say."""

    @abstractmethod
    def send_cancel(self, call_id: bytes) -> None: ...

    @abstractmethod
    def send_credit(self, call_id: bytes, replies: int) -> None: ...

    @abstractmethod
    def send_ping(self) -> None: ...

    @abstractmethod
    def send_pong(self, token: bytes) -> None: ...

    @abstractmethod
    def halt(self) -> None:
        """Is not read from now on; a hang-up is still noticed."""

    @abstractmethod
    def schedule_retry(self) -> None:
        """Soon: what it sent is offered once more, and if nothing is in the way, it is read on."""

    def yield_turn(self) -> None:
        """It has asked for much: all others come first."""
        self.halt()
        self.schedule_retry()

    @property
    def outbox_bytes(self) -> int:
        """Bytes that it has not taken."""
        return self.party.outbox.backlog()
