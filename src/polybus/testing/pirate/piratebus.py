"""A real bus with a pirate's listener and a store, which can be killed and started again.

with PirateBus() as bus:
    Bare(bus.endpoint, b"a")
    bus.kill()                     # -9; the folder and the port stay
    bus.start()
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from polybus.testing.process import BusProcess, serve

START_TIMEOUT_S = 90.0  # a round of kills is not to fail because a machine stands still


class PirateBus:
    """`args` are for `polybus serve`; other listeners may be added by `listen`."""

    def __init__(
        self,
        *args: str,
        listen: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._own_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="pb-", dir="/tmp"))
        self._args, self._listen, self._env = args, tuple(listen), env
        self.port = 0
        self.process: BusProcess
        self.start()

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def start(self) -> None:
        pirate = f"pirate=tcp://127.0.0.1:{self.port}"
        listen = [pirate, *self._listen]
        self.process = serve(
            *self._args,
            listen=listen,
            folder=self.folder,
            env=self._env,
            timeout_s=START_TIMEOUT_S,
        )
        self.port = self.process.address("pirate").port

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        code = self.process.stop()
        self.process.close()
        return code

    def kill(self) -> None:
        self.process.process.kill()
        self.process.wait()
        self.process.close()

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
        self.process.close()
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)
