"""What this benchmark needs to know of whatever it measures.

A contender does a case's work for about the wanted time and tells what it reached. Those that are
servers are driven by the load generator in C: one thread plays all producers, and each waits for
the answer to its batch before it sends the next. Ours is driven in its own process in the same way.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.harness.load import Plan
from bench.harness.results import Values
from bench.harness.workloads import content

SIZE = 128  # bytes of a message's body


def bodies(count: int) -> list[bytes]:
    """Return this many different bodies."""
    return [content(b"%08d" % number, SIZE) for number in range(count)]


@dataclass(frozen=True)
class RunningLog:
    """A server with a durable log. `plan` is a function of the producers and their messages."""

    pid: int
    version: str
    plan: Callable[[int, list[bytes]], Plan]


class LogPeer(Protocol):
    @property
    def name(self) -> str:
        """The name in tables."""

    def start(self, folder: Path) -> AbstractContextManager[RunningLog]:
        """Start the server with its data in the folder, and stop it at the end of the block."""


class Contender(Protocol):
    """One column of one case."""

    @property
    def name(self) -> str:
        """The name in tables."""

    @property
    def pid(self) -> int | None:
        """The process id of the server, if there is one."""

    def calibrate(self, wanted_s: float) -> None:
        """Warm up, and find the amount of work for this time."""

    def measure(self) -> Values:
        """Return the figures by metric key."""
