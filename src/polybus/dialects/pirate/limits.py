"""Limits of the pirate dialect, the section `[pirate]` of the settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from polybus.model.limits import MIB

UNBOUNDED = float("inf")


@dataclass(frozen=True, slots=True)
class PirateLimits:
    """Bounds of the pirate dialect (`[pirate]`)."""

    # Each has a record of its epochs and one of its counter, for ever: some 200 bytes of disk.
    max_clients: int = 262_144
    # Some 400 bytes of memory each, and each may hold back a topic's messages.
    max_subscriptions: int = 131_072
    # Of one user, so that nobody can take them all.
    max_user_subscriptions: int = 65_536
    # Of one client, while something of it is under way: a Lazy Pirate has one or two.
    max_client_requests: int = 64
    # Messages on their way to the disk, of all clients: a few of the largest size.
    max_uncommitted_bytes: int = 256 * MIB
    # A subscriber that is not heard of for so long is dropped, and holds nothing back; 0: never.
    subscriber_ttl_s: float = 0.0
    # What one connection may have sent of a message that is not whole yet: the largest
    # message in small frames, with its envelope.
    max_unfinished_bytes: int = 72 * MIB
    # The same of all connections, and of all answers that their clients have not taken.
    max_unread_bytes: int = 512 * MIB


@dataclass(frozen=True, slots=True)
class PirateSettings(PirateLimits):
    """Pirate: its bounds, and who its callers are (`[pirate]`)."""

    # Clients must show a CURVE key that `polybus keys allow` has let in; needed beyond loopback.
    curve: bool = False
    # The folder of the bus's own key and of those it lets in; None: `pirate` in the data folder.
    keys: Path | None = None


# (lowest, highest) of each key. A key without a row must be at least 1 (a float: above 0).
BOUNDS: dict[str, tuple[float, float]] = {
    # A message of 64 MiB must fit, and a block holds no more.
    # 0: subscribers are never dropped for being away.
    "subscriber_ttl_s": (0, UNBOUNDED),
    # A message of the largest size must come through.
    "max_unfinished_bytes": (66 * MIB, UNBOUNDED),
    "max_unread_bytes": (66 * MIB, UNBOUNDED),
    "max_uncommitted_bytes": (65 * MIB, UNBOUNDED),
}
