"""Another user: a child process with a uid of its own that takes commands line by line.

    with User(4242) as alice:
        link = alice.connect(bus.address())
        link.send(rqueue.subscribe(b"t"))
        link.settle()
        done = alice.polybus("acl", "test", "user:1", "produce", "t")

Only root can make one. The child first loads all its modules and then becomes the other
user, because that user may not be able to read the Python installation.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import pyarrow.flight as flight

from polybus.model.address import Address
from tests.rig import flight_client, raw_attempts, rqueue_client
from tests.rig.closing import Closing


class Done(NamedTuple):
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


class User(Closing):
    """The parent's side. A failure in the child is raised here, as text."""

    def __init__(
        self,
        uid: int,
        gid: int | None = None,
        groups: Iterable[int] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.uid = uid
        numbers = [uid, uid if gid is None else gid, *groups]
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(os.environ if env is None else env),
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    def connect(self, place: rqueue_client.Place) -> Link:
        return Link(self, self.ask("connect", place.host, place.port, place.path))

    def polybus(self, *args: str) -> Done:
        """A `polybus` command, run by this user."""
        return Done(*self.ask("polybus", *args))

    def attempt(self, dialect: str, address: Address, verb: str, topic: str) -> str:
        """One request about a topic by a raw client. Returns its outcome (raw_attempts.py)."""
        return str(self.ask("attempt", dialect, str(address), verb, topic))

    def ask(self, what: str, *args: Any) -> Any:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps([what, *args]) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            raise EOFError(f"user {self.uid} has died")
        answer = json.loads(line)
        if "failed" in answer:
            kind = ConnectionError if answer["gone"] else RuntimeError
            raise kind(f"user {self.uid}: {answer['failed']}")
        return answer["ok"]

    def close(self) -> None:
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                stream.close()
        self._child.kill()
        self._child.wait()


class Link:
    """One connection of a user."""

    def __init__(self, user: User, number: int) -> None:
        self._user = user
        self._number = number

    def send(self, *frames: bytes) -> None:
        self._user.ask("send", self._number, _text(b"".join(frames)))

    def receive(self, count: int) -> bytes:
        """Return exactly `count` bytes, or fewer if the connection ends."""
        return _bytes(self._user.ask("receive", self._number, count))

    # rqueue's

    def settle(self) -> int:
        """Wait until all earlier frames took effect. Returns the number of unread messages."""
        waiting: int = self._user.ask("settle", self._number)
        return waiting

    def messages(self, count: int) -> list[tuple[bytes, bytes]]:
        found = self._user.ask("messages", self._number, count)
        return [(_bytes(topic), _bytes(body)) for topic, body in found]

    def close(self) -> None:
        self._user.ask("close", self._number)


class _Child:
    """The child's side: a table of connections, and a method per command."""

    def __init__(self) -> None:
        self._links: list[rqueue_client.Client] = []
        self._early: list[list[tuple[bytes, bytes]]] = []  # arrived while settling

    def connect(self, host: str, port: int, path: str) -> int:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(socket.AF_UNIX if path else family)
        sock.settimeout(rqueue_client.TIMEOUT_S)
        sock.connect(path or (host, port))
        self._links.append(rqueue_client.Client(sock))
        self._early.append([])
        return len(self._links) - 1

    def send(self, link: int, data: str) -> None:
        self._links[link].send(_bytes(data))

    def receive(self, link: int, count: int) -> str:
        return _text(self._links[link].sock.recv(count, socket.MSG_WAITALL))

    def settle(self, link: int) -> int:
        early = self._early[link]
        early += map(rqueue_client.message, self._links[link].settle())
        return len(early)

    def messages(self, link: int, count: int) -> list[tuple[str, str]]:
        early = self._early[link]
        found, early[:] = early[:count], early[count:]
        found += self._links[link].messages(count - len(found))
        return [(_text(topic), _text(body)) for topic, body in found]

    def close(self, link: int) -> None:
        self._links[link].close()

    def attempt(self, dialect: str, address: str, verb: str, topic: str) -> str:
        return raw_attempts.attempt(dialect, Address.parse(address), verb, topic)

    # the native port's, by Arrow Flight

    def flight(self, port: int, what: str, *args: Any) -> dict[str, Any]:
        """`act` NAME FIELDS, or `produce` TOPIC BODY [STAMP]; an error is its code."""
        return self._flight_told(what, flight.connect(f"grpc://127.0.0.1:{port}"), *args)

    def flight_open(self, port: int, topic: str) -> dict[str, Any]:
        """A stream that stays open, for `flight_send`."""
        client = flight.connect(f"grpc://127.0.0.1:{port}")
        self._put = flight_client.Put(client, "produce", topic)
        return {"ok": True}

    def flight_send(self, body: str) -> dict[str, Any]:
        return _code_or_all(self._put.ask(body.encode()))

    def _flight_told(self, what: str, client: Any, *args: Any) -> dict[str, Any]:
        try:
            if what == "act":
                name, fields = args
                return dict(flight_client.act(client, name, **fields))
            topic, body, *stamp = args
            answer = flight_client.produce(
                client, topic, body.encode(), stamp=stamp[0] if stamp else None
            )
        except flight.FlightError as error:
            return {"code": flight_client.code_of(error)}
        return _code_or_all(answer)

    def polybus(self, *args: str) -> Done:
        from polybus.cli.main import run

        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(args)
        return Done(code, out.getvalue(), err.getvalue())


def _code_or_all(answer: dict[str, Any]) -> dict[str, Any]:
    return {"code": answer["error"]["code"]} if "error" in answer else answer


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _become(uid: int, gid: int, *groups: int) -> None:
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _answer(act: Callable[..., Any], args: list[Any]) -> dict[str, Any]:
    try:
        return {"ok": act(*args)}
    except Exception as error:
        gone = isinstance(error, ConnectionError)
        return {"failed": f"{type(error).__name__}: {error}", "gone": gone}


def _main(numbers: list[str]) -> None:
    child = _Child()
    for command in (["acl", "ls"], ["stats"], ["connections"]):
        child.polybus(*command, "--admin", "/nonexistent")  # loads their modules
    child.polybus("freud", "topic", "ls", "--socket", "/nonexistent")
    _become(*map(int, numbers))
    for line in sys.stdin:
        what, *args = json.loads(line)
        sys.stdout.write(json.dumps(_answer(getattr(child, what), args)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main(sys.argv[1:])
