"""Oracle of kernel/quota_account: a dict of sums and a dict of limits."""

from __future__ import annotations

from collections import Counter

PLACES = 4


class QuotaAccount:
    def __init__(self, key: int | str | None) -> None:
        self.key = key
        self._held: Counter[int] = Counter()
        self._limits: Counter[int] = Counter()

    @property
    def is_empty(self) -> bool:
        return not any(self._held.values())

    def limit(self, quota: int) -> int:
        return self._limits[_checked(quota)]

    def set_limit(self, quota: int, limit: int) -> None:
        self._limits[_checked(quota)] = limit

    def held(self, quota: int) -> int:
        return self._held[_checked(quota)]

    def charge(self, quota: int, amount: int) -> bool:
        if amount < 0:
            raise ValueError(amount)
        if self._held[_checked(quota)] + amount > self._limits[quota]:
            return False
        self._held[quota] += amount
        return True

    def release(self, quota: int, amount: int) -> None:
        if amount < 0 or amount > self._held[_checked(quota)]:
            raise ValueError(amount)
        self._held[quota] -= amount


def _checked(quota: int) -> int:
    if quota not in range(PLACES):
        raise IndexError(quota)
    return quota
