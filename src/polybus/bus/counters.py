"""Counters with reasons: nothing is dropped, refused or closed without one.

A counter is (family, reason). Families are fixed here, reasons are the stable
words that logs use too. The reasons of `in_doubt` and `unfinished_frames` are dialects: they
count callers whose user is not known (`model.identity`), and frames of which the rest does not
arrive (`transports.unfinished_frames`). The counts of the fan-out stay in the kernel and are
added when statistics are read.
"""

from __future__ import annotations

from collections import Counter

FAMILIES = ("dropped", "refused", "closed", "faults", "in_doubt", "unfinished_frames")


class Counters:
    def __init__(self) -> None:
        self._families: dict[str, Counter[str]] = {family: Counter() for family in FAMILIES}

    def count(self, family: str, reason: str, n: int = 1) -> None:
        """Add to a counter. Raises `KeyError` for an unknown family."""
        self._families[family][reason] += n

    def get(self, family: str, reason: str) -> int:
        return self._families[family][reason]

    def family(self, family: str) -> dict[str, int]:
        return {reason: n for reason, n in sorted(self._families[family].items()) if n}
