"""A bus with a port of every dialect, and one request to each as a new client."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyarrow.flight as flight

from polybus.server.admin_client import ask
from polybus.testing.bus_process import BusProcess, serve
from tests.rig import freud_client, gsb_peer, rqueue_client
from tests.rig.pirate.zmq_client import Bare

LISTEN = (
    "rqueue=tcp://127.0.0.1:0",
    "freud=unix:{folder}/freud.sock",
    "gsb=tcp://127.0.0.1:0",
    "gsb+ya=tcp://127.0.0.1:0",
    "pirate=tcp://127.0.0.1:0",
    "native=grpc://127.0.0.1:0",
    "admin=unix:{folder}/admin.sock",
)


@contextmanager
def serve_all(*flags: str, config: str = "") -> Iterator[BusProcess]:
    """Serve every dialect; other users may look into the bus's folder."""
    folder = Path(tempfile.mkdtemp(prefix="pb-", dir="/tmp"))
    folder.chmod(0o755)
    (folder / "bus.toml").write_text(config)
    listen = [one.format(folder=folder) for one in LISTEN]
    arguments = ("--config", str(folder / "bus.toml"), "--log-format", "json", *flags)
    try:
        with serve(*arguments, listen=listen, folder=folder) as bus:
            yield bus
    finally:
        shutil.rmtree(folder)


def _ask_rqueue(bus: BusProcess) -> None:
    with rqueue_client.connect(bus.address("rqueue")) as client:
        client.settle()


def _ask_freud(bus: BusProcess) -> None:
    with freud_client.connect(bus.address("freud")) as client:
        assert client.ask(freud_client.list_topics()).code == freud_client.OK


def _ask_gsb(bus: BusProcess) -> None:
    with gsb_peer.connect(bus.address("gsb")) as peer:
        peer.ping()


def _ask_pirate(bus: BusProcess) -> None:
    address = bus.address("pirate")
    with Bare(f"tcp://{address.host}:{address.port}", b"\x01new") as client:
        client.hello()


def _ask_native(bus: BusProcess) -> None:
    address = bus.address("native")
    with flight.connect(f"grpc://{address.host}:{address.port}") as client:
        list(client.do_action(flight.Action("topic.list", b"{}")))


def _ask_admin(bus: BusProcess) -> None:
    assert ask(bus.admin_path, "stats")["faults"] == {}


# By dialect: connect as a new client, get one answer. Raises if the bus does not serve it.
REQUESTS: Mapping[str, Callable[[BusProcess], None]] = {
    "rqueue": _ask_rqueue,
    "freud": _ask_freud,
    "gsb": _ask_gsb,
    "pirate": _ask_pirate,
    "native": _ask_native,
    "admin": _ask_admin,
}


def check_served(bus: BusProcess) -> None:
    """Check that every port serves a new client."""
    for dialect, request in REQUESTS.items():
        try:
            request(bus)
        except Exception as error:
            raise AssertionError(f"{dialect} does not serve a new client: {error!r}") from error
