"""Limits of FDQ messages, and the batching of a producer."""

from __future__ import annotations

from dataclasses import dataclass

from polybus.errors import UsageError
from polybus.model.limits import MIB

# A key is hashed, stored and compared for every message, so it should be a name.
MAX_KEY_BYTES = 1024
# Several copies of a message are in memory while it is in flight. Larger data belongs into a
# file or object store, with a message that holds its location.
MAX_MESSAGE_BYTES = 64 * MIB
# Names and values of one message's headers together. Headers are metadata, not a second body.
MAX_HEADER_BYTES = MIB
# Batches of one producer in flight. The bus keeps as many responses for repeated requests.
MAX_IN_FLIGHT = 16


# How long a message waits for others while a batch is in flight. It adds to the latency of the
# message. A shorter linger would collect too few messages to be worth a batch.
LINGER_S = 0.002
# Of all pending messages: enough that the cost per batch does not matter.
MAX_BATCH_ROWS = 16_384
MAX_BATCH_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Limits of pending messages. Without a batch in flight, messages are sent at once."""

    linger_s: float = LINGER_S
    max_batch_rows: int = MAX_BATCH_ROWS
    max_batch_bytes: int = MAX_BATCH_BYTES

    def __post_init__(self) -> None:
        if not self.linger_s >= 0:
            raise UsageError(f"linger_s must be at least 0, got {self.linger_s!r}")
        if self.max_batch_rows < 1 or self.max_batch_bytes < 1:
            raise UsageError(
                "max_batch_rows and max_batch_bytes must be at least 1,"
                f" got {self.max_batch_rows!r} and {self.max_batch_bytes!r}"
            )
