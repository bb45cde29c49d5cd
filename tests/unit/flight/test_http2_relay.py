"""The relay in front of gRPC, between real sockets; the test is both the client and gRPC."""

from __future__ import annotations

import random
import select
import socket
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from polybus.transports.flight.http2_relay import CLOSED, NOT_HTTP2, RESETS, Http2Relay
from tests.rig.http2_client import CANCEL, DATA, HEADERS, PREFACE, RST_STREAM, SETTINGS, frame

PATIENCE_S = 20.0
MAX_RESETS = 50
MIB = 1 << 20


class Link:
    """A relayed connection: its two outer ends."""

    def __init__(self, relay: Http2Relay, number: int = 1) -> None:
        self.number = number
        self.relay = relay
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.client = socket.create_connection(listener.getsockname())
            inner_client, _ = listener.accept()
        inner_server, self.server = socket.socketpair()
        for sock in (inner_client, inner_server):
            sock.setblocking(False)
        relay.add(number, inner_client.detach(), inner_server.detach())
        for sock in (self.client, self.server):
            sock.settimeout(PATIENCE_S)

    def close(self) -> None:
        self.client.close()
        self.server.close()

    def reason(self) -> int:
        """Wait until the relay has ended the connection. Returns the reason."""
        assert select.select([self.relay.ended_event], [], [], PATIENCE_S)[0], "it has not ended"
        ((number, reason),) = self.relay.take_ended()
        assert number == self.number
        return reason


@pytest.fixture
def relay() -> Iterator[Http2Relay]:
    made = Http2Relay(MAX_RESETS, 1000, 64)
    yield made
    made.stop()


@pytest.fixture
def link(relay) -> Iterator[Link]:
    with closing(Link(relay)) as made:
        yield made


def receive(sock: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        piece = sock.recv(size - len(received))
        assert piece, f"the connection ended after {len(received)} of {size} bytes"
        received += piece
    return bytes(received)


def receive_all(sock: socket.socket) -> bytes:
    received = bytearray()
    with suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            received += piece
    return bytes(received)


def call(stream: int, size: int = 10) -> bytes:
    return frame(HEADERS, 4, stream, b"h" * 20) + frame(DATA, 1, stream, bytes(size))


def reset(stream: int) -> bytes:
    return frame(RST_STREAM, 0, stream, CANCEL)


def test_bytes_pass_unchanged_in_pieces_of_any_size(link):
    rng = random.Random(7)
    sent = PREFACE + frame(SETTINGS, 0, 0)
    sent += b"".join(
        call(stream, rng.randrange(3000)) + reset(stream) for stream in range(1, 61, 2)
    )
    at = 0
    while at < len(sent):
        size = rng.choice((1, 2, 8, 9, 10, 700))
        link.client.sendall(sent[at : at + size])
        at += size
    assert receive(link.server, len(sent)) == sent
    answer = rng.randbytes(300_000)
    link.server.sendall(answer)
    assert receive(link.client, len(answer)) == answer


def test_client_that_resets_too_many_calls_is_cut(link):
    sent = PREFACE + b"".join(call(stream) + reset(stream) for stream in range(1, 2001, 2))
    with suppress(ConnectionError):
        link.client.sendall(sent)
    passed = receive_all(link.server)
    assert sent.startswith(passed)
    resets = passed.count(reset(1)[:5])
    # A call begins together with its reset or not at all, so gRPC has none of those that are left.
    assert passed.count(b"h" * 20) == resets
    assert resets <= MAX_RESETS
    assert link.reason() == RESETS


def test_connection_without_resets_does_not_wait_for_others(relay, link):
    with suppress(ConnectionError):
        link.client.sendall(PREFACE + b"".join(call(n) + reset(n) for n in range(1, 4001, 2)))
    with closing(Link(relay, 2)) as other:
        other.client.sendall(PREFACE + call(1))
        assert receive(other.server, len(PREFACE + call(1))) == PREFACE + call(1)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.1", b"\0" * 24])
def test_client_that_does_not_speak_http2_is_cut(link, sent):
    link.client.sendall(sent)
    assert link.reason() == NOT_HTTP2
    assert receive_all(link.server) == b""


@pytest.mark.parametrize("side", ["client", "server"])
def test_end_of_one_side_ends_the_other(link, side):
    link.client.sendall(PREFACE)
    receive(link.server, len(PREFACE))
    ended, other = (link.client, link.server) if side == "client" else (link.server, link.client)
    ended.close()
    assert receive_all(other) == b""
    assert link.reason() == CLOSED


def test_client_that_hangs_up_while_its_resets_wait_is_forgotten(link):
    link.client.sendall(PREFACE + b"".join(call(n) + reset(n) for n in range(1, 101, 2)))
    link.client.close()
    assert link.reason() in (CLOSED, RESETS)


def test_cut(link):
    assert link.relay.cut(link.number)
    assert receive_all(link.client) == b""
    assert link.reason() == CLOSED
    assert not link.relay.cut(link.number)
    assert link.relay.confirmed_bytes(link.number) is None


@pytest.mark.parametrize("side", ["client", "server"])
def test_reader_that_does_not_read_holds_its_sender_back(link, side):
    """The relay keeps a chunk, and the kernel a few megabytes."""
    sender, reader = (link.client, link.server) if side == "client" else (link.server, link.client)
    sender.sendall(PREFACE)
    receive(reader, len(PREFACE))
    body = frame(DATA, 0, 1, bytes(16_000))
    sender.settimeout(0.5)
    sent = received = 0
    with suppress(TimeoutError):
        while sent < 64 * MIB:
            sent += sender.send(body[sent % len(body) :])
    assert sent < 64 * MIB, "the sender was not held back"
    reader.settimeout(PATIENCE_S)
    while received < sent:
        piece = reader.recv(1 << 20)
        at = received % len(body)
        assert piece.startswith(body[at : at + len(piece)])
        received += len(piece)
    assert received == sent


def test_confirmed_bytes_are_those_that_the_client_has(link):
    link.server.sendall(bytes(1000))
    receive(link.client, 1000)
    assert (link.relay.confirmed_bytes(link.number) or 0) <= 1001


def test_stopped_relay_ends_its_connections(relay, link):
    relay.stop()
    assert receive_all(link.client) == b""
    assert receive_all(link.server) == b""
