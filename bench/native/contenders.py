"""What is measured: a bus with its store, the same port without one, and what rqueue feels."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.harness.awake import awake
from bench.harness.load import run
from bench.harness.peer import Running
from bench.harness.programs import DidNotStart, Program
from bench.harness.results import P50, P99, RATE, Values
from bench.harness.rounds import TRIAL_S
from bench.harness.workloads import OneByOne
from bench.native.load import Load, load
from bench.peers.polybus import Polybus

OURS, CEILING, ALONE = "polybus", "port without a store", "without load"
TRIAL_BATCHES = 4
LATENCY_BYTES = 16


@dataclass(frozen=True)
class Bus:
    pid: int
    url: str  # of the native port
    rqueue_port: int
    ports: Mapping[str, int]  # by dialect


@contextmanager
def bus(name: str, folder: Path, *command: str, others: Sequence[str] = ()) -> Iterator[Bus]:
    """A server with a native port, started by this command; its log is build/bench/NAME.log."""
    listen = ["native=grpc://127.0.0.1:0", "rqueue=tcp://127.0.0.1:0", *others]
    flags = [flag for one in listen for flag in ("--listen", one)]
    admin = f"admin=unix:{folder / (name.replace(' ', '-') + '.sock')}"
    with Program(name, [*command, *flags, "--listen", admin]) as program:
        ports: dict[str, int] = {}
        while (line := program.line()) != "ready":
            if found := re.fullmatch(r"listening (\w+) \w+://127\.0\.0\.1:(\d+)", line):
                ports[found[1]] = int(found[2])
        if not {"native", "rqueue"} <= set(ports):
            raise DidNotStart(f"{name} named no ports; see {program.log}")
        url = f"grpc://127.0.0.1:{ports['native']}"
        yield Bus(program.pid, url, ports["rqueue"], ports)


class Produce:
    """Batches through a port, from several processes at once."""

    def __init__(
        self,
        name: str,
        bus: Bus,
        load: Load,
        *,
        producers: int,
        streams: int,
        messages: int,
        window: int,
    ) -> None:
        self.name, self.pid = name, bus.pid
        self._load = load
        self._per_turn = producers * streams * messages
        self._turns = TRIAL_BATCHES
        load.tell(f"streams {streams} {messages} {window}")

    def calibrate(self, wanted_s: float) -> None:
        while (took_s := self._load.tell(f"run {self._turns}")) < TRIAL_S:
            self._turns *= 4
        self._turns = max(1, round(self._turns * wanted_s / took_s))

    def measure(self) -> Values:
        seconds = self._load.tell(f"run {self._turns}")
        return {RATE.key: self._per_turn * self._turns / seconds}


class Read:
    """One process reads a whole topic, over and over."""

    def __init__(self, bus: Bus, load: Load, messages: int) -> None:
        self.name, self.pid = OURS, bus.pid
        self._load, self._messages = load, messages
        self._passes = 1

    def calibrate(self, wanted_s: float) -> None:
        took_s = self._load.tell(f"read {self._messages}")
        self._passes = max(1, round(wanted_s / took_s))

    def measure(self) -> Values:
        started_s = time.perf_counter()
        for _ in range(self._passes):
            self._load.tell(f"read {self._messages}")
        return {RATE.key: self._passes * self._messages / (time.perf_counter() - started_s)}


class Latency:
    """rqueue, one message at a time."""

    def __init__(self, name: str, bus: Bus) -> None:
        self.name, self.pid = name, bus.pid
        running = Running(bus.pid, bus.rqueue_port, bus.rqueue_port, "")
        self._work = OneByOne(LATENCY_BYTES).work(Polybus(), running)

    def calibrate(self, wanted_s: float) -> None:
        """The least there is, of some thousand messages: under load that takes long enough."""

    def measure(self) -> Values:
        with awake():
            return self._latency()

    def _latency(self) -> Values:
        outcome = run(self._work.plan, self._work.least_cycles)
        return {P50.key: outcome[P50.key], P99.key: outcome[P99.key]}


@contextmanager
def endless(bus: Bus, topic: str, processes: int, messages: int, window: int) -> Iterator[Load]:
    """A load that does not end while the block lasts."""
    with load(bus.url, topic, processes) as beside:
        beside.tell(f"streams 1 {messages} {window}")
        beside.tell(f"run {TRIAL_BATCHES}")
        beside.begin("run 1000000000")
        yield beside


class Beside(Latency):
    """The same with a full load on the native port of the same bus, while it is measured.

    The load keeps the cores awake. Something else that did (awake.py) would be one more load: it
    gives way at once to its own session alone, and to another (Linux's autogroups) as any does.
    """

    def __init__(self, bus: Bus, topic: str, processes: int, messages: int, window: int) -> None:
        super().__init__(OURS, bus)
        self._bus = bus
        self._load = (topic, processes, messages, window)

    def measure(self) -> Values:
        with endless(self._bus, *self._load):
            return self._latency()
