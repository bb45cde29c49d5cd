"""What can be set on a pirate client, with the reason for each default."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from polybus.errors import UsageError

DEFAULT_SERVER: Final = "tcp://127.0.0.1:6568"


class Order(StrEnum):
    """What comes first: the message to its reader, or the note that it was read.

    A program that dies between the two meets that message never (record-then-deliver) or
    twice (deliver-then-record). All others it meets once, whatever the order.
    """

    RECORD_THEN_DELIVER = "record-then-deliver"
    DELIVER_THEN_RECORD = "deliver-then-record"


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Settings of one client; `connect` takes each as a keyword."""

    # How long one try waits for an answer. A large message gets a second more for each 4 MiB,
    # and one that moves, as slow as it may, is waited for.
    timeout_s: float = 2.5
    # How often a request is sent, each time on a new socket, before its caller is told.
    tries: int = 3
    # Between two tries passes up to so much, times the number of tries, at random: clients of
    # a bus that comes back do not come all at once.
    jitter_s: float = 0.25
    # `messages` asks again after at most so long when nothing is left to read.
    poll_s: float = 0.25
    # After a bus was restored from a backup: read each topic from where the bus says.
    reread: bool = False

    def __post_init__(self) -> None:
        for name in ("timeout_s", "tries", "poll_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be more than 0")
        if self.jitter_s < 0:
            raise UsageError("jitter_s must not be less than 0")


def parse_order(order: Order | str) -> Order:
    try:
        return Order(order)
    except ValueError:
        known = " or ".join(Order)
        raise UsageError(f"order is {known}, not {order!r}") from None
