"""Clients that close or half-close their connection at the worst moment, on a live server.

Requests that were sent are executed, even if the client is gone. Only Gets are not,
because a message that no client can receive must not be consumed.
"""

from __future__ import annotations

import shutil
import signal
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from polybus.testing.bus_process import BusProcess, serve
from tests.faults.freud_live import begin, connect, serving
from tests.rig.freud_client import (
    FOR_EVER,
    NOTHING_HAPPENED,
    NOTICE,
    OK,
    Client,
    count,
    create,
    delete,
    get,
    get_record,
    list_topics,
    names,
    number,
    produce,
    record,
    subscribe,
)
from tests.rig.observer import count as counter
from tests.rig.observer import open_descriptors, until

KIB = 1024
TIMEOUT_S = 1.0  # of abandoned subscriptions and deleted topics
# More than a connection that waits is read from, and more than one read brings.
BEHIND_BYTES = 1024 * KIB
SO_SNDBUFFORCE = 32


@pytest.fixture(scope="module")
def bus() -> Iterator[BusProcess]:
    env = {
        "POLYBUS_FREUD_SUBSCRIBER_TIMEOUT_S": str(TIMEOUT_S),
        "POLYBUS_FREUD_DETACHED_SUBSCRIPTION_S": str(TIMEOUT_S),
    }
    with serving(env=env) as running:
        yield running


def connections(bus: BusProcess) -> int:
    return counter(bus, "connections", "open")


def with_room_to_send(client: Client, size: int) -> None:
    """Enlarge the send buffer, so that `size` bytes can be sent to a server that does not read."""
    client.sock.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, size)


# --- gone while waiting ------------------------------------------------------


@pytest.mark.parametrize("seconds", [FOR_EVER, 60])
def test_client_disconnected_while_waiting_consumes_no_message(
    bus: BusProcess, client: Client, topic: bytes, seconds: int
):
    key = client.subscribe(topic)
    before = connections(bus)
    waiting = connect(bus)
    begin(waiting, get(key, seconds), get(key, seconds))
    waiting.close()
    until(lambda: connections(bus) == before, "it is gone")
    client.send(produce(topic, b"1"), produce(topic, b"2"), get(key), get(key))
    assert client.answers(4)[2:] == [(OK, b"1"), (OK, b"2")]


def test_message_produced_during_a_disconnect_is_not_lost(
    bus: BusProcess, client: Client, topic: bytes
):
    """Before or after the bus notices the disconnect: the race is run many times."""
    key = client.subscribe(topic)
    for at in range(200):
        waiting = connect(bus)
        begin(waiting, get(key, FOR_EVER))
        body = b"%d" % at
        waiting.close()
        client.send(produce(topic, body))
        client.answers(1)
        assert client.ask(get(key, 10)) == (OK, body)


