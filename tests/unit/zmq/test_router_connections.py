"""Messages belong to their connections, although descriptors are reused."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from polybus.model.identity import ANONYMOUS, Identity
from polybus.transports.zmq.router_connections import (
    REMEMBERED_S,
    RouterConnection,
    RouterConnections,
)


class Gate:
    def __init__(self, places: int = 10) -> None:
        self.places = places

    def enter(self, peer: str, identity: Identity) -> bool:
        self.places -= 1
        return self.places >= 0

    def leave(self, identity: Identity) -> None:
        self.places += 1


class Monitor:
    """Events as libzmq reports them, and real connections."""

    def __init__(self, places: int = 10) -> None:
        self.events: list[list[tuple[int, bool]]] = []
        self.now_s = 0.0
        self.gate = Gate(places)
        self.connections = RouterConnections(
            self.gate, self._changes, lambda: self.now_s, lambda connection: None
        )
        self._stack = ExitStack()
        self._server = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def _changes(self) -> list[tuple[int, bool]]:
        return self.events.pop(0) if self.events else []

    def accept(self) -> tuple[socket.socket, socket.socket]:
        client = self._stack.enter_context(socket.create_connection(self._server.getsockname()))
        ours, _ = self._server.accept()
        self._stack.enter_context(ours)
        self.report(ours.fileno(), True)
        return ours, client

    def report(self, descriptor: int, begun: bool) -> None:
        self.events.append([(descriptor, begun)])

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    one = Monitor()
    yield one
    one.close()


def test_identity_comes_from_the_kernel(monitor):
    ours, client = monitor.accept()
    found = monitor.connections.find(b"r", ours.fileno())
    assert found.identity.uid == os.getuid()
    assert found.peer_text == f"127.0.0.1:{client.getsockname()[1]}"
    assert monitor.connections.find(b"r", ours.fileno()) is found
    assert monitor.connections.open() == [found]


def test_connections_have_their_own_identity(monitor):
    ones = [monitor.accept()[0].fileno() for _ in range(3)]
    found = [monitor.connections.find(b"%d" % fd, fd) for fd in reversed(ones)]
    assert len({one.peer_text for one in found}) == 3


def test_messages_of_a_reused_descriptor_are_anonymous(monitor):
    fd = in_doubt(monitor)
    # They may be the old one's or the new one's, whichever comes first and however many.
    for routing in (b"old or new", b"old or new", b"the other"):
        assert monitor.connections.find(routing, fd).identity == ANONYMOUS


def test_new_connection_is_identified_after_the_socket_was_empty(monitor):
    fd = in_doubt(monitor)
    (new,) = newest = monitor.connections.ambiguous()
    monitor.connections.resolve_ambiguous(newest)
    assert monitor.connections.ambiguous() == []
    assert monitor.connections.find(b"new", fd) is new
    assert new.identity.uid == os.getuid()
    assert monitor.connections.find(b"new", fd) is new


def test_connection_accepted_during_the_read_stays_ambiguous(monitor):
    fd = in_doubt(monitor)
    newest = monitor.connections.ambiguous()
    monitor.report(fd, False)
    monitor.report(fd, True)
    monitor.connections.read_events()
    monitor.connections.resolve_ambiguous(newest)
    assert monitor.connections.find(b"one of two", fd).identity == ANONYMOUS
    monitor.connections.resolve_ambiguous(monitor.connections.ambiguous())
    assert monitor.connections.find(b"new", fd).identity.uid == os.getuid()


def in_doubt(monitor) -> int:
    """Return a descriptor of a silent ended connection and a new one."""
    ours, _ = monitor.accept()
    monitor.connections.read_events()
    monitor.report(ours.fileno(), False)
    monitor.report(ours.fileno(), True)
    monitor.connections.read_events()
    return ours.fileno()


def test_silent_ended_connection_is_forgotten(monitor):
    ours, _ = monitor.accept()
    monitor.connections.read_events()
    monitor.report(ours.fileno(), False)
    monitor.connections.tick()
    monitor.now_s += REMEMBERED_S + 1
    monitor.connections.tick()
    monitor.report(ours.fileno(), True)
    assert monitor.connections.find(b"new", ours.fileno()).identity.uid == os.getuid()


def test_messages_read_after_the_end_belong_to_the_connection(monitor):
    ours, _ = monitor.accept()
    found = monitor.connections.find(b"r", ours.fileno())
    monitor.report(ours.fileno(), False)
    monitor.connections.tick()
    assert monitor.connections.find(b"r", ours.fileno()) is found
    monitor.now_s += REMEMBERED_S + 1
    monitor.connections.tick()
    assert monitor.connections.find(b"r", ours.fileno()) is not found
    assert monitor.connections.open() == []


def test_message_of_an_unknown_descriptor_is_anonymous(monitor):
    stranger = monitor.connections.find(b"x", 10_000)
    assert stranger.identity == ANONYMOUS
    assert monitor.connections.find(b"x", 10_000) is not stranger


def test_connection_over_the_limit_is_cut():
    monitor = Monitor(places=1)
    _, first = monitor.accept()
    _, second = monitor.accept()
    monitor.connections.read_events()
    second.settimeout(20)
    assert second.recv(1) == b"", "ended"
    first.setblocking(False)
    with pytest.raises(BlockingIOError):
        first.recv(1)
    monitor.close()


def test_ended_connections_leave_the_gate(monitor):
    ours, _ = monitor.accept()
    monitor.connections.read_events()
    assert monitor.gate.places == 9
    monitor.report(ours.fileno(), False)
    monitor.connections.read_events()
    assert monitor.gate.places == 10
    monitor.accept()
    monitor.connections.read_events()
    monitor.connections.close()
    assert monitor.gate.places == 10


def test_byte_counts_come_from_the_kernel(monitor):
    ours, client = monitor.accept()
    found = monitor.connections.find(b"r", ours.fileno())
    client.sendall(b"x" * 1000)
    received, _ = found.read_byte_counts()
    assert received == 1000
    assert RouterConnection(10_000, 0.0).read_byte_counts() is None
    assert not RouterConnection(10_000, 0.0).cut()


def test_byte_counts_of_a_unix_socket_are_guessed(monitor):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monitor.report(ours.fileno(), True)
        found = monitor.connections.find(b"r", ours.fileno())
        assert found.identity.uid == os.getuid()
        found.sent_bytes = 100
        assert found.read_byte_counts() == (0, 100)
        theirs.sendall(b"x")
        ours.sendall(b"y")
        assert found.read_byte_counts() == (1 << 20, 0)
