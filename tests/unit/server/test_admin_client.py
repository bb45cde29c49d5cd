"""The admin client: the default path of the socket, and the handling of each answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from polybus import errors
from polybus.model import socket_path
from polybus.server import admin_client
from polybus.server.admin_client import ask, default_path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.sock"


@pytest.fixture
def server(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()
        yield sock


def reply(server: socket.socket, data: bytes) -> threading.Thread:
    """Answer one question with these bytes, and hang up."""

    def work() -> None:
        link, _ = server.accept()
        with link:
            link.recv(65536)
            link.sendall(data)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b'{"error": {"code": "denied", "text": "no"}}\n', errors.Denied),
        (b'{"error": {"code": "limit_reached", "text": "full"}}\n', errors.LimitReached),
        (b'{"error": {"code": "unknown_verb", "text": "what"}}\n', errors.UsageError),
        (b'{"error": {"code": "of the future", "text": "what"}}\n', errors.PeerError),
        (b'{"error": "text"}\n', errors.PeerError),
        (b"{}\n", errors.PeerError),
        (b"[]\n", errors.PeerError),
        (b"1\n", errors.PeerError),
        (b"SSH-2.0-OpenSSH\r\n", errors.PeerError),
        (b'{"ok": ', errors.ConnectionLost),
        (b"", errors.ConnectionLost),
    ],
)
def test_error_answers_raise(server, path, answer, kind):
    thread = reply(server, answer)
    with pytest.raises(kind):
        ask(path, "stats")
    thread.join()


def test_long_answer_arrives_in_pieces(server, path):
    thread = reply(server, b'{"ok": "' + b"x" * 3_000_000 + b'"}\n')
    assert ask(path, "stats") == "x" * 3_000_000
    thread.join()


def test_bus_that_does_not_answer(server, path):
    with pytest.raises(errors.ConnectionLost, match=r"no answer in 0\.05 s"):
        ask(path, "stats", timeout_s=0.05)


def test_endless_answer_is_an_error(server, path, monkeypatch):
    monkeypatch.setattr(admin_client, "MAX_ANSWER_BYTES", 1000)
    thread = reply(server, b"x" * 2000)
    with pytest.raises(errors.PeerError, match="has no end"):
        ask(path, "stats")
    thread.join()


def test_no_bus_listens(path):
    for place in (path, path / "deeper", Path("/" + "x" * 200)):
        with pytest.raises(errors.NotConnected):
            ask(place, "stats")
    path.write_text("a file")
    with pytest.raises(errors.NotConnected):
        ask(path, "stats")


def test_user_without_a_bus_uses_the_bus_of_root(tmp_path, monkeypatch):
    monkeypatch.setattr(socket_path, "ROOT_RUNTIME", tmp_path / "system")
    own = tmp_path / "own" / "polybus"
    environ = {"XDG_RUNTIME_DIR": str(tmp_path / "own")}
    assert default_path(environ) == own / "admin.sock"
    (tmp_path / "system").mkdir()
    (tmp_path / "system" / "admin.sock").touch()
    assert default_path(environ) == tmp_path / "system" / "admin.sock"
    own.mkdir(parents=True)
    (own / "admin.sock").touch()
    assert default_path(environ) == own / "admin.sock"
