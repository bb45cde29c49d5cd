"""Limits of the pirate dialect, the section `[pirate]` of the settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from polybus.model.limits import MIB

UNBOUNDED = float("inf")


@dataclass(frozen=True, slots=True)
class PirateLimits:
    """Bounds of the pirate dialect (`[pirate]`)."""

    # Each has a permanent record of its epochs and one of its counter: some 200 bytes of disk.
    max_clients: int = 262_144
    # Some 400 bytes of memory each, and each may hold back a topic's messages.
    max_subscriptions: int = 131_072
    # Per user, so that one user cannot take all.
    max_user_subscriptions: int = 65_536
    # Waiting requests per client. A Lazy Pirate client has one or two.
    max_client_requests: int = 64
    # Uncommitted messages of all clients: a few of the largest size.
    max_uncommitted_bytes: int = 256 * MIB
    # A subscription without a request for this time is dropped. 0: never.
    subscriber_ttl_s: float = 0.0
    # Bytes of an incomplete message per connection: the largest message in small frames, with
    # its envelope.
    max_unfinished_bytes: int = 72 * MIB
    # The same for all connections, and for all replies that their clients have not read.
    max_unread_bytes: int = 512 * MIB


@dataclass(frozen=True, slots=True)
class PirateSettings(PirateLimits):
    """Settings of the pirate dialect: its bounds and its keys (`[pirate]`)."""

    # Clients must have an allowed CURVE key (`polybus keys allow`). Required beyond loopback.
    curve: bool = False
    # The folder of the bus's own key and of allowed keys. None: `pirate` in the data folder.
    keys: Path | None = None


# (lowest, highest) of each key. A key without a row must be at least 1 (a float: above 0).
BOUNDS: dict[str, tuple[float, float]] = {
    # 0: subscriptions are never dropped.
    "subscriber_ttl_s": (0, UNBOUNDED),
    # The largest message must fit.
    "max_unfinished_bytes": (66 * MIB, UNBOUNDED),
    "max_unread_bytes": (66 * MIB, UNBOUNDED),
    "max_uncommitted_bytes": (65 * MIB, UNBOUNDED),
}
