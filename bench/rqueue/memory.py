"""The memory row: a subscriber that reads at 1/20 of the full rate must hold its publisher back.

The server may fill its bounded outbox once; after that its memory stays flat, and when the
publisher stops, everything it sent must still arrive. The load generator checks that, byte by byte.
"""

import time
from dataclasses import replace

from bench.harness.load import LoadFailed, Plan, run
from bench.harness.peer import Peer, Running
from bench.harness.processes import resident_bytes
from bench.harness.results import Verdict
from bench.harness.workloads import Streams

SLOWDOWN = 20
MAX_GROWTH_MB = 5.0
WANTED = f"under {MAX_GROWTH_MB:g}"
SAMPLE_S = 0.1
FULL_RATE_S = 0.5  # how long the full rate is measured
MB = 1e6


class MemorySamples:
    """Resident memory by time since the start."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.restart()

    def restart(self) -> None:
        self._started_s = time.monotonic()
        self.held: list[tuple[float, int]] = []

    def take(self) -> None:
        self.held.append((time.monotonic() - self._started_s, resident_bytes(self._pid)))
        time.sleep(SAMPLE_S)

    def growth_mb(self, from_s: float, to_s: float) -> float:
        """The most it held in this time, above what it held at its beginning."""
        held = [size for at_s, size in self.held if from_s <= at_s <= to_s]
        return (max(held) - held[0]) / MB


def _full_bytes_per_s(plan: Plan) -> float:
    cycles = 1
    while (outcome := run(plan, cycles))["seconds"] < FULL_RATE_S:
        cycles *= 2
    return float(outcome["received_bytes"] / outcome["seconds"])


def failed(seconds: float, reason: str) -> Verdict:
    return Verdict(f"{_text(seconds)} ({reason})", WANTED, None, holds=False)


def _text(seconds: float) -> str:
    return (
        f"1 → 1 with the subscriber at 1/{SLOWDOWN} for {seconds:g} s, nothing lost: growth in MB"
    )


def measure(peer: Peer, running: Running, seconds: float) -> tuple[Verdict, dict[str, float]]:
    """The verdict, and the figures behind it."""
    if running.pid is None:
        return failed(seconds, "the server's process is not known"), {}
    plan = Streams(1, (128,)).work(peer, running).plan
    samples = MemorySamples(running.pid)
    try:
        pace = _full_bytes_per_s(plan) / SLOWDOWN
        settings = {"seconds": f"{seconds:g}", "bytes_per_s": f"{pace:.0f}"}
        slow = replace(plan, settings=settings)
        samples.restart()
        outcome = run(slow, 1, samples.take)
    except LoadFailed as error:
        return failed(seconds, str(error)), {}
    growth = samples.growth_mb(seconds / 2, seconds)
    figures = {
        "growth_mb": growth,
        "first_mb": samples.held[0][1] / MB,
        "peak_mb": max(size for _, size in samples.held) / MB,
        "paced_mb_per_s": pace / MB,
        "received_mb": outcome["received_bytes"] / MB,
    }
    return Verdict(_text(seconds), WANTED, growth, growth < MAX_GROWTH_MB), figures
