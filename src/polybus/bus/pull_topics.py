"""Topics in memory that a dialect holds for readers that pull, as the rest of the bus sees them.

The dialect installs its topics with `Broker.install_topics`; without it there are none.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Protocol

from polybus.bus.traffic import LoopTraffic

if TYPE_CHECKING:
    from polybus.kernel.fanout import CollectedBatch
    from polybus.model.identity import Identity


class MessageTotals(Protocol):
    """Counts of messages that do not pass the fan-out."""

    received: int
    received_bytes: int
    delivered: int
    delivered_bytes: int


class PullTopics(Protocol):
    @property
    def readers(self) -> Sized:
        """The subscriptions of all pull readers."""

    @property
    def message_counts(self) -> MessageTotals: ...

    def exists(self, name: bytes) -> bool:
        """Return True if the name is in use, also by a topic that is being deleted."""

    def creator_of(self, name: bytes) -> Identity | None: ...

    def on_push_subscribed(self, name: bytes) -> None: ...

    def on_collected(self, batch: CollectedBatch) -> None:
        """Take a batch that a push dialect published to a name with pull readers."""

    def on_assembled(self, name: bytes, body: bytes) -> None:
        """Take a message that a push dialect sent in pieces."""

    def end_denied(self) -> int:
        """End the subscriptions that the policy no longer allows. Returns their number."""

    def tick(self) -> None: ...


class NoPullTopics:
    """No topics and no readers."""

    def __init__(self) -> None:
        self.readers: tuple[()] = ()
        self.message_counts = LoopTraffic()

    def exists(self, name: bytes) -> bool:
        return False

    def creator_of(self, name: bytes) -> Identity | None:
        return None

    def on_push_subscribed(self, name: bytes) -> None:
        """Do nothing."""

    def on_collected(self, batch: CollectedBatch) -> None:
        """Do nothing."""

    def on_assembled(self, name: bytes, body: bytes) -> None:
        """Do nothing."""

    def end_denied(self) -> int:
        return 0

    def tick(self) -> None:
        """Do nothing."""
