"""The text of the sealed shards that consumer groups have not acked completely."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

MAX_LISTED: Final = 8  # groups, and shards of each


def describe_draining(draining: Mapping[str, Sequence[int]]) -> str:
    """Return a text of a few groups and shards: "group billing has 3 shards (0, 4, 7)"."""
    parts = []
    for name, shards in list(draining.items())[:MAX_LISTED]:
        listed = ", ".join(map(str, shards[:MAX_LISTED])) + ", …" * (len(shards) > MAX_LISTED)
        noun = "shard" if len(shards) == 1 else "shards"
        parts.append(f"group {name} has {len(shards)} {noun} ({listed})")
    if len(draining) > MAX_LISTED:
        parts.append(f"{len(draining) - MAX_LISTED} more groups")
    return ", ".join(parts)
