"""A real bus with a native port and a store, which can be stopped, killed and started again.

with NativeBus() as bus:
    client = bus.client()
    bus.kill()                     # -9; the folder and the port stay
    bus.start()
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from polybus.native import Client, ClientOptions
from polybus.testing.process import BusProcess, serve

QUICK: dict[str, Any] = {"first_backoff_s": 0.01, "last_backoff_s": 0.2, "connect_timeout_s": 30.0}


class NativeBus:
    """`args` are for `polybus serve`; other listeners may be added by `listen`."""

    def __init__(
        self,
        *args: str,
        listen: Sequence[str] = (),
        scheme: str = "grpc",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pb-", dir="/tmp"))
        self._args = args
        self._listen = tuple(listen)
        self._scheme = scheme
        self._env = env
        self.port = 0
        self.process: BusProcess
        self.start()

    @property
    def url(self) -> str:
        scheme = "polybus+tls" if self._scheme == "grpc+tls" else "polybus"
        return f"{scheme}://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> Client:
        """One that does not wait long between tries."""
        return Client(self.url, ClientOptions(**QUICK | options))

    def start(self) -> None:
        native = f"native={self._scheme}://127.0.0.1:{self.port}"
        self.process = serve(
            *self._args, listen=[native, *self._listen], folder=self.folder, env=self._env
        )
        self.port = self.process.address("native").port

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        code = self.process.stop()
        self.process.close()
        return code

    def kill(self) -> None:
        self.process.process.kill()
        self.process.wait()
        self.process.close()

    def close(self) -> None:
        self.process.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(f"log of the bus:\n{self.process.log()[-4000:]}")
        self.close()
