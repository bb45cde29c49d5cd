"""The assignment of shards to members: even, with as few moves as possible.

Shard counts of two members differ by at most one. Where the shards do not divide evenly,
the members with most shards keep one more, so that no member gives up more than necessary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Owners = Mapping[int, str | None]


def assign_shards(members: Iterable[str], previous: Owners, holders: Owners) -> dict[int, str]:
    """Return the member of each shard in `previous`; empty without members.

    `previous` is the assignment until now, `holders` the current owners. A shard that must
    move goes to its current owner if that owner has room.
    """
    kept: dict[str, list[int]] = {name: [] for name in sorted(members)}
    if not kept:
        return {}
    pool: list[int] = []
    for shard, owner in sorted(previous.items()):
        kept.get(owner or "", pool).append(shard)
    least, over = divmod(len(previous), len(kept))
    by_size = sorted(kept, key=lambda name: (-len(kept[name]), name))
    quotas = {name: least + (place < over) for place, name in enumerate(by_size)}
    for name, shards in kept.items():
        pool += shards[quotas[name] :]
        del shards[quotas[name] :]
    left = []
    for shard in sorted(pool):
        holder = holders.get(shard) or ""
        if holder in kept and len(kept[holder]) < quotas[holder]:
            kept[holder].append(shard)
        else:
            left.append(shard)
    # One entry per free place; the quotas add up to the number of shards.
    free = [name for name in kept for _ in range(quotas[name] - len(kept[name]))]
    for name, shard in zip(free, left, strict=True):
        kept[name].append(shard)
    return {shard: name for name, shards in kept.items() for shard in shards}
