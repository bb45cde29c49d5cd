"""Stamps: how a repeated request is known for what it is.

A stamp is checked and used up in the same atomic step as what it stamps. The
state of a producer is its epoch, the highest counter used and the results of
the last few commits; it belongs to the producer and outlives topics.

    epoch     below the producer's: somebody newer opened it            → Fenced
              above it: nobody has opened such an epoch                 → Fenced
    counter   next (dense), or any higher (gaps allowed)                → done
              higher, but not the next, of a dense producer             → OutOfSequence
              used, its result kept, the same digest                    → the first result again
              used, and the result is not kept, or the digest differs   → Stale

A commit that is refused for any other reason (a conflict, a stage that is gone,
a full disk) uses up nothing: the same stamp may come again with better luck.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self

from polybus.errors import MalformedRequest

KEPT_RESULTS = 16  # at most this many requests of one producer are in flight
MAX_KEPT_RESULTS = 1024
MAX_PRODUCER_BYTES = 255
MAX_DIGEST_BYTES = 64
MAX_COUNTER = 2**63 - 1


class Stamp(NamedTuple):
    """Epochs and counters start at 1. The digest tells requests apart that use one counter."""

    producer: str
    epoch: int
    counter: int
    digest: bytes = b""

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> Self:
        """The stamp that a request carries as JSON, or `MalformedRequest`."""
        if set(given) != {"producer", "epoch", "counter"}:
            raise MalformedRequest("a stamp has producer, epoch and counter, and nothing else")
        producer, epoch, counter = given["producer"], given["epoch"], given["counter"]
        if not isinstance(producer, str):
            raise MalformedRequest("a stamp's producer is a string")
        return cls(producer, _ordinal(epoch), _ordinal(counter))


class ProducerOptions(NamedTuple):
    """What whoever opens a producer chooses for it; opening again may choose anew."""

    dense: bool = True
    kept_results: int = KEPT_RESULTS


class ProducerEpoch(NamedTuple):
    """The epoch that the opener now holds, and the last counter used: 0 if none."""

    epoch: int
    last_counter: int


def _ordinal(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_COUNTER:
        raise MalformedRequest("a stamp's epoch and counter are integers from 1 on")
    return value
