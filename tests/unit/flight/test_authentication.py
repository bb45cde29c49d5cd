"""Identities of native callers without a token or a certificate, on real connections."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from polybus.model.identity import ANONYMOUS, IN_DOUBT, Identity
from polybus.transports.flight.authentication import CallIdentifier, TokenFile

V4, V6 = "127.0.0.1", "::1"
ME = Identity(uid=os.getuid())


class Identifier:
    def __init__(self, host: str) -> None:
        self.in_doubt = 0
        self._identifier = CallIdentifier(host, TokenFile(None, time.time), self._count)

    def __call__(self, peer: str, port: int, *, is_cancelled: bool = False) -> Identity:
        call: Any = SimpleNamespace(
            authorization=None, identity=b"", peer=peer, is_cancelled=lambda: is_cancelled
        )
        return self._identifier.identify(call, port)

    def _count(self) -> None:
        self.in_doubt += 1


@contextmanager
def connected(host: str, target: str, source: str) -> Iterator[tuple[socket.socket, str, int]]:
    """Yield the peer's end, its name as gRPC writes it, and the port of the listener."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        with socket.create_connection((target, port), 20, source_address=(source, 0)) as far:
            near, _ = server.accept()
            name = far.getsockname()
            peer = f"ipv6:%5B{name[0]}%5D:{name[1]}" if ":" in name[0] else f"ipv4:{V4}:{name[1]}"
            with near:
                yield far, peer.replace(V4, name[0]), port


@pytest.mark.parametrize(
    ("host", "target", "source"),
    [
        (V4, V4, V4),
        (V4, V4, "127.0.0.9"),
        ("127.0.0.5", "127.0.0.5", V4),
        ("0.0.0.0", V4, V4),
        ("0.0.0.0", V4, "127.0.0.9"),
        (V6, V6, V6),
        ("::", V6, V6),
    ],
)
def test_local_caller_is_its_user_until_it_hangs_up(host, target, source):
    identify = Identifier(host)
    with connected(host, target, source) as (far, peer, port):
        assert identify(peer, port) == ME
        assert identify.in_doubt == 0
        assert identify(peer, port, is_cancelled=True) == IN_DOUBT
        far.close()
        assert identify(peer, port) == IN_DOUBT
    assert identify.in_doubt == 2


def test_host_name_is_resolved():
    identify = Identifier("localhost")
    with connected(V4, V4, V4) as (_, peer, port):
        assert identify(peer, port) == ME


def test_remote_caller_is_anonymous():
    identify = Identifier("0.0.0.0")
    assert identify("ipv4:192.0.2.1:5000", 6570) == ANONYMOUS
    assert identify.in_doubt == 0


@pytest.mark.parametrize("peer", ["unix:/tmp/x", "", "ipv4:127.0.0.1:x"])
def test_caller_without_an_address_is_in_doubt(peer):
    assert Identifier(V4)(peer, 6570) == IN_DOUBT
