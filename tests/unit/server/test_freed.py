"""What was freed is given back: once it is much, and not all the time."""

from __future__ import annotations

from polybus.dialects.pirate.server.heap_trim import EVERY_S, MUCH_BYTES, Freed


class Process:
    def __init__(self) -> None:
        self.used, self.given = 1000, 0

    def give_back(self) -> None:
        self.given += 1
        self.used = 5000


def test_what_was_freed_is_given_back_once_it_is_much():
    process = Process()
    freed = Freed(lambda: process.used, process.give_back)
    for number, (used, given) in enumerate(
        [(1000 + MUCH_BYTES, 0), (1001 + MUCH_BYTES, 1), (5000 + MUCH_BYTES, 1), (900, 1)]
    ):
        process.used = used
        freed.look(number * EVERY_S)
        assert process.given == given
    process.used = 901 + MUCH_BYTES
    freed.look(4 * EVERY_S)
    assert process.given == 2


def test_it_is_looked_for_seldom():
    process = Process()
    freed = Freed(lambda: process.used, process.give_back)
    for tenth in range(10 * round(EVERY_S)):
        process.used += 2 * MUCH_BYTES
        freed.look(tenth / 10)
    assert process.given == 1


def test_it_is_the_real_process_that_is_looked_at():
    Freed().look(0.0)
