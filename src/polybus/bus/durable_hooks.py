"""The calls that the broker makes for durable topics, and their defaults without a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from polybus.bus.request_outcome import DOES_NOT_EXIST

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.bus.connection import Connection
    from polybus.bus.request_outcome import RequestOutcome
    from polybus.model.identity import Identity

# Gets the outcome of a request, and the id of its first message (0 if none was stored).
OnOutcome = Callable[["RequestOutcome", int], None]


class DurableHooks(Protocol):
    """The durable topics of a bus, as the broker and the sessions use them."""

    def is_durable(self, name: bytes) -> bool:
        """Return True if the name is a durable topic, or is about to become one."""

    def creator_of(self, name: bytes) -> Identity | None: ...

    def is_damaged(self, name: bytes) -> bool:
        """Return True if the name is a durable topic that the store refuses."""

    def publish(
        self, connection: Connection, name: bytes, offsets: Buffer, bodies: bytes, count: int
    ) -> None:
        """Store a batch of a dialect that gets no answers."""

    def publish_with_outcome(
        self, name: bytes, offsets: Buffer, bodies: bytes, then: OnOutcome
    ) -> None:
        """Store a batch, then call `then` on the loop."""

    def on_subscribed(self, connection: Connection, name: bytes) -> None: ...
    def on_unsubscribed(self, connection: Connection, name: bytes) -> None: ...

    def on_left(self, connection: Connection, names: Iterable[bytes]) -> None:
        """Handle the end of all subscriptions of a connection, which were to these names."""


class NoDurableTopics:
    """The hooks of a bus without a store: no topic is durable."""

    def is_durable(self, name: bytes) -> bool:
        return False

    def creator_of(self, name: bytes) -> Identity | None:
        return None

    def is_damaged(self, name: bytes) -> bool:
        return False

    def publish(
        self, connection: Connection, name: bytes, offsets: Buffer, bodies: bytes, count: int
    ) -> None:
        """Do nothing: the broker calls it for durable topics only."""

    def publish_with_outcome(
        self, name: bytes, offsets: Buffer, bodies: bytes, then: OnOutcome
    ) -> None:
        then(DOES_NOT_EXIST, 0)

    def on_subscribed(self, connection: Connection, name: bytes) -> None:
        """Do nothing."""

    def on_unsubscribed(self, connection: Connection, name: bytes) -> None:
        """Do nothing."""

    def on_left(self, connection: Connection, names: Iterable[bytes]) -> None:
        """Do nothing."""
