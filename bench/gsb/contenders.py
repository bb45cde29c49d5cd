"""The contenders: a caller and a service in processes of their own, and the server between them.

Both are started and never forked, because nng breaks after a fork.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.gsb.cases import BYTES, CALLS, ITEMS
from bench.gsb.links import Node
from bench.gsb.wire import ITEM_BYTES
from bench.gsb.wire import ITEMS as ITEM_STREAM
from bench.gsb.wire import NUMBERS as NUMBER_STREAM
from bench.harness.crew import Crew, crew
from bench.harness.places import REPOSITORY, Unavailable, compiled
from bench.harness.processes import cpu_s
from bench.harness.programs import DidNotStart, Program, free_port
from bench.harness.quiet import OWN_PIDS
from bench.harness.results import Metric, Values
from bench.harness.rounds import TRIAL_S
from bench.native.contenders import Bus, bus
from bench.peers.nats import Nats

LEAST = {"calls": 500, NUMBER_STREAM: 2000, ITEM_STREAM: 16}
METRICS: dict[str, tuple[Metric, float]] = {
    "calls": (CALLS, 1.0),
    NUMBER_STREAM: (ITEMS, 1.0),
    ITEM_STREAM: (BYTES, float(ITEM_BYTES)),
}


class Pair:
    """One column: a caller driven line by line, and the server between, if there is one."""

    def __init__(self, name: str, pid: int | None, caller: Crew, order: str, whole: int) -> None:
        self.name, self.pid = name, pid
        self._caller, self._order, self._whole = caller, order, whole
        self._count = LEAST[order]

    def _run(self) -> dict[str, float]:
        outcome: dict[str, float] = json.loads(self._caller.ask(f"{self._order} {self._count}")[0])
        return outcome

    def calibrate(self, wanted_s: float) -> None:
        while (took_s := self._run()["seconds"]) < TRIAL_S and self._count < 1 << 24:
            self._count *= 2
        self._count = max(LEAST[self._order], round(self._count * wanted_s / took_s))
        self._count = self._whole or self._count

    def measure(self) -> Values:
        before_s = 0.0 if self.pid is None else cpu_s(self.pid)
        outcome = self._run()
        metric, each = METRICS[self._order]
        values = {metric.key: self._count * each / outcome.pop("seconds"), **outcome}
        if self.pid is not None:
            values["server_cpu_us_each"] = (cpu_s(self.pid) - before_s) / self._count * 1e6
        return values


@contextmanager
def pair(
    name: str,
    kind: str,
    address: str,
    in_flight: int,
    order: str,
    pid: int | None,
    whole: int = 0,
    *,
    far: Node | None = None,
) -> Iterator[Pair]:
    """Run caller and service of one kind. `whole` is the count of a measurement; 0: by time.

    The service is at `far`, if that is given, and the caller at `address`.
    """
    label = f"gsb-{name.replace(' ', '-').replace('/', '-')}"
    with ExitStack() as stack:
        at = address if far is None else far.address
        command = [sys.executable, "-m", "bench.gsb.service", kind, at]
        service = stack.enter_context(Program(f"{label}-service", command))
        if service.line() != "ready":
            raise DidNotStart(f"{label}: the service is not ready; see {service.log}")
        OWN_PIDS.add(service.pid)
        stack.callback(OWN_PIDS.discard, service.pid)
        node = () if far is None else (far.id,)
        arguments = (kind, address, str(in_flight), *node)
        caller = stack.enter_context(
            crew(f"{label}-caller", "bench.gsb.caller", *arguments, processes=1)
        )
        yield Pair(name, pid, caller, order, whole)


# --- servers ----------------------------------------------------------------------


@contextmanager
def polybus(folder: Path) -> Iterator[Bus]:
    command = (sys.executable, "-m", "polybus", "serve", "--data", str(folder / "data"))
    listen = ("gsb=tcp://127.0.0.1:0",)
    with bus("gsb-polybus", folder, *command, others=listen) as running:
        yield running


@contextmanager
def relay(gives_credit: bool) -> Iterator[tuple[int, str]]:
    """Run the relay. Yields its pid and address."""
    credit = ["credit"] if gives_credit else []
    with Program("gsb-relay", [compiled("gsb_relay", "gsb_relay.c"), *credit]) as running:
        yield running.pid, f"tcp://127.0.0.1:{int(running.line())}"


@contextmanager
def nats() -> Iterator[tuple[int | None, str]]:
    with Nats().start() as running:
        yield running.pid, f"nats://127.0.0.1:{running.publish_port}"


def direct(scheme: str) -> str:
    """Return an address where the service itself listens."""
    return f"{scheme}127.0.0.1:{free_port()}"


def require(module: str) -> None:
    import importlib.util

    if importlib.util.find_spec(module) is None:
        raise Unavailable(f"{module} is not installed: make setup (in {REPOSITORY})")
