"""Readers that are slow, and readers that do not read at all.

The rule: a publisher to a full reader waits, so nothing is lost and memory stays
bounded; a reader that stays full and reads almost nothing is cut, and the others continue.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from polybus.testing.bus_process import BusProcess, rqueue, serve
from tests.rig.observer import check_unharmed, connections, count, log_lines, rss_bytes, until
from tests.rig.rqueue_client import Client, connect, frame, notification, publish, subscribe

MIB = 1 << 20
MARK = 256 * 1024
TIMEOUT_S = 0.75
RATE = 16 * 1024
QUICK_TO_CUT = {
    "POLYBUS_LOG_FORMAT": "json",
    "POLYBUS_LIMITS_OUTBOX_HIGH_WATER_BYTES": str(MARK),
    "POLYBUS_LIMITS_SLOW_CONSUMER_TIMEOUT_S": str(TIMEOUT_S),
    "POLYBUS_LIMITS_SLOW_CONSUMER_MIN_BYTES_PER_S": str(RATE),
}
# Of readers that shall be full: fixed, or the host might let it grow until all fits.
RECEIVE_BUFFER = 64 * 1024
# Enough to fill the queues of the host (some 6 MiB) and the outbox.
COUNT = 20_000
SIZE = 1000


def message(at: int) -> bytes:
    return b"%08d" % at + bytes(SIZE - 8)


def stream(topic: bytes, numbers: range) -> bytes:
    return b"".join(publish(topic, message(at)) for at in numbers)


def expected(topic: bytes, numbers: range) -> bytes:
    return b"".join(notification(topic, message(at)) for at in numbers)


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def sending(client: Client, data: bytes) -> threading.Thread:
    return in_background(lambda: client.sock.sendall(data))


def state(bus: BusProcess, client: Client) -> str | None:
    return next((str(one["state"]) for one in connections(bus) if one["peer"] == client.name), None)


@pytest.fixture(scope="module")
def bus() -> Iterator[BusProcess]:
    with rqueue("--admin", env=QUICK_TO_CUT) as running:
        yield running
        check_unharmed(running)


@pytest.fixture(scope="module")
def patient() -> Iterator[BusProcess]:
    """A bus that disconnects no slow reader during a test."""
    env = QUICK_TO_CUT | {"POLYBUS_LIMITS_SLOW_CONSUMER_TIMEOUT_S": "600"}
    with serve(env=env) as running:
        yield running
        check_unharmed(running)


# --- held back ---------------------------------------------------------------


def test_publishers_wait_for_a_full_reader_without_loss(patient: BusProcess):
    with (
        connect(patient.address(), receive_buffer=RECEIVE_BUFFER) as reader,
        connect(patient.address()) as writer,
        connect(patient.address()) as other,
    ):
        reader.send(subscribe(b"t"))
        reader.settle()
        numbers = range(COUNT)
        thread = sending(writer, stream(b"t", numbers))
        until(lambda: state(patient, writer) == "waiting", "the publisher waits")
        assert state(patient, reader) == "full"
        assert state(patient, other) == "open"
        other.send(subscribe(b"u"))
        other.settle()  # publishers to other topics are served
        assert reader.raw(len(expected(b"t", numbers))) == expected(b"t", numbers)
        thread.join()
        assert state(patient, reader) == "open"
        assert count(patient, "dropped", "slow_consumer") == 0


def test_memory_stays_flat_while_many_publishers_wait(patient: BusProcess):
    """Each publisher may leave one buffer in the bus, and no more."""
    with connect(patient.address(), receive_buffer=RECEIVE_BUFFER) as reader:
        reader.send(subscribe(b"flat"))
        reader.settle()
        before = rss_bytes(patient.pid)
        writers = [connect(patient.address()) for _ in range(20)]
        threads = [sending(one, stream(b"flat", range(8000))) for one in writers]
        until(lambda: count(patient, "connections", "waiting") == 20, "all of them wait")
        held = next(one for one in connections(patient) if one["peer"] == reader.name)
        assert held["outbox_bytes"] < 4 * MARK
        assert rss_bytes(patient.pid) - before < 20 * 0.75 * MIB
        seen = [0] * 8000
        for _ in range(20 * 8000 // 100):
            for _, content in reader.messages(100):
                seen[int(content[:8])] += 1
        assert seen == [20] * 8000
        for thread, writer in zip(threads, writers, strict=True):
            thread.join()
            writer.close()


def test_waiting_publisher_that_hangs_up_is_removed(patient: BusProcess):
    with (
        connect(patient.address(), receive_buffer=RECEIVE_BUFFER) as reader,
        connect(patient.address()) as healthy,
    ):
        reader.send(subscribe(b"gone"))
        reader.settle()
        before = count(patient, "messages", "received")
        writer = connect(patient.address())
        thread = in_background(lambda: send_until_it_breaks(writer, stream(b"gone", range(100))))
        until(lambda: state(patient, writer) == "waiting", "the publisher waits")
        name = writer.name
        writer.sock.shutdown(socket.SHUT_RDWR)
        thread.join()
        writer.close()
        received = count(patient, "messages", "received") - before
        drained = in_background(reader.to_the_end)
        until(
            lambda: name not in {one["peer"] for one in connections(patient)},
            "it is gone once the reader has read",
        )
        assert count(patient, "messages", "received") - before >= received
        healthy.settle()
        reader.sock.shutdown(socket.SHUT_RDWR)
        drained.join()
        assert count(patient, "connections", "waiting") == 0


def send_until_it_breaks(client: Client, data: bytes) -> None:
    try:
        while True:
            client.sock.sendall(data)
    except OSError:
        pass


def test_bad_frame_of_a_waiting_publisher_closes_it_after_the_wait(patient: BusProcess):
    with (
        connect(patient.address(), receive_buffer=RECEIVE_BUFFER) as reader,
        connect(patient.address()) as writer,
    ):
        reader.send(subscribe(b"bad"))
        reader.settle()
        numbers = range(COUNT)
        thread = sending(writer, stream(b"bad", numbers) + frame(99))
        until(lambda: state(patient, writer) == "waiting", "the publisher waits")
        assert reader.raw(len(expected(b"bad", numbers))) == expected(b"bad", numbers)
        thread.join()
        assert writer.to_the_end() == []
        until(lambda: log_lines(patient, peer=writer.name, reason="unknown_type"), "it is closed")


# --- cut ---------------------------------------------------------------------


def test_reader_that_never_reads_is_disconnected_and_others_continue(bus: BusProcess):
    cut = count(bus, "connections", "closed", "slow_consumer")
    lost = count(bus, "dropped", "slow_consumer")
    with (
        connect(bus.address(), receive_buffer=RECEIVE_BUFFER) as stuck,
        connect(bus.address()) as healthy,
        connect(bus.address()) as writer,
    ):
        for one in (stuck, healthy):
            one.send(subscribe(b"t"))
            one.settle()
        before = rss_bytes(bus.pid)
        numbers = range(COUNT)
        thread = sending(writer, stream(b"t", numbers))
        assert healthy.raw(len(expected(b"t", numbers))) == expected(b"t", numbers)
        thread.join()
        assert count(bus, "connections", "closed", "slow_consumer") == cut + 1
        lost = count(bus, "dropped", "slow_consumer") - lost
        cut_line = {"event": "connection cut", "reason": "slow_consumer", "messages_lost": lost}
        until(lambda: log_lines(bus, **cut_line, peer=stuck.name), "it is said in the log")
        # Lost messages were in the outbox, which was at its mark plus at most one buffer.
        assert MARK / (SIZE + 7) - 1 < lost < (MARK + 512 * 1024) / (SIZE + 7)
        assert rss_bytes(bus.pid) - before < 8 * MIB
        writer.send(publish(b"t", b"go on"))
        assert healthy.messages(1) == [(b"t", b"go on")]
        got = stuck.to_the_end()  # the kernel's buffers: whole and in order
        assert [int(payload[2:10]) for _, payload in got] == list(range(len(got)))


def test_client_that_publishes_to_itself_without_reading_is_disconnected(bus: BusProcess):
    cut = count(bus, "connections", "closed", "slow_consumer")
    with (
        connect(bus.address(), receive_buffer=RECEIVE_BUFFER) as client,
        connect(bus.address()) as bystander,
    ):
        client.send(subscribe(b"self"))
        client.settle()
        in_background(lambda: send_until_it_breaks(client, stream(b"self", range(1000)))).join()
        until(
            lambda: log_lines(bus, event="connection cut", peer=client.name),
            "it is said in the log",
        )
        assert count(bus, "connections", "closed", "slow_consumer") == cut + 1
        assert count(bus, "connections", "waiting") == 0
        assert bystander.settle() == []


def test_slow_reader_above_the_minimum_rate_is_never_disconnected(bus: BusProcess):
    """Bytes read from the socket queue count, although the outbox does not shrink."""
    with connect(bus.address()) as slow, connect(bus.address()) as writer:
        slow.send(subscribe(b"slow"))
        slow.settle()
        numbers = range(COUNT)
        thread = sending(writer, stream(b"slow", numbers))
        until(lambda: state(bus, slow) == "full", "it is full")
        whole = expected(b"slow", numbers)
        got = read_slowly(slow, bytes_per_s=16 * RATE, seconds=2.5 * TIMEOUT_S)
        assert log_lines(bus, peer=slow.name) == []
        got += slow.raw(len(whole) - len(got))
        assert got == whole
        thread.join()


def read_slowly(client: Client, bytes_per_s: int, seconds: float) -> bytes:
    """Read in small steps at the given rate."""
    got = bytearray()
    start = time.monotonic()
    while (passed := time.monotonic() - start) < seconds:
        due = int(passed * bytes_per_s) - len(got)
        if due > 0:
            got += client.sock.recv(min(due, 8192))
        else:
            time.sleep(0.005)
    return bytes(got)


# --- order -------------------------------------------------------------------


def test_messages_of_each_publisher_arrive_in_order(bus: BusProcess):
    publishers, each = 25, 2000
    with connect(bus.address()) as reader:
        reader.send(subscribe(b"order"))
        reader.settle()
        writers = [connect(bus.address()) for _ in range(publishers)]
        streams = [
            b"".join(publish(b"order", b"%d %d" % (who, at)) for at in range(each))
            for who in range(publishers)
        ]
        threads = [sending(*pair) for pair in zip(writers, streams, strict=True)]
        heard: list[list[int]] = [[] for _ in range(publishers)]
        for _, content in reader.messages(publishers * each):
            who, at = map(int, content.split())
            heard[who].append(at)
        assert heard == [list(range(each))] * publishers
        for thread, writer in zip(threads, writers, strict=True):
            thread.join()
            writer.close()
