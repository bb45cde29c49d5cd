"""The same traffic over every kind of listener, and the same answer to bad input."""

from __future__ import annotations

import os
import signal
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from polybus.model.address import Address
from polybus.testing.bus_process import BusProcess, rqueue, serve
from tests.rig.certificates import trusting, write_certificate
from tests.rig.observer import check_unharmed, connections, count, log_lines, until
from tests.rig.rqueue_client import (
    Client,
    connect,
    frame,
    notification,
    publish,
    publish_part,
    subscribe,
)

KINDS = ("tcp", "tls", "unix")
MIB = 1 << 20
# Of readers that shall be full: fixed, or the host might let it grow until all fits.
RECEIVE_BUFFER = 64 * 1024


class Served:
    """One bus with a listener of each kind."""

    def __init__(self, bus: BusProcess, context: ssl.SSLContext) -> None:
        self.bus = bus
        self._context = context

    def place(self, kind: str) -> Address:
        return next(address for _, address in self.bus.listeners if address.scheme == kind)

    def connect(self, kind: str, receive_buffer: int | None = None) -> Client:
        context = self._context if kind == "tls" else None
        return connect(self.place(kind), tls=context, receive_buffer=receive_buffer)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("tls")
    certificate, key = write_certificate(folder)
    env = {
        "POLYBUS_TLS_CERTIFICATE": str(certificate),
        "POLYBUS_TLS_KEY": str(key),
        "POLYBUS_LOG_FORMAT": "json",
        "POLYBUS_LIMITS_SLOW_CONSUMER_TIMEOUT_S": "1",
        "POLYBUS_LIMITS_OUTBOX_HIGH_WATER_BYTES": str(MIB),
    }
    listen = (
        "rqueue=tcp://127.0.0.1:0",
        "rqueue=tls://127.0.0.1:0",
        f"rqueue=unix:{folder / 'rqueue.sock'}",
    )
    with serve(listen=listen, env=env) as bus:
        yield Served(bus, trusting(certificate))
        check_unharmed(bus)


@pytest.mark.parametrize("writes", KINDS)
@pytest.mark.parametrize("reads", KINDS)
def test_messages_cross_between_all_transports(served: Served, writes: str, reads: str):
    with served.connect(reads) as reader, served.connect(writes) as writer:
        reader.send(subscribe(b"t"))
        assert reader.settle() == []
        contents = [os.urandom(at % 2000) for at in range(5000)]
        stream = b"".join(publish(b"t", content) for content in contents)
        expected = b"".join(notification(b"t", content) for content in contents)
        sending = threading.Thread(target=writer.send, args=(stream,), daemon=True)
        sending.start()
        assert reader.raw(len(expected)) == expected
        sending.join()


@pytest.mark.parametrize("kind", KINDS)
def test_bad_frame_closes_the_connection_on_every_transport(served: Served, kind: str):
    counted = count(served.bus, "connections", "closed", "unknown_type")
    with served.connect(kind) as offender, served.connect("tcp") as bystander:
        bystander.send(subscribe(b"t"))
        bystander.settle()
        offender.send(subscribe(b"t"), publish(b"t", b"before"), frame(99))
        assert offender.messages(1) == [(b"t", b"before")]
        assert offender.to_the_end() == []
        assert bystander.messages(1) == [(b"t", b"before")]
        assert bystander.settle() == []
    assert count(served.bus, "connections", "closed", "unknown_type") == counted + 1


@pytest.mark.parametrize("kind", KINDS)
def test_frames_after_an_exceeded_limit_have_no_effect(served: Served, kind: str):
    """More than one read: the rest is buffered in the bus when it closes the connection."""
    with served.connect(kind) as offender, served.connect("tcp") as bystander:
        bystander.send(subscribe(b"t"))
        bystander.settle()
        stream = b"".join(subscribe(b"%d" % at) for at in range(10_001))
        stream += b"".join(subscribe(b"%d" % at) + publish(b"t", b"!") for at in range(10_000))
        try:
            offender.send(stream)
        except OSError:
            pass  # closed in the middle, as it should be
        offender.to_the_end()
        until(
            lambda: count(served.bus, "connections", "open") == 1,
            "the offender is gone",
        )
        assert bystander.settle() == []
        assert count(served.bus, "topics") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_reader_that_never_reads_is_disconnected(served: Served, kind: str):
    bus = served.bus
    with served.connect(kind, RECEIVE_BUFFER) as stuck, served.connect("tcp") as writer:
        stuck.send(subscribe(b"stuck"))
        stuck.settle()
        cuts = count(bus, "connections", "closed", "slow_consumer")
        lost = count(bus, "dropped", "slow_consumer")
        writer.send(publish(b"stuck", bytes(1000)) * 12_000)
        until(lambda: count(bus, "connections", "closed", "slow_consumer") == cuts + 1, "a cut")
        assert writer.settle() == []
        lost = count(bus, "dropped", "slow_consumer") - lost
        assert lost > MIB // 1008
        cut = {"event": "connection cut", "messages_lost": lost}
        until(lambda: log_lines(bus, **cut), "it is said in the log")


