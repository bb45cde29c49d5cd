"""Misbehaving clients of every kind at once, beside a few that must not be affected.

Honest writers count up on topics of their own, and honest readers check every number.
Rude clients subscribe to the same topics and then read, do not read, read slowly,
publish, break the protocol, hang up, reset. A seed makes a failure repeatable.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from polybus.testing.bus_process import BusProcess, serve
from tests.rig.observer import check_unharmed, count, open_descriptors, rss_bytes, until
from tests.rig.rqueue_client import Client, connect, deregister, frame, publish, remove, subscribe

MIB = 1 << 20
HONEST = 4
RUDE = 12
ENV = {
    "POLYBUS_LOG_FORMAT": "json",
    "POLYBUS_LIMITS_SLOW_CONSUMER_TIMEOUT_S": "0.5",
    "POLYBUS_LIMITS_OUTBOX_HIGH_WATER_BYTES": str(256 * 1024),
    "POLYBUS_LIMITS_OUTBOX_MAX_BYTES": str(2 * MIB),
    "POLYBUS_LIMITS_MAX_SUBSCRIPTIONS_PER_CONNECTION": "20",
}


def topic_of(number: int) -> bytes:
    return b"honest %d" % number


class Honest:
    """A reader of one writer's numbers."""

    def __init__(self, bus: BusProcess, number: int) -> None:
        self.topic = topic_of(number)
        self.heard = 0
        self.reader, self.writer = connect(bus.address()), connect(bus.address())
        self.reader.send(subscribe(self.topic))
        self.reader.settle()

    def write(self, stop: threading.Event) -> None:
        at = 0
        while not stop.is_set():
            self.writer.send(*(publish(self.topic, b"%d:" % n) for n in range(at, at + 50)))
            at += 50
        self.writer.send(publish(self.topic, b"end:"))

    def read(self) -> None:
        """Read every number, once and in order; messages of other clients have no colon."""
        while (content := self.reader.messages(1)[0][1]) != b"end:":
            if content.endswith(b":"):
                assert int(content[:-1]) == self.heard
                self.heard += 1


def be_rude(bus: BusProcess, chance: random.Random, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            with connect(bus.address(), receive_buffer=chance.choice([None, 4096])) as client:
                misbehave(client, chance)
        except OSError:
            pass  # it was closed or cut, as it deserved


def misbehave(client: Client, chance: random.Random) -> None:
    for _ in range(chance.randrange(1, 12)):
        chance.choice(WAYS)(client, chance)
    if chance.random() < 0.3:
        client.reset()


def attach(client: Client, chance: random.Random) -> None:
    client.send(subscribe(topic_of(chance.randrange(HONEST))))


def detach(client: Client, chance: random.Random) -> None:
    client.send(chance.choice([deregister(), remove(topic_of(chance.randrange(HONEST)))]))


def shout(client: Client, chance: random.Random) -> None:
    content = bytes(chance.randrange(2000))
    client.send(publish(topic_of(chance.randrange(HONEST)), content) * chance.randrange(1, 200))


def shout_at_itself(client: Client, chance: random.Random) -> None:
    client.send(subscribe(b"self") + publish(b"self", bytes(1500)) * chance.randrange(1, 3000))


def take(client: Client, chance: random.Random) -> None:
    client.sock.settimeout(0.01)
    try:
        client.sock.recv(chance.randrange(1, 100_000))
    except TimeoutError:
        pass
    client.sock.settimeout(5)


def wait(client: Client, chance: random.Random) -> None:
    time.sleep(chance.random() * 0.3)


def stop_in_the_middle(client: Client, chance: random.Random) -> None:
    whole = publish(b"half", b"content")
    client.send(whole[: chance.randrange(1, len(whole))])


def break_it(client: Client, chance: random.Random) -> None:
    client.send(chance.choice([frame(99), frame(1), frame(0, b"x"), chance.randbytes(50)]))


def subscribe_a_lot(client: Client, chance: random.Random) -> None:
    client.send(*(subscribe(b"%d" % at) for at in range(chance.randrange(1, 30))))


WAYS: tuple[Callable[[Client, random.Random], None], ...] = (
    attach,
    attach,
    attach,
    detach,
    shout,
    shout,
    shout_at_itself,
    take,
    take,
    wait,
    stop_in_the_middle,
    break_it,
    subscribe_a_lot,
)


@pytest.mark.parametrize(
    "seconds", [1.0, pytest.param(300.0, marks=[pytest.mark.soak, pytest.mark.timeout(400)])]
)
def test_misbehaving_clients_do_not_affect_others(seconds: float):
    seed = random.randrange(1 << 32)
    with serve(env=ENV) as bus:
        with connect(bus.address()) as first:
            first.settle()  # the bus opens some descriptors at the first connection
        until(lambda: count(bus, "connections", "open") == 0, "it is gone")
        descriptors, memory = open_descriptors(bus.pid), rss_bytes(bus.pid)
        honest = [Honest(bus, number) for number in range(HONEST)]
        stop, stop_rude = threading.Event(), threading.Event()
        failures: list[BaseException] = []

        def spawn(work: Callable[[], None]) -> threading.Thread:
            def guarded() -> None:
                try:
                    work()
                except BaseException as error:  # to be raised where the test sees it
                    failures.append(error)

            thread = threading.Thread(target=guarded, daemon=True)
            thread.start()
            return thread

        threads = [spawn(one.read) for one in honest]
        threads += [spawn(partial(one.write, stop)) for one in honest]
        chances = [random.Random(seed + at) for at in range(RUDE)]
        rude = [spawn(partial(be_rude, bus, chance, stop_rude)) for chance in chances]
        stop_rude.wait(seconds)
        stop_rude.set()
        for thread in rude:
            thread.join()
        stop.set()
        for thread in threads:
            thread.join()
        assert not failures, f"seed {seed}: {failures}"
        assert min(one.heard for one in honest) > 1000
        until(lambda: count(bus, "connections", "open") == 2 * HONEST, "the rude are gone")
        assert count(bus, "connections", "waiting") == 0
        assert count(bus, "topics") == HONEST
        check_unharmed(bus)
        for one in honest:
            one.reader.close()
            one.writer.close()
        until(lambda: open_descriptors(bus.pid) <= descriptors, "no descriptor stays open")
        assert rss_bytes(bus.pid) - memory < 60 * MIB
