"""Options of a pirate client, with the reason for each default."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from polybus.errors import UsageError

DEFAULT_SERVER: Final = "tcp://127.0.0.1:6568"


class Order(StrEnum):
    """Whether a message is recorded as read before or after its delivery.

    If the program crashes in between, the message is delivered never (record-then-deliver) or
    twice (deliver-then-record). Every other message is delivered once.
    """

    RECORD_THEN_DELIVER = "record-then-deliver"
    DELIVER_THEN_RECORD = "deliver-then-record"


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Settings of one client; `connect` takes each as a keyword."""

    # Timeout of one try. A large message gets a second more per 4 MiB, and the timeout starts
    # again while its bytes move.
    timeout_s: float = 2.5
    # Tries of a request, each on a new socket, before it fails.
    tries: int = 3
    # Random pause between tries, up to this times the number of tries, so that the clients of
    # a restarted bus do not all connect at once.
    jitter_s: float = 0.25
    # The longest interval at which `messages` polls for new messages.
    poll_s: float = 0.25
    # After a restore of the bus from a backup: read each topic from the bus's position.
    reread: bool = False

    def __post_init__(self) -> None:
        for name in ("timeout_s", "tries", "poll_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.jitter_s < 0:
            raise UsageError(f"jitter_s must be >= 0, got {self.jitter_s}")


def parse_order(order: Order | str) -> Order:
    """Return the order. Raises `UsageError` if the text is not one."""
    try:
        return Order(order)
    except ValueError:
        known = " or ".join(Order)
        raise UsageError(f"order must be {known}, got {order!r}") from None
