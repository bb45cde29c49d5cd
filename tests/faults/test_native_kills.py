"""The bus is killed with -9 under eight native producers, over and over.

The clients get no notice: they reconnect and send unanswered batches again, with the same
stamps. In the end every produced message is stored once and in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from polybus.native import Producer
from tests.rig.native_bus import NativeBus
from tests.rig.producer_kills import KilledProducer, check_stored_once, kill_bus

PRODUCERS = 8
# Some kill must fall between a commit and its answer: on a quick disk that takes more of them.
KILLS, MAX_KILLS, SOAK_KILLS = 10, 60, 300
TOPIC = "orders"
MAX_MESSAGES = 20  # of one batch
MAX_ANSWERS = 150  # between a start and the next kill


class NativeWriter(KilledProducer):
    """Produces atomic batches of numbered messages."""

    max_unanswered = 24

    @contextmanager
    def open(self) -> Iterator[Any]:
        with self.bus.client() as client, client.producer(f"w{self.number}") as producer:
            yield producer

    def produce(self, producer: Producer) -> Future[Any]:
        first, count = self.sent, self.choices.randint(1, MAX_MESSAGES)
        self.sent += count
        bodies = [b"%d %d" % (self.number, first + at) for at in range(count)]
        return producer.produce(TOPIC, bodies)


def count_duplicates(kills: int) -> int:
    """Kill the bus, check the topic, and return how many batches were stored unanswered."""
    with NativeBus() as bus:
        with bus.client() as client:
            client.create_topic(TOPIC, shards=4)
        producers = kill_bus(
            bus,
            lambda progress: [NativeWriter(bus, number, progress) for number in range(PRODUCERS)],
            kills,
            MAX_KILLS,
            MAX_ANSWERS,
        )
        stored: list[list[int]] = [[] for _ in producers]
        with bus.client() as client:
            for batch in client.read(TOPIC):
                for body in batch.column("body").to_pylist():
                    writer, number = map(int, body.split())
                    stored[writer].append(number)
        for producer in producers:
            numbers = stored[producer.number]
            check_stored_once(numbers, range(producer.sent), f"producer {producer.number}")
        return sum(producer.duplicates for producer in producers)


@pytest.mark.sabotage("stamps-off", expects=r"[1-9]\d* twice")
@pytest.mark.timeout(200)
def test_messages_are_stored_once_and_in_order_under_kills() -> None:
    assert count_duplicates(KILLS), "no kill fell between a commit and its answer"


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_messages_are_stored_once_under_hundreds_of_kills() -> None:
    assert count_duplicates(SOAK_KILLS)
