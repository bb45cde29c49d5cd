"""What the command line asks of a benchmark."""

import time
from dataclasses import dataclass
from pathlib import Path

from bench.harness.rounds import Effort

# The short form must end within three minutes, so its repeats end in time for the rows that follow.
SHORT_REPEATS_S = 45.0
LONG_REPEATS_S = 1800.0


@dataclass(frozen=True)
class Options:
    short: bool
    only: tuple[str, ...]
    rounds: int | None
    port: int | None  # of a server of ours that already runs
    output: Path
    threads: int | None = None  # of our server, beside one thread
    server_cpus: frozenset[int] = frozenset()  # of our server; empty: as the harness

    def wants(self, *names: str) -> bool:
        """Whether any of these cases is to be run."""
        return not self.only or any(name in self.only for name in names)

    def effort(self) -> Effort:
        """The time for repeats runs from now."""
        now_s, fixed = time.monotonic(), self.rounds is not None
        if self.short:
            return Effort(self.rounds or 3, fixed, 0.3, 5, 0.5, now_s + SHORT_REPEATS_S)
        return Effort(self.rounds or 7, fixed, 1.0, 35, 10.0, now_s + LONG_REPEATS_S)
