"""How long a network of 16 buses takes until every node knows of a change.

    python -m bench.gsb.convergence [--rounds 5]

The buses form a ring with random chords. Each round kills a node with SIGKILL, which ends all its
links, and starts it again. A change is known when the paths of every node show it.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from bench.gsb.links import CLIENTS, LINKS, OPEN_TO_NODES, Node, describe
from polybus.dialects.gsb.client.gsb_blocking import BlockingClient, connect
from polybus.testing.bus_process import BusProcess, serve

NODES = 16
CHORDS = 12  # besides the ring
TIMEOUT_S = 30.0
KILLED, STARTED = "a node is killed", "a node starts"


class Ring:
    def __init__(self, folder: Path, stack: ExitStack, seed: int) -> None:
        self._folder, self._stack = folder, stack
        chance = random.Random(seed)
        ring = {(number, (number + 1) % NODES) for number in range(NODES)}
        self.edges = ring | {tuple(sorted(chance.sample(range(NODES), 2))) for _ in range(CHORDS)}
        self._places: dict[int, list[str]] = {}
        self._buses: dict[int, BusProcess] = {}
        self.nodes: dict[int, Node] = {}
        self._clients: dict[int, BlockingClient] = {}

    def start(self, number: int) -> None:
        dialled = [a if b == number else b for a, b in self.edges if number in (a, b)]
        flags = [f"--link={self.nodes[one].link}" for one in dialled if one in self.nodes]
        listen = [f"gsb={place}" for place in self._places.get(number, [CLIENTS, LINKS])]
        folder = self._folder / str(number)
        folder.mkdir(exist_ok=True)
        bus = serve(*flags, listen=listen, env=OPEN_TO_NODES, folder=folder)
        self._stack.callback(bus.close)
        self._buses[number] = bus
        node = self.nodes[number] = describe(bus)
        self._places[number] = [node.address, node.link]
        client = self._clients[number] = connect(node.address)
        client.open()
        self._stack.callback(client.close)

    def kill(self, number: int) -> None:
        self._clients.pop(number).close()
        self._buses[number].process.kill()
        self._buses[number].wait()

    def reach(self, number: int) -> dict[str, int]:
        """Return the nodes that a node reaches, and over how many links."""
        found = self._clients[number].call("sys/nodes")["nodes"]
        return {one["id"]: one["hops"] for one in found}

    def await_all(self, holds: Callable[[int], bool]) -> float:
        """Return the seconds until a condition holds at every node that lives."""
        began_s = time.perf_counter()
        for number in self._clients:
            while not holds(number):
                if time.perf_counter() - began_s > TIMEOUT_S:
                    raise SystemExit(f"node {number} does not know of the change")
        return time.perf_counter() - began_s


def measure(ring: Ring, number: int, took: dict[str, list[float]]) -> None:
    node = ring.nodes[number].id
    ring.kill(number)
    took[KILLED].append(ring.await_all(lambda one: node not in ring.reach(one)))
    ring.start(number)
    took[STARTED].append(ring.await_all(lambda one: len(ring.reach(one)) == NODES - 1))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gsb.convergence", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    took: dict[str, list[float]] = {KILLED: [], STARTED: []}
    with tempfile.TemporaryDirectory(prefix="pb-") as folder, ExitStack() as stack:
        ring = Ring(Path(folder), stack, seed=rounds)
        for number in range(NODES):
            ring.start(number)
        ring.await_all(lambda one: len(ring.reach(one)) == NODES - 1)
        for one in range(rounds):
            measure(ring, one * 7 % NODES, took)
    for change, seconds in took.items():
        text = f"{change}: median {median(seconds):.3f} s, longest {max(seconds):.3f} s"
        print(f"{text}, {len(seconds)} times")


if __name__ == "__main__":
    main()
