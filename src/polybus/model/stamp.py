"""Stamps: how the store recognises a repeated request.

A stamp is checked and used in the same atomic step as the change it stamps. The state of a
producer is its epoch, the highest used counter and the results of its last commits; it
belongs to the producer and outlives topics.

    epoch     below the producer's: a newer run has opened it           → Fenced
              above it: no run has opened such an epoch                 → Fenced
    counter   next (dense), or any higher (gaps allowed)                → executed
              higher, but not the next, of a dense producer             → OutOfSequence
              used, its result kept, the same digest                    → the first result
              used, and the result is not kept, or the digest differs   → Stale

A commit that is refused for any other reason (a conflict, a stage that is gone, a full
disk) does not use the counter: the caller may retry with the same stamp.
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
    """The stamp of a request. Epochs and counters start at 1.

    The digest distinguishes different requests with the same counter.
    """

    producer: str
    epoch: int
    counter: int
    digest: bytes = b""

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> Self:
        """Parse the stamp of a JSON request. Raises MalformedRequest."""
        if set(given) != {"producer", "epoch", "counter"}:
            raise MalformedRequest("stamp must have exactly the keys producer, epoch and counter")
        producer, epoch, counter = given["producer"], given["epoch"], given["counter"]
        if not isinstance(producer, str):
            raise MalformedRequest("stamp.producer must be a string")
        return cls(producer, _ordinal(epoch), _ordinal(counter))


class ProducerOptions(NamedTuple):
    """The options of a producer, set each time it is opened."""

    dense: bool = True
    kept_results: int = KEPT_RESULTS


class ProducerEpoch(NamedTuple):
    """The epoch of an opened producer, and its last used counter (0 if none)."""

    epoch: int
    last_counter: int


def _ordinal(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_COUNTER:
        raise MalformedRequest("stamp.epoch and stamp.counter must be integers >= 1")
    return value
