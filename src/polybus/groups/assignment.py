"""Which shard is for whom: evenly, and with as few moves as can be.

No member gets two more than another. Who has most now is left with one more where
the shards do not come out even, so nobody gives up more than it must.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Owners = Mapping[int, str | None]


def assign_shards(members: Iterable[str], before: Owners, holders: Owners) -> dict[int, str]:
    """The member that each shard of `before` is for; nothing without members.

    `before` is what was meant until now, `holders` who has a shard at present: one that
    must be given to somebody is left, if that is even, with the one that has it.
    """
    kept: dict[str, list[int]] = {name: [] for name in sorted(members)}
    if not kept:
        return {}
    pool: list[int] = []
    for shard, owner in sorted(before.items()):
        kept.get(owner or "", pool).append(shard)
    quotas = _quotas(kept, len(before))
    for name, shards in kept.items():
        pool += shards[quotas[name] :]
        del shards[quotas[name] :]
    _fill_quotas(sorted(pool), kept, quotas, holders)
    return {shard: name for name, shards in kept.items() for shard in shards}


def _quotas(kept: Mapping[str, list[int]], shards: int) -> dict[str, int]:
    least, over = divmod(shards, len(kept))
    by_size = sorted(kept, key=lambda name: (-len(kept[name]), name))
    return {name: least + (place < over) for place, name in enumerate(by_size)}


def _fill_quotas(
    pool: list[int], kept: dict[str, list[int]], quotas: Mapping[str, int], holders: Owners
) -> None:
    left = []
    for shard in pool:
        holder = holders.get(shard) or ""
        if holder in kept and len(kept[holder]) < quotas[holder]:
            kept[holder].append(shard)
        else:
            left.append(shard)
    wanting = [name for name in kept for _ in range(quotas[name] - len(kept[name]))]
    for name, shard in zip(wanting, left, strict=True):
        kept[name].append(shard)
