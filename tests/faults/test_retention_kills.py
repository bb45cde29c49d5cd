"""Retention while the bus is killed: no message goes before its group has acked it.

A topic keeps few messages by its limit, and many more than those wait for a slow consumer. The
bus is killed each time after retention has trimmed something.
"""

from __future__ import annotations

import time
from threading import Event, Thread

import pytest

from polybus import fdq
from polybus.native import Client, ClientOptions
from tests.rig.native_bus import QUICK, NativeBus
from tests.rig.observer import until
from tests.rig.soak_runs import SoakRun

TOPIC = "orders"
KILLS, SOAK_KILLS = 3, 50
AHEAD = 2000  # messages that the producer is ahead of the consumer
LIMIT = 50
PATIENCE_S = 90
HANDLER_S = 0.0005


class Numbers:
    """A producer of numbers and a consumer that notes those it has handled."""

    def __init__(self, bus: NativeBus) -> None:
        options = ClientOptions(**QUICK)
        self.produced = 0
        self.handled: set[int] = set()
        self._stopped = Event()
        self._producer = fdq.Producer(bus.url, options=options)
        self._consumer = fdq.Consumer(bus.url, options=options)
        self._consumer.consume(TOPIC, "billing-1", self._handle, executors=4)
        self._thread = Thread(target=self._produce)
        self._thread.start()

    def _handle(self, envelope: fdq.Envelope) -> None:
        time.sleep(HANDLER_S)  # slower than the producer
        self.handled.add(int(envelope.message))

    def _produce(self) -> None:
        while not self._stopped.is_set():
            if self.produced - len(self.handled) > AHEAD:
                self._stopped.wait(0.01)
                continue
            numbers = range(self.produced, self.produced + 100)
            self._producer.produce_batch(
                TOPIC, [fdq.MessageRequest(f"key-{n % 7}", b"%d" % n) for n in numbers]
            )
            self.produced += len(numbers)

    def stop_producing(self) -> None:
        self._stopped.set()
        self._thread.join(PATIENCE_S)
        self._producer.close()

    def close(self) -> None:
        self._stopped.set()
        self._consumer.close()


def count_trimmed(client: Client) -> int:
    return client.topic_stats(TOPIC)["all"]["trimmed"]


def kill_after_trims(bus: NativeBus, kills: int) -> None:
    for _ in range(kills):
        with bus.client() as client:
            before = count_trimmed(client)
            until(lambda: count_trimmed(client) > before, "retention trims", PATIENCE_S)  # noqa: B023
        bus.kill()
        bus.start()


def check_nothing_unread_is_trimmed(kills: int) -> int:
    """Returns how many messages were produced."""
    with NativeBus() as bus:
        with bus.client() as client:
            client.create_topic(TOPIC, shards=4, settings={"retain_messages": LIMIT})
        numbers = Numbers(bus)
        try:
            kill_after_trims(bus, kills)
            numbers.stop_producing()
            with bus.client() as client:

                def lag() -> int:
                    (group,) = client.topic_stats(TOPIC)["groups"]
                    return int(group["lag"])

                until(lambda: lag() == 0, "the group has no lag", PATIENCE_S)
                lost = set(range(numbers.produced)) - numbers.handled
                assert not lost, f"{len(lost)} unacked messages were lost"
                (group,) = client.topic_stats(TOPIC)["groups"]
                assert group["trimmed_unread"] == 0
                until(
                    lambda: client.topic(TOPIC)["retention"]["stored_messages"] <= LIMIT,
                    "the limit is in force",
                    PATIENCE_S,
                )
        finally:
            numbers.close()
    return numbers.produced


@pytest.mark.sabotage("unread-ignored", expects=r"[1-9][0-9]* unacked messages were lost")
@pytest.mark.timeout(170)
def test_unacked_messages_survive_retention_and_kills():
    check_nothing_unread_is_trimmed(KILLS)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_unacked_messages_survive_many_kills():
    run = SoakRun("faults/test_retention_kills.py", 0)
    messages = check_nothing_unread_is_trimmed(SOAK_KILLS)
    run.record(kills=SOAK_KILLS, messages=messages, lost=0)
