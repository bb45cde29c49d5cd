"""A network of real buses on loopback: nodes by name, links between them, kills and restarts.

with GsbNetwork() as net:
    net.start("a")
    net.start("b", links=["a"])
    net.start("c", links=["b"])
    net.await_nodes(3)
    with net.client("a") as caller: caller.call(net.remote("c", "public/greeter"))
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polybus import gsb
from polybus.model.address import Address
from polybus.testing.bus_process import BusProcess, serve
from tests.rig.closing import Closing
from tests.rig.observer import until

OPEN_TO_NODES = "allow node:* call public/*"
PATIENCE_S = 30.0


class GsbNetwork(Closing):
    def __init__(self, acl: str = OPEN_TO_NODES, scheme: str = "tls+tcp") -> None:
        self._acl = acl
        self._scheme = scheme
        self.folder = Path(tempfile.mkdtemp(prefix="pb-net-", dir="/tmp"))
        self.buses: dict[str, BusProcess] = {}
        self._places: dict[str, tuple[str, str]] = {}  # the clients' address, the links' one
        self._ya_places: dict[str, str] = {}  # the address of clients of the deployed framing
        self.ids: dict[str, str] = {}

    def start(
        self, name: str, links: Sequence[str] = (), pinned: bool = True, **env: str
    ) -> BusProcess:
        """Start a node, or start it again on its data and its ports."""
        places = self._places.get(name, ("tcp://127.0.0.1:0", f"{self._scheme}://127.0.0.1:0"))
        flags = [f"--link={self.link_address(other, pinned)}" for other in links]
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        ya = self._ya_places.get(name, "tcp://127.0.0.1:0")
        listen = [*(f"gsb={place}" for place in places), f"gsb+ya={ya}"]
        bus = serve(*flags, listen=listen, env={"POLYBUS_ACL": self._acl, **env}, folder=folder)
        self.buses[name] = bus
        client, link = [str(address) for dialect, address in bus.listeners if dialect == "gsb"]
        self._places[name] = client, link
        self._ya_places[name] = str(bus.address("gsb+ya"))
        with self.client(name) as own:
            self.ids[name] = own.call("sys/nodes")["id"]
        return bus

    def link_address(self, name: str, pinned: bool = True) -> str:
        return f"{self._places[name][1]}#{self.ids[name]}" if pinned else self._places[name][1]

    def link_port(self, name: str) -> int:
        return Address.parse(self._places[name][1]).port

    def client_address(self, name: str) -> Address:
        return Address.parse(self._places[name][0])

    def ya_address(self, name: str) -> Address:
        return Address.parse(self._ya_places[name])

    def client(self, name: str) -> Any:
        return gsb.blocking.connect(self._places[name][0])

    def remote(self, name: str, service: str) -> str:
        """The address of a service of another node."""
        return f"/net/{self.ids[name]}/{service}"

    def reachable(self, name: str) -> dict[str, int]:
        """The nodes that a node can reach, by their names here, with the number of hops."""
        names = {node: other for other, node in self.ids.items()}
        with self.client(name) as own:
            return {names[one["id"]]: one["hops"] for one in own.call("sys/nodes")["nodes"]}

    def await_nodes(self, count: int, *names: str) -> None:
        """Wait until each of the nodes, or all, can reach `count` - 1 others."""
        for name in names or self.buses:
            until(
                lambda: len(self.reachable(name)) == count - 1,  # noqa: B023
                f"{name} reaches {count - 1} nodes",
                PATIENCE_S,
            )

    def kill(self, name: str) -> None:
        bus = self.buses.pop(name)
        bus.process.kill()
        bus.wait()
        bus.close()

    def close(self) -> None:
        for bus in self.buses.values():
            bus.close()
        shutil.rmtree(self.folder, ignore_errors=True)
