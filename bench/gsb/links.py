"""Buses in a line, near – middle – far, with TLS links between them, and one bus without links."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from bench.gsb.cases import IDLE_CPU
from bench.harness.processes import cpu_s
from bench.harness.programs import DidNotStart
from bench.harness.quiet import OWN_PIDS
from bench.harness.results import Values
from polybus import gsb
from polybus.testing.bus_process import BusProcess, serve

CLIENTS, LINKS = "tcp://127.0.0.1:0", "tls+tcp://127.0.0.1:0"
OPEN_TO_NODES = {"POLYBUS_ACL": "allow node:* call public/*"}
LINK_TIMEOUT_S = 10.0
IDLE_S = 5.0
US = 1e6


@dataclass(frozen=True)
class Node:
    pid: int
    address: str  # for clients
    link: str  # for other nodes
    id: str


def describe(bus: BusProcess) -> Node:
    client, link = [str(address) for dialect, address in bus.listeners if dialect == "gsb"]
    with gsb.blocking.connect(client) as own:
        return Node(bus.pid, client, link, own.call("sys/nodes")["id"])


def _count_nodes(node: Node) -> int:
    with gsb.blocking.connect(node.address) as own:
        return len(own.call("sys/nodes")["nodes"])


@contextmanager
def line() -> Iterator[tuple[Node, Node, Node]]:
    """Start the three buses. Yields them when near and far know each other."""
    with ExitStack() as stack:
        nodes: list[Node] = []
        for _ in range(3):
            flags = [f"--link={nodes[-1].link}"] if nodes else []
            listen = [f"gsb={CLIENTS}", f"gsb={LINKS}"]
            bus = serve(*flags, listen=listen, env=OPEN_TO_NODES)
            stack.callback(bus.close)
            nodes.append(describe(bus))
            OWN_PIDS.add(bus.pid)
            stack.callback(OWN_PIDS.discard, bus.pid)
        deadline_s = time.monotonic() + LINK_TIMEOUT_S
        while any(_count_nodes(node) < 2 for node in nodes):
            if time.monotonic() > deadline_s:
                raise DidNotStart("gsb-link: the buses are not linked")
        far, middle, near = nodes
        yield near, middle, far


@contextmanager
def alone() -> Iterator[Node]:
    bus = serve(listen=[f"gsb={CLIENTS}", f"gsb={LINKS}"])
    try:
        yield describe(bus)
    finally:
        bus.close()


class Idle:
    """The CPU time of a bus that has nothing to do."""

    def __init__(self, name: str, pid: int) -> None:
        self.name, self.pid = name, pid

    def calibrate(self, wanted_s: float) -> None:
        """The time is the same for all."""

    def measure(self) -> Values:
        before_s = cpu_s(self.pid)
        time.sleep(IDLE_S)
        return {IDLE_CPU.key: (cpu_s(self.pid) - before_s) / IDLE_S * US}
