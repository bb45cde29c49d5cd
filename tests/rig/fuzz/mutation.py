"""Ways to change an input a little, for the fuzz driver.

Each mutation takes the bytes and the source of chance, and changes the bytes in
place. Wire formats break at their lengths, so lengths get a mutation of their own:
a field of 1, 2 or 4 bytes, set to a value near something that matters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Literal

Mutation = Callable[[bytearray, Random], None]

# Where integers go wrong: signs, widths, and off by one.
EDGES = (0, 1, 2, 3, 4, 5, 7, 8, 127, 128, 255, 256, 2047, 2048, 2049, 4096, 32767, 65535)
HUGE = (0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFE, 0xFFFF_FFFF)
FIELD_SIZES = (1, 2, 4)
ORDERS: tuple[Literal["big"], Literal["little"]] = ("big", "little")
MAX_RUN = 16  # bytes that one insertion or deletion moves: small steps explain more
STACKED = (1, 1, 2, 4)  # mutations per input: mostly few, so that an input keeps its coverage


def flip_bit(data: bytearray, chance: Random) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def set_byte(data: bytearray, chance: Random) -> None:
    if data:
        data[chance.randrange(len(data))] = chance.randrange(256)


def nudge_byte(data: bytearray, chance: Random) -> None:
    if data:
        at = chance.randrange(len(data))
        data[at] = (data[at] + chance.choice((-2, -1, 1, 2))) & 0xFF


def set_length(data: bytearray, chance: Random) -> None:
    size = chance.choice(FIELD_SIZES)
    if len(data) < size:
        return
    at = chance.randrange(len(data) - size + 1)
    order = chance.choice(ORDERS)
    old = int.from_bytes(data[at : at + size], order)
    left = len(data) - at - size
    near = chance.choice((old, left, chance.choice(EDGES), chance.choice(HUGE)))
    new = (near + chance.choice((-1, 0, 1))) % (1 << 8 * size)
    data[at : at + size] = new.to_bytes(size, order)


def insert_bytes(data: bytearray, chance: Random) -> None:
    at = chance.randrange(len(data) + 1)
    data[at:at] = chance.randbytes(chance.randint(1, MAX_RUN))


def repeat_run(data: bytearray, chance: Random) -> None:
    start, end = _run(data, chance)
    data[start:start] = data[start:end]


def delete_run(data: bytearray, chance: Random) -> None:
    start, end = _run(data, chance)
    del data[start:end]


def truncate(data: bytearray, chance: Random) -> None:
    del data[chance.randrange(len(data) + 1) :]


def _run(data: bytearray, chance: Random) -> tuple[int, int]:
    start = chance.randrange(len(data) + 1)
    return start, start + chance.randint(1, MAX_RUN)


def inserter(words: Sequence[bytes]) -> Mutation:
    def insert_word(data: bytearray, chance: Random) -> None:
        if not words:
            return
        at = chance.randrange(len(data) + 1)
        data[at:at] = chance.choice(words)

    return insert_word


def overwriter(words: Sequence[bytes]) -> Mutation:
    def overwrite_word(data: bytearray, chance: Random) -> None:
        if not words:
            return
        word = chance.choice(words)
        at = chance.randrange(len(data) + 1)
        data[at : at + len(word)] = word

    return overwrite_word


def words_of(constant: int) -> list[bytes]:
    """A number that code compares with, as it may stand in an input."""
    return [
        constant.to_bytes(size, order)
        for size in FIELD_SIZES
        if constant >> 8 * size == 0
        for order in (ORDERS if size > 1 else ORDERS[:1])
    ]


def splicer(corpus: Sequence[bytes]) -> Mutation:
    """The head of the input with the tail of another one."""

    def splice(data: bytearray, chance: Random) -> None:
        other = chance.choice(corpus)
        data[chance.randrange(len(data) + 1) :] = other[chance.randrange(len(other) + 1) :]

    return splice


PLAIN: tuple[Mutation, ...] = (
    flip_bit,
    set_byte,
    nudge_byte,
    set_length,
    set_length,  # more often: see above
    insert_bytes,
    repeat_run,
    delete_run,
    truncate,
)


class Mutator:
    """Everything above, over one corpus and one list of words; both may grow meanwhile."""

    def __init__(self, corpus: Sequence[bytes], words: Sequence[bytes], max_bytes: int) -> None:
        word_mutations = [inserter(words), overwriter(words)]
        self._mutations = [*PLAIN, splicer(corpus), *word_mutations, *word_mutations]
        self._max_bytes = max_bytes

    def mutate(self, data: bytes, chance: Random) -> bytes:
        changed = bytearray(data)
        for _ in range(chance.choice(STACKED)):
            chance.choice(self._mutations)(changed, chance)
        return bytes(changed[: self._max_bytes])
