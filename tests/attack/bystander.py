"""A bystander: a client that works normally while a bus is attacked, and measures its delays.

    with Bystander(bus) as bystander:
        attack(bus)
    bystander.publish.number, bystander.publish.p99_ms, bystander.stats.max_ms

It runs in a process of its own, so that the attacker's threads do not delay it. In turn it
publishes an rqueue message that it subscribes to and waits for the echo, and asks the admin
socket for `stats`. A delay is a figure, not a verdict: tests assert that the bystander was
served, and soak runs record how fast (docs/guarantees.md).
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from polybus.errors import ConnectionLost
from polybus.model.address import Address
from polybus.server.admin_client import ask
from tests.rig import rqueue_client

if TYPE_CHECKING:
    from polybus.testing.bus_process import BusProcess

PAUSE_S = 0.005
EXIT_TIMEOUT_S = 60.0


class Delays(NamedTuple):
    """Delays of one kind of request."""

    number: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, seconds: list[float]) -> Delays:
        ordered = [1000 * one for one in sorted(seconds)] or [0.0]
        return cls(
            len(seconds),
            round(ordered[len(ordered) // 2], 2),
            round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 2),
            round(ordered[-1], 2),
        )


class Bystander:
    """The parent's side. Leaving the block ends the child and reads its figures."""

    publish: Delays
    stats: Delays
    refused: int  # requests for `stats` whose connection the bus closed at once

    def __init__(self, bus: BusProcess) -> None:
        command = [sys.executable, "-m", __name__, str(bus.address("rqueue")), str(bus.admin_path)]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ), text=True
        )
        assert self._child.stdout is not None
        if self._child.stdout.readline() != "ready\n":
            raise AssertionError("the bystander did not start")

    def check_served(self) -> None:
        assert self.publish.number, "the bystander could not publish"
        assert self.stats.number, "the bystander got no stats"
        assert not self.refused, "the admin socket closed connections of the bystander"

    def figures(self) -> dict[str, float]:
        """Return the delays for the record of a soak run; `_max` names are not summed."""
        return {
            "bystander_publishes": self.publish.number,
            "bystander_stats": self.stats.number,
            "bystander_refused": self.refused,
            "publish_p99_ms_max": self.publish.p99_ms,
            "publish_ms_max": self.publish.max_ms,
            "stats_p99_ms_max": self.stats.p99_ms,
            "stats_ms_max": self.stats.max_ms,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            output, _ = self._child.communicate(timeout=EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.communicate()
            raise AssertionError("the bystander was not served") from None
        if error is None:
            assert self._child.returncode == 0, "the bystander failed"
            publish, stats, self.refused = json.loads(output)
            self.publish, self.stats = Delays(*publish), Delays(*stats)


def _serve_itself(address: Address, admin_path: Path) -> None:
    publishes: list[float] = []
    stats: list[float] = []
    refused = 0
    with rqueue_client.connect(address) as client:
        client.settle()
        ask(admin_path, "stats")
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
            started = time.perf_counter()
            client.settle()
            published = time.perf_counter()
            publishes.append(published - started)
            try:
                ask(admin_path, "stats")
            except ConnectionLost:
                refused += 1
            else:
                stats.append(time.perf_counter() - published)
    sys.stdout.write(json.dumps([Delays.of(publishes), Delays.of(stats), refused]))


if __name__ == "__main__":
    _serve_itself(Address.parse(sys.argv[1]), Path(sys.argv[2]))
