"""A bus that serves Freud and rqueue, for live tests; and users who speak Freud to it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from polybus.testing import freud
from polybus.testing.process import BusProcess, serve
from polybus.testing.users import Link, User
from polybus.testing.watch import check_unharmed

# Every event gets its line here; the flood gate of the log has tests of its own.
EVERY_LINE = {"POLYBUS_LOG_FORMAT": "json", "POLYBUS_LOG_MAX_REPEATS_PER_S": "10000"}


@contextmanager
def serving(*args: str, env: Mapping[str, str] | None = None) -> Iterator[BusProcess]:
    """In a folder that every user may look into; at the end nothing must have gone wrong."""
    with started(*args, env=env) as bus:
        yield bus
        check_unharmed(bus)


@contextmanager
def started(*args: str, env: Mapping[str, str] | None = None) -> Iterator[BusProcess]:
    """The same, for a test that stops it."""
    with tempfile.TemporaryDirectory(prefix="pb-f-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        listen = (
            "rqueue=tcp://127.0.0.1:0",
            f"freud=unix:{folder}/freud.sock",
            f"admin=unix:{folder}/admin.sock",
        )
        with serve(*args, listen=listen, folder=folder, env=EVERY_LINE | dict(env or {})) as bus:
            yield bus


def connect(bus: BusProcess, *, receive_buffer: int | None = None) -> freud.Client:
    return freud.connect(bus.address("freud"), receive_buffer=receive_buffer)


def begin(client: freud.Client, *requests: bytes) -> None:
    """Sends requests that will wait; when it returns, they have arrived and do so."""
    client.send(freud.list_topics(), *requests)
    assert client.answers(1)[0].code == freud.OK


class Speaker:
    """A connection of another user."""

    def __init__(self, user: User, bus: BusProcess) -> None:
        self.link: Link = user.connect(bus.address("freud"))

    def ask(self, request: bytes) -> freud.Answer:
        self.link.send(request)
        return self.answer()

    def answer(self) -> freud.Answer:
        header = self.link.receive(8)
        if len(header) < 8:
            raise EOFError("the server closed the connection")
        size = int.from_bytes(header[4:], "little")
        payload = self.link.receive(size) if size else b""
        return freud.Answer(int.from_bytes(header[:4], "little"), payload)

    def subscribe(self, name: bytes) -> bytes:
        answer = self.ask(freud.subscribe(name))
        assert answer.code == freud.OK, answer
        return answer.payload
