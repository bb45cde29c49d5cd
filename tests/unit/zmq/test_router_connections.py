"""Whose messages are whose, though descriptors are used again."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from polybus.model.identity import ANONYMOUS
from polybus.transports.zmq.router_connections import (
    REMEMBERED_S,
    RouterConnection,
    RouterConnections,
)


class Gate:
    def __init__(self, places: int = 10) -> None:
        self.places = places

    def enter(self, peer: str) -> bool:
        self.places -= 1
        return self.places >= 0

    def leave(self) -> None:
        self.places += 1


class Monitor:
    """What libzmq would tell, and real connections to be told of."""

    def __init__(self, places: int = 10) -> None:
        self.told: list[list[tuple[int, bool]]] = []
        self.now_s = 0.0
        self.gate = Gate(places)
        self.connections = RouterConnections(
            self.gate, self._changes, lambda: self.now_s, lambda connection: None
        )
        self._stack = ExitStack()
        self._server = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def _changes(self) -> list[tuple[int, bool]]:
        return self.told.pop(0) if self.told else []

    def accept(self) -> tuple[socket.socket, socket.socket]:
        client = self._stack.enter_context(socket.create_connection(self._server.getsockname()))
        ours, _ = self._server.accept()
        self._stack.enter_context(ours)
        self.tell(ours.fileno(), True)
        return ours, client

    def tell(self, descriptor: int, begun: bool) -> None:
        self.told.append([(descriptor, begun)])

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    one = Monitor()
    yield one
    one.close()


def test_the_kernel_says_who_is_there(monitor):
    ours, client = monitor.accept()
    found = monitor.connections.find(b"r", ours.fileno())
    assert found.identity.uid == os.getuid()
    assert found.peer_text == f"127.0.0.1:{client.getsockname()[1]}"
    assert monitor.connections.find(b"r", ours.fileno()) is found
    assert monitor.connections.open() == [found]


def test_each_has_its_own(monitor):
    ones = [monitor.accept()[0].fileno() for _ in range(3)]
    found = [monitor.connections.find(b"%d" % fd, fd) for fd in reversed(ones)]
    assert len({one.peer_text for one in found}) == 3


def test_of_two_that_had_a_descriptor_neither_is_vouched_for(monitor):
    fd = in_doubt(monitor)
    # They may be the old one's or the new one's, whichever comes first and however many.
    for routing in (b"old or new", b"old or new", b"the other"):
        assert monitor.connections.find(routing, fd).identity == ANONYMOUS


def test_once_all_was_read_that_came_before_it_the_new_one_is_in_no_doubt(monitor):
    fd = in_doubt(monitor)
    (new,) = newest = monitor.connections.ambiguous()
    monitor.connections.resolve_ambiguous(newest)
    assert monitor.connections.ambiguous() == []
    assert monitor.connections.find(b"new", fd) is new
    assert new.identity.uid == os.getuid()
    assert monitor.connections.find(b"new", fd) is new


def test_whoever_comes_while_all_is_read_is_still_in_doubt(monitor):
    fd = in_doubt(monitor)
    newest = monitor.connections.ambiguous()
    monitor.tell(fd, False)
    monitor.tell(fd, True)
    monitor.connections.read_events()
    monitor.connections.resolve_ambiguous(newest)
    assert monitor.connections.find(b"one of two", fd).identity == ANONYMOUS
    monitor.connections.resolve_ambiguous(monitor.connections.ambiguous())
    assert monitor.connections.find(b"new", fd).identity.uid == os.getuid()


def in_doubt(monitor) -> int:
    """A descriptor that one has had without a word, and another has now."""
    ours, _ = monitor.accept()
    monitor.connections.read_events()
    monitor.tell(ours.fileno(), False)
    monitor.tell(ours.fileno(), True)
    monitor.connections.read_events()
    return ours.fileno()


def test_one_that_ended_without_a_word_is_forgotten_after_a_while(monitor):
    ours, _ = monitor.accept()
    monitor.connections.read_events()
    monitor.tell(ours.fileno(), False)
    monitor.connections.tick()
    monitor.now_s += REMEMBERED_S + 1
    monitor.connections.tick()
    monitor.tell(ours.fileno(), True)
    assert monitor.connections.find(b"new", ours.fileno()).identity.uid == os.getuid()


def test_messages_that_are_read_after_the_end_are_still_its_own(monitor):
    ours, _ = monitor.accept()
    found = monitor.connections.find(b"r", ours.fileno())
    monitor.tell(ours.fileno(), False)
    monitor.connections.tick()
    assert monitor.connections.find(b"r", ours.fileno()) is found
    monitor.now_s += REMEMBERED_S + 1
    monitor.connections.tick()
    assert monitor.connections.find(b"r", ours.fileno()) is not found
    assert monitor.connections.open() == []


def test_a_message_of_nobody_who_was_accepted_is_anonymous_and_remembered_by_nobody(monitor):
    stranger = monitor.connections.find(b"x", 10_000)
    assert stranger.identity == ANONYMOUS
    assert monitor.connections.find(b"x", 10_000) is not stranger


def test_one_too_many_is_cut():
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


def test_places_are_given_back(monitor):
    ours, _ = monitor.accept()
    monitor.connections.read_events()
    assert monitor.gate.places == 9
    monitor.tell(ours.fileno(), False)
    monitor.connections.read_events()
    assert monitor.gate.places == 10
    monitor.accept()
    monitor.connections.read_events()
    monitor.connections.close()
    assert monitor.gate.places == 10


def test_the_kernels_counts(monitor):
    ours, client = monitor.accept()
    found = monitor.connections.find(b"r", ours.fileno())
    client.sendall(b"x" * 1000)
    received, _ = found.read_byte_counts()
    assert received == 1000
    assert RouterConnection(10_000, 0.0).read_byte_counts() is None
    assert not RouterConnection(10_000, 0.0).cut()


def test_of_a_unix_socket_it_is_known_whether_something_waits(monitor):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monitor.tell(ours.fileno(), True)
        found = monitor.connections.find(b"r", ours.fileno())
        assert found.identity.uid == os.getuid()
        found.sent_bytes = 100
        assert found.read_byte_counts() == (0, 100)
        theirs.sendall(b"x")
        ours.sendall(b"y")
        assert found.read_byte_counts() == (1 << 20, 0)
