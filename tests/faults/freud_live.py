"""A bus that serves Freud and rqueue, for live tests, and users with Freud clients."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from polybus.testing.bus_process import BusProcess, serve
from tests.rig import freud_client
from tests.rig.observer import check_unharmed
from tests.rig.second_user import Link, User

# Every event gets its line here; the flood gate of the log has tests of its own.
EVERY_LINE = {"POLYBUS_LOG_FORMAT": "json", "POLYBUS_LOG_MAX_REPEATS_PER_S": "10000"}


@contextmanager
def serving(*args: str, env: Mapping[str, str] | None = None) -> Iterator[BusProcess]:
    """Serve in a folder that every user may read. At the end the bus must be unharmed."""
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


def connect(bus: BusProcess, *, receive_buffer: int | None = None) -> freud_client.Client:
    return freud_client.connect(bus.address("freud"), receive_buffer=receive_buffer)


def begin(client: freud_client.Client, *requests: bytes) -> None:
    """Send requests that wait. Returns when the bus has received them."""
    client.send(freud_client.list_topics(), *requests)
    assert client.answers(1)[0].code == freud_client.OK


class Speaker:
    """A connection of another user."""

    def __init__(self, user: User, bus: BusProcess) -> None:
        self.link: Link = user.connect(bus.address("freud"))

    def ask(self, request: bytes) -> freud_client.Answer:
        self.link.send(request)
        return self.answer()

    def answer(self) -> freud_client.Answer:
        header = self.link.receive(8)
        if len(header) < 8:
            raise EOFError("the server closed the connection")
        size = int.from_bytes(header[4:], "little")
        payload = self.link.receive(size) if size else b""
        return freud_client.Answer(int.from_bytes(header[:4], "little"), payload)

    def subscribe(self, name: bytes) -> bytes:
        answer = self.ask(freud_client.subscribe(name))
        assert answer.code == freud_client.OK, answer
        return answer.payload