@pytest.mark.parametrize("ending", ["close", "half-close"])
def test_disconnect_ends_a_waiting_get_despite_unread_input(
    bus: BusProcess, client: Client, topic: bytes, ending: str
):
    """The bus notices the end of the stream after more bytes than it reads ahead."""
    key = client.subscribe(topic)
    before = connections(bus)
    waiting = connect(bus)
    with_room_to_send(waiting, 8 * BEHIND_BYTES)
    behind = produce(topic, bytes(1000)) * (BEHIND_BYTES // 1000)
    begin(waiting, get(key, FOR_EVER), behind)
    if ending == "close":
        waiting.close()
    else:
        waiting.shut_down()
        found = waiting.to_the_end()
        assert found[0] == (NOTHING_HAPPENED, b"")
        assert {one.code for one in found[1:]} == {OK}
        assert len(found) == 1 + BEHIND_BYTES // 1000
        waiting.close()
    until(lambda: connections(bus) == before, "it is gone")
    for at in range(BEHIND_BYTES // 1000):
        assert record(client.ask(get_record(key, 10))).id == at
    assert client.ask(get(key)) == (NOTHING_HAPPENED, b"")


# --- gone with answers unsent ------------------------------------------------


def test_messages_in_unsent_answers_become_unread_again(
    bus: BusProcess, client: Client, topic: bytes
):
    """Each message is in the input of the closed client, or the next Get returns it."""
    key = client.subscribe(topic)
    total = 60  # two writes of the bus can hold them all, a socket buffer cannot
    for at in range(total):
        client.ask(produce(topic, struct.pack("<I", at) + bytes(4 * KIB)))
    before = connections(bus)
    stuck, waiting = connect(bus), connect(bus)
    stuck.send(*(get(key) for _ in range(total)))
    until(lambda: stuck.has_answer(0.01), "it is served")
    begin(waiting, *(get(key, FOR_EVER) for _ in range(total)))
    assert not waiting.has_answer(within_s=0.1)  # all are in flight to the other client
    stuck.sock.shutdown(socket.SHUT_RDWR)
    read = [struct.unpack_from("<I", one.payload)[0] for one in stuck.to_the_end()]
    assert read == list(range(len(read)))
    assert 0 < len(read) < total
    found = waiting.answers(total - len(read))
    rest = [struct.unpack_from("<I", one.payload)[0] for one in found]
    assert rest == list(range(len(read), total))
    stuck.close()
    waiting.close()
    until(lambda: connections(bus) == before, "both are gone")


def test_unsent_deletion_notice_becomes_unread_again(bus: BusProcess, client: Client, topic: bytes):
    key = client.subscribe(topic)
    other = client.subscribe(topic)
    big = bytes(4096 * KIB)  # more than a socket and one read of the client hold
    client.send(produce(topic, big), delete(topic))
    assert [one.code for one in client.answers(2)] == [OK, OK]
    stuck = connect(bus)
    stuck.send(list_topics(), get(key), get_record(key))
    stuck.answers(1)  # it has been read from, and the rest does not fit into its socket
    open_before = counter(bus, "connections", "open")
    stuck.close()
    until(lambda: counter(bus, "connections", "open") < open_before, "the bus has noticed")
    assert client.ask(get(key, 10)).payload == big
    assert client.ask(get(key)) == (OK, NOTICE + topic)
    assert client.ask(get(other)) == (OK, big)


# --- gone after having asked -------------------------------------------------


def test_requests_sent_before_a_disconnect_are_executed(
    bus: BusProcess, client: Client, topic: bytes
):
    """For any number of requests: not even the first answer can be sent."""
    key = client.subscribe(topic)
    total = 2000
    gone = connect(bus)
    with_room_to_send(gone, 16 * 1024 * KIB)
    bus.signal(signal.SIGSTOP)  # so that all requests are in flight when it closes
    try:
        gone.send(
            create(topic + b"!"),
            *(produce(topic, struct.pack("<I", at) + bytes(KIB)) for at in range(total)),
            delete(topic),
        )
        gone.close()
    finally:
        bus.signal(signal.SIGCONT)
    for at in range(total):
        assert client.ask(get(key, 10)).payload[:4] == struct.pack("<I", at)
    assert client.ask(get(key, 10)) == (OK, NOTICE + topic)
    assert topic + b"!" in names(client.ask(list_topics()))


def test_gets_of_a_disconnected_client_consume_no_message(
    bus: BusProcess, client: Client, topic: bytes
):
    key = client.subscribe(topic)
    client.send(*(produce(topic, b"%d" % at) for at in range(100)))
    client.answers(100)
    before = connections(bus)
    for _ in range(20):
        gone = connect(bus)
        bus.signal(signal.SIGSTOP)
        try:
            gone.send(*(get(key) for _ in range(50)))
            gone.close()
        finally:
            bus.signal(signal.SIGCONT)
    until(lambda: connections(bus) == before, "all are gone")
    client.send(*(get(key) for _ in range(101)))
    found = client.answers(101)
    assert [one.payload for one in found] == [b"%d" % at for at in range(100)] + [b""]


# --- half-closed -------------------------------------------------------------


def test_half_closed_connection_gets_all_answers(client: Client, bus: BusProcess):
    with connect(bus) as half:
        half.send(create(b"half"), subscribe(b"half"), *(produce(b"half", b"x") for _ in range(99)))
        half.shut_down()
        found = half.to_the_end()
        assert [one.code for one in found] == [OK] * 101
        assert [number(one) for one in found[2:]] == list(range(99))
    assert client.ask(delete(b"half")).code == OK  # by the same user and program


def test_half_close_ends_waiting_gets_like_a_timeout(bus: BusProcess, client: Client, topic: bytes):
    key = client.subscribe(topic)
    with connect(bus) as half:
        begin(half, get(key, FOR_EVER), produce(topic, b"x"), get(key, 30), get(key, 30))
        half.shut_down()
        found = half.to_the_end()
        expected = [(NOTHING_HAPPENED, b""), (OK, bytes(8)), (OK, b"x"), (NOTHING_HAPPENED, b"")]
        assert found == expected


def test_half_closed_connection_gets_its_malformed_answer_in_order(
    bus: BusProcess, client: Client, topic: bytes
):
    key = client.subscribe(topic)
    with connect(bus) as half:
        begin(half, get(key, FOR_EVER), struct.pack("<II", 0, 2**31))
        half.shut_down()
        assert [one.code for one in half.to_the_end()] == [NOTHING_HAPPENED, 4]


def test_half_closed_slow_reader_gets_all_answers(bus: BusProcess, client: Client, topic: bytes):
    """Answers that do not fit the socket are sent later, and the close waits for them."""
    key = client.subscribe(topic)
    total = 600
    client.send(*(produce(topic, bytes(4 * KIB)) for _ in range(total)))
    client.answers(total)
    with connect(bus) as half:
        half.send(*(get(key) for _ in range(total + 1)))
        half.shut_down()
        assert client.ask(count(topic)).code == OK
        found = half.to_the_end()
        assert [one.code for one in found] == [OK] * total + [NOTHING_HAPPENED]


# --- subscriptions of closed connections -------------------------------------


def test_another_connection_can_use_a_subscription_until_its_timeout(
    bus: BusProcess, client: Client, topic: bytes
):
    with connect(bus) as owner:
        key = owner.subscribe(topic)
        client.ask(produce(topic, b"left"))
    with connect(bus) as other:
        assert other.ask(get(key)) == (OK, b"left")
        # It is attached to the connection, for longer than the timeout.
        assert other.ask(get(key, int(TIMEOUT_S) + 1)) == (NOTHING_HAPPENED, b"")
        assert client.ask(produce(topic, b"still")).code == OK
        assert other.ask(get(key)) == (OK, b"still")
    lost = counter(bus, "dropped", "abandoned")
    client.ask(produce(topic, b"unread"))
    until(lambda: number(client.ask(count(topic))) == 0, "it is reaped")
    assert counter(bus, "dropped", "abandoned") == lost + 1
    assert client.ask(get(key)).code == 3


def test_deleted_topic_is_removed_after_its_timeout_despite_unread_notices(
    bus: BusProcess, client: Client, topic: bytes
):
    lost = counter(bus, "dropped", "deletion_timeout")
    key = client.subscribe(topic)
    client.send(produce(topic, b"1"), produce(topic, b"2"), delete(topic), create(topic))
    client.send(produce(topic, b"new"))
    client.answers(5)
    new = client.subscribe(topic)
    assert client.ask(get(new, 10)) == (OK, b"new")
    assert counter(bus, "dropped", "deletion_timeout") == lost + 2
    assert client.ask(get(key)).code == 3


def test_closed_connections_leave_no_open_descriptor(bus: BusProcess, client: Client):
    def connect_and_close(times: int) -> None:
        for at in range(times):
            one = connect(bus)
            one.send(list_topics(), create(b"here")[: at % 12])
            one.answers(1)
            one.close()

    there = connections(bus)
    connect_and_close(20)
    until(lambda: connections(bus) == there, "all are gone")
    before = open_descriptors(bus.pid)
    connect_and_close(200)
    until(lambda: connections(bus) == there, "all are gone")
    # The question about connections is one itself: the bus may still be closing it.
    until(lambda: open_descriptors(bus.pid) <= before, "their descriptors are closed")


def test_stop_closes_waiting_connections_without_an_answer():
    folder = Path(tempfile.mkdtemp(prefix="pb-f-", dir="/tmp"))
    with (
        serve(listen=[f"freud=unix:{folder}/freud.sock"], folder=folder) as bus,
        connect(bus) as waiting,
    ):
        waiting.send(create(b"t"), subscribe(b"t"))
        key = waiting.answers(2)[1].payload
        begin(waiting, get(key, FOR_EVER), list_topics())
        assert bus.stop() == 0
        assert waiting.to_the_end() == []
    shutil.rmtree(folder)
