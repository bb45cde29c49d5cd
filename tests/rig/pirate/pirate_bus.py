"""A real bus with a pirate's listener, which can be stopped, killed and started again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.rig.restartable_bus import LastingBus


class PirateBus(LastingBus):
    def __init__(
        self,
        *args: str,
        listen: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        super().__init__("pirate", "tcp", args, listen=listen, env=env, folder=folder)

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"
