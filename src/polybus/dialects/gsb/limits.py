"""Limits of the GSB dialect, the section `[gsb]` of the settings."""

from __future__ import annotations

from dataclasses import dataclass

from polybus.model.limits import KIB, MIB


@dataclass(frozen=True, slots=True)
class GsbLimits:
    """Bounds of the GSB dialect (`[gsb]`)."""

    # What the bus takes in one packet: room for large values, and the most that one
    # connection can make it hold before a packet is whole.
    max_packet_bytes: int = 16 * MIB
    # A call without an answer ends after this long, unless its caller's hello says otherwise.
    deadline_ms: int = 60_000
    # A caller that is owed this much is full: what it streams waits at the service...
    outbox_full_bytes: int = 1 * MIB
    # ...until so little is left. Far apart, so that many items travel between two stops.
    outbox_free_bytes: int = 256 * KIB
    # A stream's first PARTIALs need no credit: most streams are short, and need none at all.
    free_partials: int = 64
    # The same in bytes, so that it is not 64 times the largest packet.
    free_bytes: int = 1 * MIB
    # A peer that says nothing for this long is asked whether it is there...
    ping_idle_s: float = 30.0
    # ...and dropped after this long: routers forget connections that are silent for minutes.
    ping_timeout_s: float = 120.0
    # Open calls of one connection, some 500 bytes each: a caller that forgets to read its
    # answers must not fill the table.
    max_open_calls: int = 65_536
    # Names that one connection registers.
    max_services: int = 1024
    # A peer that keeps others waiting and takes next to nothing for this long is cut. Longer
    # than for readers of topics: a slow caller slows down only those who share its service.
    stuck_timeout_s: float = 30.0
    # Every call becomes a message of the durable topic gsb.calls.
    audit: bool = False


# (lowest, highest) of each key. A key without a row must be at least 1 (a float: above 0).
BOUNDS: dict[str, tuple[float, float]] = {
    # A call with the longest address and id must fit, and an outbox must hold one.
    "max_packet_bytes": (4 * KIB, 64 * MIB),
    "deadline_ms": (1, 2**32 - 1),
    # Below a receive buffer every burst would stop a stream.
    "outbox_full_bytes": (64 * KIB, 16 * MIB),
    "outbox_free_bytes": (0, 16 * MIB),
    "free_partials": (1, 65_536),
    "free_bytes": (1, 16 * MIB),
}
