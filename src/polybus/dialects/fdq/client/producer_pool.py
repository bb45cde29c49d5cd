"""The bus's producers behind one of FDQ's.

A producer of the bus sends to one topic at a time, since its numbers are one row. One
with a name has to be a single one. Without a name topics are shared out over a few, so
that they do not wait for each other; a topic always stays with the same.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.native import Produced
    from polybus.native.bus_client import BusClient, BusProducer

MAX_PRODUCERS = 8  # each has a stream and two threads of its own


class ProducerPool:
    """`first` is there from the start: it has the name."""

    def __init__(self, bus: BusClient, name: str | None, *, create: bool = True) -> None:
        self._bus = bus
        self._create = create
        self._is_named = name is not None
        self.first = bus.producer(name, create=create)
        self._all = [self.first]
        self._of_topic: dict[str, BusProducer] = {}

    def send(self, topic: str, rows: pa.RecordBatch) -> Future[Produced]:
        """By one thread at a time."""
        line = self._of_topic.get(topic)
        if line is None:
            line = self._of_topic[topic] = self._next_producer()
        return line.produce_rows(topic, rows)

    def close(self, timeout_s: float | None) -> None:
        for line in self._all:
            line.close(timeout_s)

    def _next_producer(self) -> BusProducer:
        if self._is_named or not self._of_topic:
            return self.first
        if len(self._all) < MAX_PRODUCERS:
            self._all.append(self._bus.producer(create=self._create))
            return self._all[-1]
        return self._all[len(self._of_topic) % MAX_PRODUCERS]
