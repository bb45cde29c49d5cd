"""Clients that do not take their answers, and readers that do not read. On a live server.

A client that never reads its answers holds a bounded amount of memory, and is cut. A
subscription without a reader fills up to its user's quota. Then a Freud producer gets an
error. An rqueue publisher gets no answer and does not wait; the bus drops its message and
counts it.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from polybus.testing.bus_process import BusProcess
from tests.faults.freud_live import begin, connect, serving
from tests.rig import rqueue_client
from tests.rig.freud_client import (
    FOR_EVER,
    OK,
    SERVER_ERROR,
    Client,
    create,
    get,
    list_topics,
    number,
    produce,
    subscribe,
    unsubscribe,
)
from tests.rig.observer import connections, log_lines, rss_bytes, until
from tests.rig.observer import count as counter

KIB, MIB = 1 << 10, 1 << 20
MARK = 256 * KIB
QUOTA = 4 * MIB
FLOODS = 4
GETS_PER_STEP = 64
TIMEOUT_S = 1.0
CUT = {"event": "connection cut", "dialect": "freud", "reason": "slow_consumer"}
ENV = {
    "POLYBUS_LIMITS_OUTBOX_HIGH_WATER_BYTES": str(MARK),
    "POLYBUS_LIMITS_SLOW_CONSUMER_TIMEOUT_S": str(TIMEOUT_S),
    "POLYBUS_QUOTAS_QUOTA_BYTES": str(QUOTA),
    "POLYBUS_FREUD_MAX_UNREAD_MESSAGES": "10000",
}


@pytest.fixture(scope="module")
def bus() -> Iterator[BusProcess]:
    with serving(env=ENV) as running:
        yield running


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def send_until_it_breaks(client: Client, data: bytes) -> None:
    try:
        while True:
            client.sock.sendall(data)
    except OSError:
        pass


# --- unread answers -----------------------------------------------------------


def test_client_that_never_reads_is_disconnected_in_bounded_memory(bus: BusProcess, client: Client):
    cut = counter(bus, "connections", "closed", "slow_consumer")
    lines = len(log_lines(bus, **CUT))
    floods = [connect(bus) for _ in range(FLOODS)]
    before = rss_bytes(bus.pid)
    threads = [
        in_background(lambda one=one: send_until_it_breaks(one, list_topics() * 4096))  # type: ignore[misc]
        for one in floods
    ]
    while counter(bus, "connections", "closed", "slow_consumer") < cut + FLOODS:
        assert rss_bytes(bus.pid) - before < FLOODS * 2 * MIB
        assert client.ask(list_topics()).code == OK  # other connections are not delayed
    for thread, one in zip(threads, floods, strict=True):
        thread.join()
        one.close()
    until(lambda: len(log_lines(bus, **CUT)) == lines + FLOODS, "each has its line")


def test_slow_client_above_the_minimum_rate_is_not_disconnected(
    bus: BusProcess, client: Client, topic: bytes
):
    """It reads well above the minimum rate, but always has unread answers."""
    total = 3000
    key = client.subscribe(topic)
    client.send(*(produce(topic, bytes(KIB)) for _ in range(total)))
    client.answers(total)
    cut = counter(bus, "connections", "closed", "slow_consumer")
    with connect(bus) as slow:
        slow.send(*(get(key) for _ in range(total)))
        pace = total / (2 * TIMEOUT_S)  # messages a second
        start = time.monotonic()
        for at in range(total):
            while at > pace * (time.monotonic() - start):
                time.sleep(0.005)
            assert slow.answers(1)[0] == (OK, bytes(KIB))
    assert counter(bus, "connections", "closed", "slow_consumer") == cut


def test_disconnected_slow_client_consumed_only_messages_in_its_socket(
    bus: BusProcess, client: Client, topic: bytes
):
    key = client.subscribe(topic)
    total = 900
    client.send(*(produce(topic, struct.pack("<I", at) + bytes(4 * KIB)) for at in range(total)))
    client.answers(total)
    cut = counter(bus, "connections", "closed", "slow_consumer")
    with connect(bus) as stuck:
        stuck.send(*(get(key) for _ in range(total)))
        until(
            lambda: counter(bus, "connections", "closed", "slow_consumer") == cut + 1, "it is cut"
        )
        had = [struct.unpack_from("<I", one.payload)[0] for one in stuck.to_the_end()]
    client.send(*(get(key) for _ in range(total - len(had))))
    rest = [struct.unpack_from("<I", one.payload)[0] for one in client.answers(total - len(had))]
    assert had + rest == list(range(total))
    assert client.ask(unsubscribe(key)).code == OK


def test_memory_stays_flat_while_a_client_sends_behind_a_waiting_get(
    bus: BusProcess, client: Client, topic: bytes
):
    key = client.subscribe(topic)
    before, there = rss_bytes(bus.pid), len(connections(bus))
    waiting = [connect(bus) for _ in range(FLOODS)]
    for one in waiting:
        begin(one, get(key, FOR_EVER))
    threads = [
        in_background(lambda one=one: send_until_it_breaks(one, create(b"behind") * 4096))  # type: ignore[misc]
        for one in waiting
    ]
    until(lambda: all(not can_send(one) for one in waiting), "nothing more goes in")
    assert rss_bytes(bus.pid) - before < FLOODS * MIB
    for one, thread in zip(waiting, threads, strict=True):
        one.sock.shutdown(socket.SHUT_RDWR)
        thread.join()
        one.close()
    until(lambda: len(connections(bus)) <= there, "all are gone")


def can_send(client: Client) -> bool:
    return bool(select.select([], [client.sock], [], 0)[1])


# --- unread subscriptions -----------------------------------------------------


def test_produce_fails_exactly_when_a_reader_is_full(client: Client, topic: bytes):
    key = client.subscribe(topic)
    size = 64 * KIB
    fitting = QUOTA // size
    client.send(*(produce(topic, bytes(size)) for _ in range(fitting + 5)))
    found = client.answers(fitting + 5)
    assert [number(one) for one in found[:fitting]] == list(range(fitting))
    assert set(found[fitting:]) == {(SERVER_ERROR, b"quota_bytes")}
    assert client.ask(produce(topic, b"")).code == OK  # an empty message needs no quota
    assert client.ask(produce(topic, b"x")) == (SERVER_ERROR, b"quota_bytes")
    assert client.ask(get(key)) == (OK, bytes(size))
    assert client.ask(produce(topic, bytes(size))).code == OK
    assert client.ask(produce(topic, b"x")) == (SERVER_ERROR, b"quota_bytes")
    client.ask(unsubscribe(key))


def test_pipelined_batch_is_accepted_as_far_as_it_fits(client: Client, topic: bytes):
    """As if each was sent alone: a smaller message after a rejected one is accepted."""
    key = client.subscribe(topic)
    client.send(produce(topic, bytes(QUOTA - 1000)))
    assert client.answers(1)[0].code == OK
    sizes = [400, 700, 500, 200, 100, 101, 1, 0]
    client.send(*(produce(topic, bytes(size)) for size in sizes))
    taken = [one.code == OK for one in client.answers(len(sizes))]
    assert taken == [True, False, True, False, True, False, False, True]
    client.ask(unsubscribe(key))


def test_unread_empty_messages_are_bounded(client: Client, topic: bytes):
    key = client.subscribe(topic)
    client.send(produce(topic) * 10_003)
    found = client.answers(10_003)
    assert [one.code for one in found] == [OK] * 10_000 + [SERVER_ERROR] * 3
    assert found[-1].payload == b"max_unread_messages"
    client.ask(unsubscribe(key))


def count_unread(client: Client, key: bytes) -> int:
    """Read all messages of a subscription, and return their number.

    The answers to GETS_PER_STEP Gets of 1000 bytes fit into the socket, so the bus never waits for
    this client, and cannot cut it, however slowly it runs.
    """
    count = 0
    while True:
        client.send(get(key) * GETS_PER_STEP)
        found = sum(one.code == OK for one in client.answers(GETS_PER_STEP))
        count += found
        if found < GETS_PER_STEP:
            return count


@pytest.mark.parametrize("readers", [1, 3])
def test_full_freud_reader_never_blocks_an_rqueue_publisher(
    bus: BusProcess, client: Client, topic: bytes, readers: int
):
    keys = [client.subscribe(topic) for _ in range(readers)]
    size, total = 1000, 12_000
    before = counter(bus, "dropped", "quota_bytes")
    with rqueue_client.connect(bus.address("rqueue")) as writer:
        writer.send(b"".join(rqueue_client.publish(topic, bytes(size)) for _ in range(total)))
        writer.settle()  # all of it has been taken, and nothing waits
        dropped = counter(bus, "dropped", "quota_bytes") - before
        assert counter(bus, "connections", "waiting") == 0
    kept = sum(count_unread(client, key) for key in keys)
    assert kept == QUOTA // size
    assert kept + dropped == readers * total
    for key in keys:
        client.ask(unsubscribe(key))
    until(lambda: log_lines(bus, event="quota reached", quota="quota_bytes"), "it is said")


def test_full_rqueue_reader_blocks_a_freud_producer_until_disconnected(
    bus: BusProcess, client: Client, topic: bytes
):
    key = client.subscribe(topic)
    with rqueue_client.connect(bus.address("rqueue")) as stuck, connect(bus) as producer:
        stuck.send(rqueue_client.subscribe(topic))
        stuck.settle()
        total, size = 16, 512 * KIB
        for message_id in range(total):  # one by one: the Freud reader is never full
            assert number(producer.ask(produce(topic, bytes(size)))) == message_id
            assert client.ask(get(key, 10)) == (OK, bytes(size))
        until(lambda: log_lines(bus, event="connection cut", peer=stuck.name), "it was cut")
        assert counter(bus, "connections", "waiting") == 0
    client.ask(unsubscribe(key))


def test_blocked_freud_producer_that_hangs_up_is_removed(
    bus: BusProcess, client: Client, topic: bytes
):
    with rqueue_client.connect(bus.address("rqueue")) as stuck:
        stuck.send(rqueue_client.subscribe(topic))
        stuck.settle()
        producer = connect(bus)
        thread = in_background(
            lambda: send_until_it_breaks(producer, produce(topic, bytes(64 * KIB)))
        )
        until(lambda: counter(bus, "connections", "waiting") == 1, "it waits")
        producer.sock.shutdown(socket.SHUT_RDWR)
        thread.join()
        producer.close()
        until(lambda: counter(bus, "connections", "waiting") == 0, "no connection waits")
        assert client.ask(subscribe(topic)).code == OK
