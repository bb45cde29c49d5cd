"""The Python client's rows: what one process of Python receives in batches, and publishes at once.

The other end is the load generator, so that the client is what is measured: it publishes what the
client receives, and receives, and checks byte by byte, what the client publishes.
"""

import json
import sys
from collections.abc import Callable

from bench.harness import load
from bench.harness.load import Generator, LoadFailed, Plan
from bench.harness.peer import Peer, Running
from bench.harness.programs import DidNotStart, Program
from bench.harness.quiet import Watch
from bench.harness.results import OURS, RATE, CaseResult, Floor, Round
from bench.harness.rounds import Effort, Measured, Quietly
from bench.harness.workloads import Streams, Work
from bench.rqueue.client_process import SIZE

RECEIVES, PUBLISHES = "client-receives", "client-publishes"
TITLES = {
    RECEIVES: f"Python client receives in batches, {SIZE} B",
    PUBLISHES: f"Python client publishes with publish_many, {SIZE} B",
}
LEAST_PER_S = 5e6
FLOORS = tuple(Floor(name, RATE, LEAST_PER_S) for name in TITLES)
# What is expected of the client in one second; a slower one just takes longer.
EXPECTED_PER_S = 6e6
VERIFIED_CYCLES = 100
TIMEOUT_S = 60.0


class ClientRows:
    def __init__(self, peer: Peer, running: Running, effort: Effort) -> None:
        self._running = running
        self._effort = effort
        self._work: Work = Streams(1, (SIZE,)).work(peer, running)
        per_cycle = self._work.delivered_per_cycle
        self._cycles = max(1, round(EXPECTED_PER_S * effort.measurement_s / per_cycle))

    def run(self, name: str) -> CaseResult:
        quietly = Quietly(self._effort)
        rounds: tuple[Round, ...] = ()
        failures: tuple[str, ...] = ()
        try:
            rounds = self._rounds(name, quietly)
        except LoadFailed as error:
            failures = (f"{name}: {error}",)
        kept = quietly.disturbed_kept
        return CaseResult(name, TITLES[name], (RATE,), rounds, quietly.dropped, kept, failures)

    def _rounds(self, name: str, quietly: Quietly) -> tuple[Round, ...]:
        if name == RECEIVES:
            self._receive("verify", VERIFIED_CYCLES)
        measure = self._receives if name == RECEIVES else self._publishes
        return tuple({OURS: quietly.take(measure)} for _ in range(self._effort.rounds))

    def _receives(self) -> Measured:
        return self._measured(lambda: self._receive("receive", self._cycles))

    def _publishes(self) -> Measured:
        return self._measured(self._publish)

    def _measured(self, seconds: Callable[[], float]) -> Measured:
        watch = Watch(self._running.pid)
        messages = self._work.delivered_per_cycle * self._cycles
        values = {RATE.key: messages / seconds()}
        return values, watch.disturbance()

    def _program(self, what: str, cycles: int) -> Program:
        port = self._running.publish_port
        module = [sys.executable, "-m", "bench.rqueue.client_process"]
        return Program("client", [*module, what, str(port), str(cycles)])

    def _receive(self, what: str, cycles: int) -> float:
        plan = Plan("stream", self._work.plan.publishers, ())
        try:
            with self._program(what, cycles) as client:
                client.line()  # connected
                load.run(plan, cycles)
                return float(json.loads(client.line(TIMEOUT_S))["seconds"])
        except DidNotStart as error:
            raise LoadFailed(f"the Python client did not receive all: {error}") from error

    def _publish(self) -> float:
        plan = Plan("stream", (), self._work.plan.subscribers)
        receiver = Generator(plan, self._cycles)
        try:
            receiver.wait_connected()
            with self._program("publish", self._cycles):
                return float(receiver.finish()["seconds"])
        finally:
            receiver.stop()
