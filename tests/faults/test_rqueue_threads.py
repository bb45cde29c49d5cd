"""rqueue on several threads of a real bus: order, exact counters, and verdicts.

tests/threads has the races. Here Python is the loop: sessions, policy, durable topics and
counters, with connections that move between it and their threads.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from polybus.server.admin_client import ask
from polybus.testing.bus_process import BusProcess, rqueue, serve
from tests.rig.flight_client import act
from tests.rig.flight_client import connect as connect_flight
from tests.rig.observer import (
    check_unharmed,
    connections,
    count,
    read_counter,
    stats,
    until,
)
from tests.rig.rqueue_client import Client, connect, publish, remove, subscribe

THREADS = ("--threads", "4")
JSON_LOG = {"POLYBUS_LOG_FORMAT": "json"}
MARK = 256 * 1024
# A reader is cut as soon as it is full.
QUICK_TO_OVERFLOW = JSON_LOG | {
    "POLYBUS_LIMITS_OUTBOX_HIGH_WATER_BYTES": str(MARK),
    "POLYBUS_LIMITS_OUTBOX_MAX_BYTES": str(MARK + 1024),
}
RECEIVE_BUFFER = 4096
PUBLISHERS, ROUNDS = 6, 8


@pytest.fixture(scope="module")
def running() -> Iterator[BusProcess]:
    listen = ("rqueue=tcp://127.0.0.1:0", "native=grpc://127.0.0.1:0")
    with serve(*THREADS, listen=listen, env=JSON_LOG) as bus:
        with connect_flight(bus) as client:
            act(client, "topic.create", topic="stored", shards=1)
        yield bus


@pytest.fixture
def bus(running: BusProcess) -> Iterator[BusProcess]:
    yield running
    until(lambda: not connections(running), "all clients are gone")
    check_unharmed(running)


def mixed_stream(rng: random.Random, numbers: range) -> tuple[bytes, dict[bytes, list[bytes]]]:
    """Frames for a thread and frames for the loop. Returns them, and the bodies by topic."""
    frames: list[bytes] = []
    bodies: dict[bytes, list[bytes]] = {b"plain": [], b"stored": []}
    for number in numbers:
        topic = rng.choice((b"plain", b"plain", b"plain", b"stored"))
        frames.append(publish(topic, b"%d" % number))
        bodies[topic].append(b"%d" % number)
        if rng.random() < 0.1:
            frames.append(rng.choice((subscribe, remove))(b"own/%d" % rng.randrange(5)))
        if rng.random() < 0.1:
            frames.append(publish(b"unheard"))
    return b"".join(frames), bodies


@pytest.mark.parametrize("pieces", [(1,), (1, 3, 17, 100, 2000)], ids=["bytes", "pieces"])
def test_order_holds_while_a_stream_moves_between_its_thread_and_the_loop(bus, pieces):
    rng = random.Random(44)
    with connect(bus.address()) as reader, connect(bus.address()) as publisher:
        reader.send(subscribe(b"plain"), subscribe(b"stored"))
        reader.settle()
        data, bodies = mixed_stream(rng, range(300 if len(pieces) == 1 else 5000))
        at = 0
        while at < len(data):
            size = rng.choice(pieces)
            publisher.send(data[at : at + size])
            at += size
        received: dict[bytes, list[bytes]] = {b"plain": [], b"stored": []}
        for topic, body in reader.messages(sum(map(len, bodies.values()))):
            received[topic].append(body)
        assert received == bodies


def test_counters_are_exact_over_all_threads(bus):
    each, before = 2000, stats(bus)
    for_each = (PUBLISHERS + PUBLISHERS // 2) * each
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(connect(bus.address())) for _ in range(PUBLISHERS)]
        for number, reader in enumerate(readers):
            reader.send(subscribe(b"all"), subscribe(b"some/%d" % (number % 2)))
            reader.settle()
        writers = [stack.enter_context(connect(bus.address())) for _ in range(PUBLISHERS)]

        def write(number: int) -> None:
            for topic in (b"all", b"some/%d" % (number % 2), b"none"):
                writers[number].send(publish(topic, bytes(100)) * each)

        with ThreadPoolExecutor(2 * PUBLISHERS) as pool:
            writing = pool.map(write, range(PUBLISHERS))
            assert [len(found) for found in pool.map(lambda one: one.messages(for_each), readers)]
            list(writing)
        for writer in writers:
            writer.settle()
        rows = {row["peer"]: row for row in connections(bus)}
        # One more: of `settle`.
        assert {rows[one.name]["received_messages"] for one in writers} == {3 * each + 1}
        assert {rows[one.name]["sent_messages"] for one in readers} == {for_each + 1}
        after = stats(bus)

    def grown(*path: str) -> int:
        return read_counter(after, *path) - read_counter(before, *path)

    settled = 2 * PUBLISHERS
    assert grown("messages", "received") == PUBLISHERS * 3 * each + settled
    assert grown("messages", "delivered") == PUBLISHERS * for_each + settled
    assert grown("dropped", "no_subscriber") == PUBLISHERS * each


def test_no_message_passes_after_a_rule_was_answered(bus):
    """The threads have the former verdict in their tables when the rule changes."""
    rule, received = "deny everyone produce judged", Counter[bytes]()
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(connect(bus.address()))
        writers = [stack.enter_context(connect(bus.address())) for _ in range(PUBLISHERS)]
        reader.send(subscribe(b"judged"))
        reader.settle()

        def read() -> None:
            while not received[b"end"]:
                received[reader.messages(1)[0][1]] += 1

        def write(writer: Client, body: list[bytes], stopping: threading.Event) -> None:
            while not stopping.is_set():
                writer.send(publish(b"judged", body[0]) * 20)

        with ThreadPoolExecutor(PUBLISHERS + 1) as pool:
            reading = pool.submit(read)
            for _ in range(ROUNDS):
                body, stopping, passed = [b"allowed"], threading.Event(), received[b"allowed"]
                writing = [pool.submit(write, one, body, stopping) for one in writers]
                try:
                    until(lambda: received[b"allowed"] > passed + 100, "messages")  # noqa: B023
                    ask(bus.admin_path, "acl_add", rule=rule)
                    body[0], denied = b"denied", count(bus, "dropped", "denied")
                    until(lambda: count(bus, "dropped", "denied") > denied + 1000, "denials")  # noqa: B023
                finally:
                    stopping.set()
                for one in writing:
                    one.result()
                for writer in writers:
                    writer.settle()
                ask(bus.admin_path, "acl_rm", rule=rule)
            writers[0].send(publish(b"judged", b"end"))
            reading.result()
    assert received[b"denied"] == 0


@pytest.mark.sabotage("late-messages-uncounted", expects="is neither received nor counted", tries=3)
def test_messages_that_threads_route_to_a_reader_over_its_bound_are_counted():
    """Threads route on until the loop has cut the reader."""
    with rqueue(*THREADS, "--admin", env=QUICK_TO_OVERFLOW) as bus:
        for _ in range(ROUNDS):
            before = stats(bus)
            with connect(bus.address(), receive_buffer=RECEIVE_BUFFER) as reader:
                reader.send(subscribe(b"t"))
                reader.settle()

                def write(_: int) -> None:
                    with connect(bus.address()) as writer:
                        writer.send(publish(b"t", bytes(1500)) * 3000)
                        writer.settle()

                with ThreadPoolExecutor(PUBLISHERS) as pool:
                    list(pool.map(write, range(PUBLISHERS)))
                received = len(reader.to_the_end())
            until(lambda: not connections(bus), "all clients are gone")
            after = stats(bus)
            dropped = sum(
                read_counter(after, "dropped", reason) - read_counter(before, "dropped", reason)
                for reason in ("outbox_overflow", "slow_consumer", "disconnected")
            )
            delivered = read_counter(after, "messages", "delivered")
            delivered -= read_counter(before, "messages", "delivered")
            # The echoes of `settle`, of which the reader's was read before.
            missing = delivered - received - dropped - PUBLISHERS - 1
            assert missing == 0, f"{missing} of {delivered}: is neither received nor counted"
        check_unharmed(bus)
