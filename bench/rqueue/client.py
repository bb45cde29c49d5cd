"""The Python client's rows: what one process of Python receives in batches, and publishes at once.

The other end is the load generator, so that the client is what is measured: it publishes what the
client receives, and receives, and checks byte by byte, what the client publishes.
"""

import json
import sys
from collections.abc import Sequence

from bench.harness import load
from bench.harness.load import Generator, LoadFailed, Plan
from bench.harness.peer import Peer, Running
from bench.harness.programs import DidNotStart, Program
from bench.harness.quiet import Watch
from bench.harness.results import RATE, SERVER_CPU, CaseResult, Floor
from bench.harness.rounds import Effort, Measured, contest
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


class ClientLoad:
    """The Python client at one server of ours."""

    def __init__(self, case: str, peer: Peer, running: Running) -> None:
        self.name = peer.name
        self._case = case
        self._running = running
        self._work: Work = Streams(1, (SIZE,)).work(peer, running)
        self._cycles = VERIFIED_CYCLES

    def calibrate(self, wanted_s: float) -> None:
        if self._case == RECEIVES:
            self._receive("verify", VERIFIED_CYCLES)
        self._cycles = max(1, round(EXPECTED_PER_S * wanted_s / self._work.delivered_per_cycle))

    def measure(self) -> Measured:
        watch = Watch(self._running.pid)
        messages = self._work.delivered_per_cycle * self._cycles
        is_receiving = self._case == RECEIVES
        seconds = self._receive("receive", self._cycles) if is_receiving else self._publish()
        values = {RATE.key: messages / seconds}
        if self._running.pid is not None:
            values[SERVER_CPU.key] = watch.server_cpu_s() / messages * 1e9
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


def run_case(case: str, effort: Effort, servers: Sequence[tuple[Peer, Running]]) -> CaseResult:
    """All rounds of one row, at each of the servers."""
    line = CaseResult(case, TITLES[case], (RATE, SERVER_CPU), ())
    contenders = [ClientLoad(case, peer, running) for peer, running in servers]
    return contest(line, contenders, effort, effort.rounds)
