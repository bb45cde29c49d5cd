"""Mutated frames over all ports of a live bus: it serves on, logs no traceback, keeps its size."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from polybus.testing.bus_process import BusProcess
from tests.attack.bystander import Bystander
from tests.attack.port_fuzzer import PortFuzzer, open_ports
from tests.attack.whole_bus import check_served, serve_all
from tests.rig.observer import check_unharmed, rss_bytes, stats
from tests.rig.soak_runs import SoakRun

SHORT_FRAMES = 20_000
LONG_FRAMES = 1_000_000  # of one run; the record sums them (docs/soak-runs.jsonl)
ROUNDS = 10  # the first two reach the plateau of memory
MAX_GROWTH = 1.1


@pytest.fixture
def bus() -> Iterator[BusProcess]:
    with serve_all() as running:
        yield running


def fuzz(bus: BusProcess, seed: int, frames: int) -> tuple[PortFuzzer, float]:
    """Send the frames in rounds. Returns the fuzzer, and RSS at the end over the plateau's."""
    fuzzer = PortFuzzer(open_ports(bus), seed)
    sizes = []
    for _ in range(ROUNDS):
        fuzzer.send_bursts(frames // ROUNDS)
        assert bus.process.poll() is None, f"the bus died of seed {seed}"
        check_unharmed(bus)
        check_served(bus)
        sizes.append(rss_bytes(bus.pid))
    assert all(fuzzer.sent.values()), f"a port was left out: {fuzzer.sent}"
    return fuzzer, sizes[-1] / max(sizes[: ROUNDS // 5])


@pytest.mark.sabotage("bad-lines-raise", expects="errors in the log: .*unexpected error")
def test_mutated_frames_harm_no_port(bus: BusProcess) -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    with Bystander(bus) as bystander:
        fuzz(bus, seed, SHORT_FRAMES)
    bystander.check_served()
    closed = stats(bus)["connections"]["closed"]
    assert closed.keys() - {"peer"}, "the bus cut no connection: the frames did not arrive"
    assert bus.stop() == 0


@pytest.mark.soak
def test_a_million_mutated_frames_leave_memory_where_it_was(bus: BusProcess) -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    run = SoakRun("attack/test_port_fuzz.py", seed)
    with Bystander(bus) as bystander:
        fuzzer, growth = fuzz(bus, seed, LONG_FRAMES)
    run.record(
        **{f"frames_{name}": sent for name, sent in fuzzer.sent.items()},
        crashes=0,
        tracebacks=0,
        growth_max=round(growth, 3),
        **bystander.figures(),
    )
    assert growth <= MAX_GROWTH, f"RSS grew by {growth:.2f} with seed {seed}"