@pytest.mark.parametrize("kind", KINDS)
def test_full_reader_gets_every_message_once_it_reads(served: Served, kind: str):
    with served.connect(kind, RECEIVE_BUFFER) as reader, served.connect(kind) as writer:
        reader.send(subscribe(b"full"))
        reader.settle()
        stream = b"".join(publish(b"full", b"%05d" % at + bytes(1000)) for at in range(12_000))
        sending = threading.Thread(target=writer.send, args=(stream,), daemon=True)
        sending.start()
        until(lambda: count(served.bus, "connections", "waiting") == 1, "the writer waits")
        for at in range(12_000):
            assert reader.messages(1)[0][1][:5] == b"%05d" % at
        sending.join()


def test_failed_tls_handshake_is_counted_and_logged(served: Served):
    counted = count(served.bus, "refused", "tls_handshake")
    with connect(served.place("tls")) as plain:
        plain.send(b"GET / HTTP/1.1\r\n\r\n")
        plain.to_the_end()
    until(lambda: count(served.bus, "refused", "tls_handshake") == counted + 1, "it is counted")
    line = {"level": "warning", "event": "tls handshake failed", "reason": "http_request"}
    until(lambda: log_lines(served.bus, **line), "it is logged")


def test_peers_are_named_by_address_or_credentials(served: Served):
    with served.connect("tcp") as tcp, served.connect("unix") as unix, served.connect("tls") as tls:
        for client in (tcp, unix, tls):
            client.settle()
        found = {one["peer"]: one["identity"] for one in connections(served.bus)}
        assert {tcp.name, tls.name} < found.keys()
        assert found[f"unix:pid={os.getpid()},uid={os.getuid()}"] == f"uid:{os.getuid()}"


# --- a larger cap ------------------------------------------------------------


def test_max_payload_of_one_mebibyte_is_exact():
    with rqueue("--admin", "--max-payload", str(MIB)) as bus:
        with connect(bus.address()) as client, connect(bus.address()) as other:
            other.send(subscribe(b"t"))
            other.settle()
            largest = os.urandom(MIB - 7)
            for content in (largest, b"small", largest[::-1], bytes(300_000)):
                client.send(publish(b"t", content))
                assert other.messages(1) == [(b"t", content)]
            chunk = os.urandom(MIB - 27)
            client.send(publish_part(b"t", bytes(16), 0, 1, chunk))
            assert other.frames(1)[0][1].endswith(chunk)
            client.send(publish(b"t", bytes(MIB - 6)))
            assert client.to_the_end() == []
            assert other.settle() == []
        assert count(bus, "connections", "closed", "payload_too_large") == 1
        check_unharmed(bus)


# --- the end -----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS[::2])
def test_stop_under_load_sends_only_whole_frames_without_a_gap(tmp_path: Path, kind: str):
    listen = ("rqueue=tcp://127.0.0.1:0", f"rqueue=unix:{tmp_path / 's'}")
    with serve(listen=listen) as bus:
        place = next(address for _, address in bus.listeners if address.scheme == kind)
        with connect(place) as reader, connect(place) as writer:
            reader.send(subscribe(b"t"))
            reader.settle()
            sending = threading.Thread(target=count_up, args=(writer,), daemon=True)
            sending.start()
            first = reader.messages(1000)
            bus.signal(signal.SIGTERM)
            rest = reader.to_the_end()
            assert reader.rest == b""
            contents = [content for _, content in first] + [payload[2:] for _, payload in rest]
            assert [int(content) for content in contents] == list(range(len(contents)))
            sending.join()
        assert bus.wait() == 0


def count_up(client: Client) -> None:
    """Publishes 0, 1, 2 … until the server ends it."""
    at = 0
    try:
        while True:
            client.send(*(publish(b"t", b"%d" % number) for number in range(at, at + 100)))
            at += 100
    except OSError:
        pass
