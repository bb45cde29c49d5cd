"""Live servers under floods of valid frames, connections and subscriptions."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from polybus.testing.bus_process import BusProcess, rqueue, serve
from tests.rig.byte_feeder import drip, one_by_one
from tests.rig.observer import (
    check_unharmed,
    count,
    log_lines,
    open_descriptors,
    rss_bytes,
    stats,
    until,
)
from tests.rig.rqueue_client import (
    Client,
    connect,
    deregister,
    notification,
    publish,
    remove,
    subscribe,
)

MIB = 1 << 20
EVERY_LINE = {"POLYBUS_LOG_FORMAT": "json", "POLYBUS_LOG_MAX_REPEATS_PER_S": "10000"}


@pytest.fixture(scope="module")
def bus() -> Iterator[BusProcess]:
    with serve(env=EVERY_LINE) as running:
        yield running
        check_unharmed(running)


def echoes(client: Client) -> bool:
    """Return whether a probe of this client comes back."""
    return client.settle() == []


@contextmanager
def many(bus: BusProcess, number: int) -> Iterator[list[Client]]:
    with ExitStack() as stack:
        yield [stack.enter_context(connect(bus.address())) for _ in range(number)]


def in_background(client: Client, data: bytes) -> threading.Thread:
    thread = threading.Thread(target=client.sock.sendall, args=(data,), daemon=True)
    thread.start()
    return thread


# --- little by little --------------------------------------------------------


def test_frames_sent_one_byte_at_a_time_are_executed(bus: BusProcess):
    with connect(bus.address()) as client:
        stream = subscribe(b"drip") + publish(b"drip", b"1") + publish(b"drip", b"")
        stream += remove(b"drip") + publish(b"drip", b"unheard") + subscribe(b"drip")
        stream += publish(b"drip", bytes(range(256))) + deregister() + publish(b"drip", b"no")
        assert drip(client.sock, one_by_one(stream)) == len(stream)
        assert client.messages(3) == [(b"drip", b"1"), (b"drip", b""), (b"drip", bytes(range(256)))]
        assert echoes(client)


def test_incomplete_frames_use_little_memory_and_affect_no_other(bus: BusProcess):
    whole = publish(b"half", bytes(2000))
    half = len(whole) // 2
    with connect(bus.address()) as reader:
        reader.send(subscribe(b"half"))
        assert echoes(reader)
        before = rss_bytes(bus.pid)
        with many(bus, 300) as silent:
            for client in silent:
                client.send(whole[:half])
            assert echoes(reader)
            until(lambda: count(bus, "connections", "open") == 301, "all are there, and stay")
            assert rss_bytes(bus.pid) - before < 10 * MIB
            for client in silent:  # and all of them may still finish
                client.send(whole[half:])
            assert reader.raw(300 * len(notification(b"half", bytes(2000))))
            assert echoes(reader)
    until(lambda: count(bus, "connections", "open") == 0, "all are gone")


@pytest.mark.parametrize("left", range(1, 12))
def test_input_that_ends_inside_a_frame_drops_that_frame_only(bus: BusProcess, left: int):
    topic = b"eof%d" % left
    with connect(bus.address()) as reader, connect(bus.address()) as writer:
        reader.send(subscribe(topic))
        assert echoes(reader)
        whole = publish(topic, b"whole")
        writer.send(whole + whole[:left])
        writer.sock.shutdown(socket.SHUT_WR)
        assert writer.to_the_end() == []
        assert reader.messages(1) == [(topic, b"whole")]
        assert echoes(reader)
        assert log_lines(bus, peer=writer.name) == []


def test_half_closed_peer_gets_its_pending_messages(bus: BusProcess):
    with connect(bus.address()) as client:
        client.send(subscribe(b"owed"), *(publish(b"owed", b"%d" % at) for at in range(1000)))
        client.sock.shutdown(socket.SHUT_WR)
        expected = b"".join(notification(b"owed", b"%d" % at) for at in range(1000))
        assert client.raw(len(expected)) == expected
        assert client.to_the_end() == []


def test_reset_inside_a_frame_closes_only_its_connection(bus: BusProcess):
    with connect(bus.address()) as reader:
        reader.send(subscribe(b"rst"))
        assert echoes(reader)
        for _ in range(50):
            client = connect(bus.address())
            client.send(subscribe(b"rst"), publish(b"rst", b"x"), publish(b"rst", b"half")[:9])
            client.reset()
        until(lambda: count(bus, "connections", "open") == 1, "all are gone")
        assert all(one == (b"rst", b"x") for one in reader.messages(1))


def test_pending_messages_of_a_reset_reader_are_counted_as_dropped(bus: BusProcess):
    lost = count(bus, "dropped", "disconnected")
    with connect(bus.address(), receive_buffer=4096) as reader, connect(bus.address()) as writer:
        reader.send(subscribe(b"owed"))
        assert echoes(reader)
        sending = in_background(writer, publish(b"owed", bytes(1000)) * 9000)
        until(lambda: count(bus, "connections", "waiting") == 1, "it is full")
        reader.reset()
        sending.join()
        assert echoes(writer)
    # Over 4 MiB were held for it, a thousand bytes each.
    assert count(bus, "dropped", "disconnected") - lost > 4000


# --- a lot at once -----------------------------------------------------------


def test_a_million_tiny_frames_are_delivered(bus: BusProcess):
    million = 1_000_000
    with connect(bus.address()) as reader, connect(bus.address()) as writer:
        reader.send(subscribe(b"t"))
        assert echoes(reader)
        received = count(bus, "messages", "received")
        sending = in_background(writer, publish(b"t") * million)
        one = notification(b"t")
        assert reader.raw(million * len(one)) == one * million
        sending.join()
        assert echoes(reader)
        assert count(bus, "messages", "received") == received + million + 1


def test_flood_of_control_frames_leaves_no_state_behind(bus: BusProcess):
    before = rss_bytes(bus.pid)
    with connect(bus.address()) as client, connect(bus.address()) as bystander:
        client.send(*(subscribe(b"%d" % at) + remove(b"%d" % at) for at in range(50_000)))
        client.send(*(subscribe(b"%d" % at) for at in range(5_000)), deregister() * 20_000)
        assert echoes(bystander)
        assert echoes(client)
        assert count(bus, "topics") == 0
        assert count(bus, "subscriptions") == 0
    assert rss_bytes(bus.pid) - before < 10 * MIB


def test_topics_without_subscribers_use_no_memory(bus: BusProcess):
    """A table that kept every published name could be filled by any client."""
    with connect(bus.address()) as client:
        client.send(*(publish(b"warm up %d" % at) for at in range(10_000)))
        assert echoes(client)
        before = rss_bytes(bus.pid)
        client.send(*(publish(b"unheard %d" % at) for at in range(300_000)))
        assert echoes(client)
        assert rss_bytes(bus.pid) - before < 4 * MIB
        assert count(bus, "topics") == 0


# --- connections that come and go --------------------------------------------


@pytest.mark.parametrize("goodbye", ["close", "reset", "half a frame", "subscribed"])
def test_flood_of_connects_leaves_no_open_descriptor(bus: BusProcess, goodbye: str):
    with connect(bus.address()) as first:
        assert echoes(first)  # the bus opens some descriptors at the first connection
    until(lambda: count(bus, "connections", "open") == 0, "no connection is open")
    before = open_descriptors(bus.pid)
    accepted = count(bus, "connections", "accepted")
    with connect(bus.address()) as bystander:
        assert echoes(bystander)
        for _ in range(1000):
            connect_and_close(bus, goodbye)
        assert echoes(bystander)
    until(lambda: count(bus, "connections", "accepted") == accepted + 1001, "all have come")
    until(lambda: count(bus, "connections", "open") == 0, "and gone")
    until(lambda: open_descriptors(bus.pid) <= before, "and so are their descriptors")
    assert count(bus, "topics") == 0


def connect_and_close(bus: BusProcess, goodbye: str) -> None:
    client = connect(bus.address())
    if goodbye == "half a frame":
        client.send(publish(b"t", b"content")[:8])
    elif goodbye == "subscribed":
        client.send(subscribe(b"t") + subscribe(b"u"))
    if goodbye == "reset":
        client.reset()
    else:
        client.close()


def test_many_simultaneous_clients_are_served(bus: BusProcess):
    """All connected at once, each with its topic, each served."""
    with many(bus, 400) as clients:
        for at, client in enumerate(clients):
            client.send(subscribe(b"own %d" % at))
        assert all(echoes(client) for client in clients)
        for at, client in enumerate(clients):
            client.send(publish(b"own %d" % ((at + 1) % len(clients)), b"%d" % at))
        for at, client in enumerate(clients):
            sender = (at - 1) % len(clients)
            assert client.messages(1) == [(b"own %d" % at, b"%d" % sender)]
    until(lambda: count(bus, "connections", "open") == 0, "all are gone")


# --- limits ------------------------------------------------------------------

SMALL = EVERY_LINE | {
    "POLYBUS_LIMITS_MAX_CONNECTIONS": "5",
    "POLYBUS_LIMITS_MAX_TOPICS": "6",
    "POLYBUS_LIMITS_MAX_SUBSCRIPTIONS_PER_CONNECTION": "4",
}


@pytest.fixture(scope="module")
def small() -> Iterator[BusProcess]:
    with rqueue("--admin", env=SMALL) as running:
        yield running
        check_unharmed(running)


def closed_for(bus: BusProcess, client: Client, reason: str) -> bool:
    assert client.to_the_end() == []
    until(lambda: log_lines(bus, peer=client.name, reason=reason), f"a line with {reason}")
    return len(log_lines(bus, peer=client.name)) == 1


def test_connection_over_the_limit_is_closed(small: BusProcess):
    until(lambda: count(small, "connections", "open") == 0, "all places are free")
    with many(small, 5) as clients:
        assert all(echoes(client) for client in clients)
        refused = count(small, "refused", "max_connections")
        for number in range(1, 20):
            with connect(small.address()) as one_too_many:
                assert closed_for(small, one_too_many, "max_connections")
            assert count(small, "refused", "max_connections") == refused + number
        assert all(echoes(client) for client in clients)
        clients.pop().close()
        until(lambda: count(small, "connections", "open") == 4, "a place is free")
        with connect(small.address()) as next_one:
            assert echoes(next_one)


def test_subscription_over_the_limit_closes_the_connection(small: BusProcess):
    until(lambda: count(small, "connections", "open") == 0, "all places are free")
    with connect(small.address()) as client, connect(small.address()) as bystander:
        client.send(*(subscribe(b"%d" % at) for at in range(4)), subscribe(b"0"))
        assert echoes(client)  # probe topics do not count as subscriptions
        bystander.send(subscribe(b"0"))
        assert echoes(bystander)
        client.send(subscribe(b"4"), publish(b"0", b"too late"))
        assert closed_for(small, client, "max_subscriptions_per_connection")
        assert count(small, "connections", "closed", "max_subscriptions_per_connection") == 1
        assert echoes(bystander)
        assert count(small, "subscriptions") == 1


def test_topic_over_the_limit_closes_the_connection(small: BusProcess):
    until(lambda: count(small, "connections", "open") == 0, "all places are free")
    with many(small, 3) as (first, second, third):
        first.send(*(subscribe(b"%d" % at) for at in range(4)))
        second.send(*(subscribe(b"%d" % at) for at in range(2, 6)))
        assert echoes(first)
        assert echoes(second)
        assert count(small, "topics") == 6
        third.send(subscribe(b"5"))  # one that is there already
        assert echoes(third)
        third.send(subscribe(b"6"))
        assert closed_for(small, third, "max_topics")
        assert count(small, "connections", "closed", "max_topics") == 1
        assert echoes(first)


def test_rejected_connections_cannot_fill_the_log():
    env = {**SMALL, "POLYBUS_LOG_MAX_REPEATS_PER_S": "3"}
    with serve(env=env) as bus, many(bus, 5) as clients:
        assert all(echoes(client) for client in clients)
        for _ in range(500):
            with connect(bus.address()) as one_too_many:
                assert one_too_many.to_the_end() == []
        assert count(bus, "refused", "max_connections") == 500
        assert all(echoes(client) for client in clients)
        assert len(log_lines(bus, event="connection refused")) < 100
        check_unharmed(bus)
        assert stats(bus)["server"]["log_lines_lost"] == 0
