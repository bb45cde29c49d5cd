"""A real bus with a native port, which can be stopped, killed and started again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Event
from typing import Any

from polybus.native import Client, ClientOptions
from polybus.native.inprocess.inprocess_transport import InProcessTransport
from tests.rig.restartable_bus import LastingBus


def count_waits(client: Client) -> int:
    """Return the number of calls that wait for messages, of a bus inside the process."""
    return _transport(client).bus.port.waits.count


@contextmanager
def held_answers(client: Client) -> Iterator[None]:
    """Let no batch of a bus inside the process get its outcome during a `with`."""
    resume = Event()

    def hold() -> None:
        resume.wait(30)

    _transport(client).bus.answers.add(hold)
    try:
        yield
    finally:
        resume.set()


def _transport(client: Client) -> InProcessTransport:
    transport = client._connection
    assert isinstance(transport, InProcessTransport)
    return transport


QUICK: dict[str, Any] = {"first_backoff_s": 0.01, "last_backoff_s": 0.2, "connect_timeout_s": 30.0}


class NativeBus(LastingBus):
    def __init__(
        self,
        *args: str,
        listen: Sequence[str] = (),
        scheme: str = "grpc",
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__("native", scheme, args, listen=listen, env=env)

    @property
    def url(self) -> str:
        scheme = "polybus+tls" if self._scheme == "grpc+tls" else "polybus"
        return f"{scheme}://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> Client:
        """One that does not wait long between tries."""
        return Client(self.url, ClientOptions(**QUICK | options))
