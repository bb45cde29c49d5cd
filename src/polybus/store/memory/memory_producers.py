"""Producers and the check of stamps, by the table in `polybus.model.stamp`."""

from __future__ import annotations

from dataclasses import dataclass, field

from polybus.errors import Fenced, OutOfSequence, Stale, UnknownProducer
from polybus.model.commit import CommitResult
from polybus.model.stamp import ProducerEpoch, ProducerOptions, Stamp


@dataclass(slots=True)
class MemoryProducer:
    options: ProducerOptions
    epoch: int = 0
    last_counter: int = 0
    # Counter to digest and result of the last commits, oldest first.
    results: dict[int, tuple[bytes, CommitResult]] = field(default_factory=dict)

    def forget_old_results(self) -> None:
        while len(self.results) > self.options.kept_results:
            del self.results[next(iter(self.results))]


class MemoryProducers:
    def __init__(self) -> None:
        self._producers: dict[str, MemoryProducer] = {}

    def open(self, name: str, options: ProducerOptions) -> ProducerEpoch:
        producer = self._producers.setdefault(name, MemoryProducer(options))
        producer.options = options
        producer.epoch += 1
        producer.forget_old_results()
        return ProducerEpoch(producer.epoch, producer.last_counter)

    def look_up(self, name: str) -> ProducerEpoch | None:
        producer = self._producers.get(name)
        return ProducerEpoch(producer.epoch, producer.last_counter) if producer else None

    def close(self, name: str, epoch: int) -> None:
        self._of_epoch(name, epoch)
        del self._producers[name]

    def check_stamp(self, stamp: Stamp) -> CommitResult | None:
        """Return None if the stamp may be used, the first result if it was used before."""
        # The epoch comes first: a fenced producer is refused even for a repeat.
        producer = self._of_epoch(stamp.producer, stamp.epoch)
        if stamp.counter <= producer.last_counter:
            digest, result = producer.results.get(stamp.counter, (None, None))
            if result is None or digest != stamp.digest:
                raise Stale(
                    f"counter {stamp.counter} of producer {stamp.producer!r} was used before"
                )
            return result._replace(versions=(), duplicate=True)
        if producer.options.dense and stamp.counter != producer.last_counter + 1:
            raise OutOfSequence(
                f"counter of producer {stamp.producer!r} must be {producer.last_counter + 1}, "
                f"got {stamp.counter}"
            )
        return None

    def record_result(self, stamp: Stamp, result: CommitResult) -> None:
        """Store the result of a stamp that `check_stamp` allowed."""
        producer = self._producers[stamp.producer]
        producer.last_counter = stamp.counter
        producer.results[stamp.counter] = stamp.digest, result
        producer.forget_old_results()

    def _of_epoch(self, name: str, epoch: int) -> MemoryProducer:
        producer = self._producers.get(name)
        if producer is None:
            raise UnknownProducer(f"unknown producer {name!r}; open it first")
        if epoch != producer.epoch:
            raise Fenced(f"producer {name!r} has epoch {producer.epoch}, the request has {epoch}")
        return producer
