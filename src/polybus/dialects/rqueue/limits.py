"""Limits of the rqueue dialect, the section `[rqueue]` of the settings."""

from __future__ import annotations

from dataclasses import dataclass

from polybus.model.limits import LARGEST_MESSAGE_BYTES, MIB


@dataclass(frozen=True, slots=True)
class RqueueLimits:
    """Limits of the rqueue dialect (`[rqueue]`)."""

    # A frame stays near one Ethernet packet, as in the original. Larger messages need PARTs.
    max_payload: int = 2048
    # A publisher that dies between PARTs must not pin their memory.
    part_timeout_s: float = 30.0
    # The largest message that PARTs may add up to.
    max_message_bytes: int = LARGEST_MESSAGE_BYTES


# (lowest, highest) of each key. A key without a row must be at least 1 (a float: above 0).
BOUNDS: dict[str, tuple[float, float]] = {
    # A PART of one byte under the longest topic must fit; the compiled framing checks it.
    "max_payload": (282, 64 * MIB),
    "max_message_bytes": (1, LARGEST_MESSAGE_BYTES),
}
