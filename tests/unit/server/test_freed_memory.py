"""Freed memory goes back to the system above a threshold, and not too often."""

from __future__ import annotations

from polybus.dialects.pirate.server.pirate_server import EVERY_S, TRIM_THRESHOLD_BYTES, HeapTrimmer


class Process:
    def __init__(self) -> None:
        self.used, self.given = 1000, 0

    def give_back(self) -> None:
        self.given += 1
        self.used = 5000


def test_freed_memory_is_returned_above_a_threshold():
    process = Process()
    freed = HeapTrimmer(lambda: process.used, process.give_back)
    for number, (used, given) in enumerate(
        [
            (1000 + TRIM_THRESHOLD_BYTES, 0),
            (1001 + TRIM_THRESHOLD_BYTES, 1),
            (5000 + TRIM_THRESHOLD_BYTES, 1),
            (900, 1),
        ]
    ):
        process.used = used
        freed.trim_if_due(number * EVERY_S)
        assert process.given == given
    process.used = 901 + TRIM_THRESHOLD_BYTES
    freed.trim_if_due(4 * EVERY_S)
    assert process.given == 2


def test_memory_is_checked_seldom():
    process = Process()
    freed = HeapTrimmer(lambda: process.used, process.give_back)
    for tenth in range(10 * round(EVERY_S)):
        process.used += 2 * TRIM_THRESHOLD_BYTES
        freed.trim_if_due(tenth / 10)
    assert process.given == 1


def test_memory_of_the_real_process_is_checked():
    HeapTrimmer().trim_if_due(0.0)
