"""A real bus with a native port, which can be stopped, killed and started again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polybus.native import Client, ClientOptions
from polybus.native.inprocess.inprocess_transport import InProcessTransport
from tests.rig.restartable_bus import LastingBus


def count_waits(client: Client) -> int:
    """Return the number of calls that wait for messages, of a bus inside the process."""
    transport = client._connection
    assert isinstance(transport, InProcessTransport)
    return transport.bus.port.waits.count


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
