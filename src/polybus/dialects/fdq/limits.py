"""Limits of FDQ's messages, and how a producer merges what waits."""

from __future__ import annotations

from dataclasses import dataclass

from polybus.errors import UsageError
from polybus.model.limits import MIB

# A key is hashed, kept and compared for every message: it is a name, not a document.
MAX_KEY_BYTES = 1024
# A message is held in memory whole, several times on its way; larger ones belong elsewhere,
# with a message that says where.
MAX_MESSAGE_BYTES = 64 * MIB
# Names and values of one message's headers: notes beside a message, not a second one.
MAX_HEADER_BYTES = MIB
# Batches of one producer on their way at once: the bus keeps so many answers for repeats.
MAX_IN_FLIGHT = 16


# How long a message waits for company while others are on their way. It is time that whoever
# waits for the message feels; and in less, too few would come together to be worth a batch.
LINGER_S = 0.002
# Of all that waits: enough that what is done once for each batch costs nothing beside it.
MAX_BATCH_ROWS = 16_384
MAX_BATCH_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What waits is sent when nothing is on its way, or one of these is reached."""

    linger_s: float = LINGER_S
    max_batch_rows: int = MAX_BATCH_ROWS
    max_batch_bytes: int = MAX_BATCH_BYTES

    def __post_init__(self) -> None:
        if not self.linger_s >= 0:
            raise UsageError("linger_s is 0 or more")
        if self.max_batch_rows < 1 or self.max_batch_bytes < 1:
            raise UsageError("max_batch_rows and max_batch_bytes are at least 1")
