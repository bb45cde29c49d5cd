"""A real bus with a store and one address, both of which outlast its process.

with NativeBus() as bus:
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

from polybus.testing.bus_process import BusProcess, serve

START_TIMEOUT_S = 90.0  # a round of kills is not to fail because a machine stands still


class LastingBus:
    """`args` are for `polybus serve`; other listeners may be added by `listen`.

    A folder that is given stays; without one there is a new one, which goes in the end.
    """

    def __init__(
        self,
        dialect: str,
        scheme: str,
        args: Sequence[str],
        *,
        listen: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._own_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="pb-", dir="/tmp"))
        self._dialect, self._scheme = dialect, scheme
        self._args, self._listen, self._env = args, tuple(listen), env
        self.port = 0
        self.process: BusProcess
        self.start()

    def start(self) -> None:
        own = f"{self._dialect}={self._scheme}://127.0.0.1:{self.port}"
        self.process = serve(
            *self._args,
            listen=[own, *self._listen],
            folder=self.folder,
            env=self._env,
            timeout_s=START_TIMEOUT_S,
        )
        self.port = self.process.address(self._dialect).port

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
        if self._own_folder:
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
