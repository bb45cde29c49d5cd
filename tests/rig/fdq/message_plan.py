"""The messages of a round: their bodies, and the plan that the handler follows.

A body is "w1 17 flaky": producer, number and plan. Bodies are unique in a round. The message
itself decides about failures, so the log of a round explains them.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Final

from tests.rig.fdq.history import Message

PLAIN: Final = "plain"  # handled, and acked
MOVED: Final = "moved"  # acked by a transaction, together with its outputs
FLAKY: Final = "flaky"  # the first run raises
DOUBTED: Final = "doubted"  # the first run raises inside its transaction
SLOW: Final = "slow"  # the first run is past its deadline when it returns
EXIT: Final = "exit"  # the first run ends its process
POISON: Final = "poison"  # every run raises: a dead letter
DEADLY: Final = "deadly"  # every run ends its process: a dead letter, too

TRANSACTIONAL: Final = frozenset({MOVED, DOUBTED})
HOPELESS: Final = frozenset({POISON, DEADLY})

# How many of each, of a thousand.
CALM: Final[Mapping[str, int]] = {PLAIN: 600, MOVED: 400}
ROUGH: Final[Mapping[str, int]] = {
    PLAIN: 550,
    MOVED: 370,
    FLAKY: 40,
    DOUBTED: 25,
    POISON: 10,
    SLOW: 3,
    EXIT: 2,
}

KEYLESS = 0.1  # share of messages without a key


class Sender:
    """Generates the messages of one producer."""

    def __init__(self, name: str, random: Random, keys: int, mix: Mapping[str, int]) -> None:
        self._name = name
        self._random = random
        self._keys = keys
        self._mix = mix
        self._sent = 0

    def message(self) -> Message:
        self._sent += 1
        plan = self._random.choices(list(self._mix), list(self._mix.values()))[0]
        keyless = self._random.random() < KEYLESS
        key = None if keyless else f"k{self._random.randrange(self._keys)}"
        return Message(key, f"{self._name} {self._sent} {plan}", plan in TRANSACTIONAL)


def plan_of(body: str) -> str:
    return body.rpartition(" ")[2]
