"""The private socket of gRPC; the test listens in the place of gRPC."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from polybus.transports.flight.grpc_socket import GrpcSocket


@pytest.fixture
def grpc(tmp_path, monkeypatch) -> Iterator[tuple[GrpcSocket, socket.socket]]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with closing(GrpcSocket()) as made, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(unquote(urlsplit(made.location).path))
        listener.listen()
        made.hide()
        yield made, listener


def test_only_this_process_can_connect(grpc, tmp_path: Path):
    made, listener = grpc
    assert list(tmp_path.iterdir()) == []
    with made.connect("a-client"), listener.accept()[0] as accepted:
        assert accepted.getpeername() == b"\0a-client"


def test_failed_connect_raises(grpc):
    made, listener = grpc
    listener.close()
    with pytest.raises(OSError, match="refused"):
        made.connect("a-client")


def test_folder_is_removed_if_grpc_does_not_listen(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = GrpcSocket()
    made.hide()
    made.close()
    assert list(tmp_path.iterdir()) == []
