"""Counts of values in buckets, eight to each doubling: a quantile is right within 9 %.

Histograms of parts add up to the histogram of the whole, however it was cut into parts: so
what is counted batch by batch, killed and done again, ends as if it was counted at once.
Bucket 0 has all values below 1; bucket n from 2^((n-1)/8) up to 2^(n/8).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Self, TypeVar

PER_DOUBLING = 8
Bound = TypeVar("Bound", int, str)
Buckets = Mapping[int, int]  # bucket → how many values


def bucket_sql(value: str) -> str:
    """The bucket of a number, in Spark's SQL."""
    return (
        f"CAST(CASE WHEN {value} < 1 THEN 0 "
        f"ELSE 1 + FLOOR(LOG2({value}) * {PER_DOUBLING}) END AS INT)"
    )


def lower(bucket: int) -> float:
    return 0.0 if bucket <= 0 else float(2.0 ** ((bucket - 1) / PER_DOUBLING))


def upper(bucket: int) -> float:
    return float(2.0 ** (max(bucket, 0) / PER_DOUBLING))


class Histogram(NamedTuple):
    """How values are spread: in buckets, and which is the largest."""

    buckets: Buckets = MappingProxyType({})
    largest: float = math.inf

    @classmethod
    def merge(cls, parts: Iterable[Self]) -> Self:
        whole: Counter[int] = Counter()
        largest = 0.0
        for part in parts:
            whole.update(part.buckets)
            largest = max(largest, part.largest)
        return cls(whole, largest)

    def quantile(self, share: float) -> float | None:
        """At most so large is this share of all values, as far as it is known; None of none."""
        found = find_quantile_bound(self.buckets, share)
        return None if found is None else min(upper(found), self.largest)


def find_quantile_bound(counts: Mapping[Bound, int], share: float) -> Bound | None:
    """The bucket up to which this share of all values is, by any name that is a number."""
    wanted = math.ceil(sum(counts.values()) * share)
    reached = 0
    for bound in sorted(counts, key=float):
        reached += counts[bound]
        if reached >= wanted > 0:
            return bound
    return None
