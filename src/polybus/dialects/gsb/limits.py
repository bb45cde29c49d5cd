"""Limits of the GSB dialect, the section `[gsb]` of the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from polybus.model.limits import KIB, MIB

CALL_LOG_TOPIC = "gsb.calls"


@dataclass(frozen=True, slots=True)
class GsbLimits:
    """Bounds of the GSB dialect (`[gsb]`)."""

    # The largest packet. A connection can make the bus hold this much of an incomplete packet.
    max_packet_bytes: int = 16 * MIB
    # A call without a reply ends after this time, unless its caller's hello sets another.
    deadline_ms: int = 60_000
    # High-water mark of an outbox: over it a connection is full, and its streams wait...
    outbox_full_bytes: int = 1 * MIB
    # ...until this much is left. Far apart, so that many items are sent between two stops.
    outbox_free_bytes: int = 256 * KIB
    # The first PARTIALs of a stream need no credit. Most streams are short and need none.
    free_partials: int = 64
    # The same in bytes, so that it is not 64 times the largest packet.
    free_bytes: int = 1 * MIB
    # A peer that is silent for this time gets a ping...
    ping_idle_s: float = 30.0
    # ...and is closed after this time. Routers forget connections that are silent for minutes.
    ping_timeout_s: float = 120.0
    # Open calls per connection, some 500 bytes each. A caller that does not read its replies
    # must not fill the table.
    max_open_calls: int = 65_536
    # Registered names per connection.
    max_services: int = 1024
    # A peer that blocks others and reads almost nothing for this time is closed. Longer than
    # for readers of topics: a slow caller slows down only callers of the same service.
    stuck_timeout_s: float = 30.0
    # Every call becomes a message of the durable topic gsb.calls.
    audit: bool = False
    # The buses that this one dials: any name, and tls+tcp://HOST:PORT or ...#NODE_ID.
    links: Mapping[str, str] = field(default_factory=dict)
    # Links at a time. Each address that is dialled has a place, also while its link is down.
    max_links: int = 64
    # The nodes that may link to this bus; empty: any. A dialled node may be pinned by its id.
    link_nodes: tuple[str, ...] = ()
    # Nodes of the network that are known, some 2 KiB each.
    max_nodes: int = 1024
    # Topics of other nodes that this bus reads, each counted once per user, some 4 KiB each;
    # and topics of this bus that other nodes read.
    max_channels: int = 4096
    # Topics of this bus that one node may read.
    max_node_channels: int = 256


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
    # An announcement names at most so many neighbours (network/announcement.py).
    "max_links": (1, 64),
    "max_nodes": (1, 65_536),
    "max_channels": (1, 65_536),
}
