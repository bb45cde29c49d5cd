"""Histograms: counts of values in buckets, eight per doubling, so quantiles are exact within 9 %.

Histograms of parts add up to the histogram of the whole, however it was divided. Counts per batch,
also of repeated batches, therefore give the same result as counting once. Bucket 0 has all values
below 1, bucket n those from 2^((n-1)/8) to 2^(n/8).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Self, TypeVar

PER_DOUBLING = 8
Bound = TypeVar("Bound", int, str)
Buckets = Mapping[int, int]  # bucket → number of values


def bucket_sql(value: str) -> str:
    """Return Spark SQL for the bucket of a number."""
    return (
        f"CAST(CASE WHEN {value} < 1 THEN 0 "
        f"ELSE 1 + FLOOR(LOG2({value}) * {PER_DOUBLING}) END AS INT)"
    )


def lower(bucket: int) -> float:
    return 0.0 if bucket <= 0 else float(2.0 ** ((bucket - 1) / PER_DOUBLING))


def upper(bucket: int) -> float:
    return float(2.0 ** (max(bucket, 0) / PER_DOUBLING))


class Histogram(NamedTuple):
    """Distribution of values: counts in buckets, and the largest value."""

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
        """Return an upper bound of this share of all values; None if there are no values."""
        found = find_quantile_bound(self.buckets, share)
        return None if found is None else min(upper(found), self.largest)


def find_quantile_bound(counts: Mapping[Bound, int], share: float) -> Bound | None:
    """Return the bucket that contains this quantile. Names of buckets must be numbers."""
    wanted = math.ceil(sum(counts.values()) * share)
    reached = 0
    for bound in sorted(counts, key=float):
        reached += counts[bound]
        if reached >= wanted > 0:
            return bound
    return None
