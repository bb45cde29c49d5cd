"""A live bus for GSB's fault tests, its peers, and the check that a test leaves no state."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.testing.bus_process import BusProcess, serve
from tests.rig.gsb_peer import Peer, connect
from tests.rig.gsb_wire import Failure, read_failure
from tests.rig.observer import check_unharmed, stats, until

MAX_PACKET_BYTES = 1 << 20
SETTINGS = {
    "POLYBUS_GSB_MAX_PACKET_BYTES": str(MAX_PACKET_BYTES),
    "POLYBUS_LOG_FORMAT": "json",
}


@contextmanager
def serving(env: Mapping[str, str] | None = None) -> Iterator[BusProcess]:
    # A short path, because the path of a Unix socket has at most 107 bytes.
    with (
        tempfile.TemporaryDirectory(prefix="pb-", dir="/tmp") as folder,
        serve(
            "--engine",
            "memory:",
            listen=("gsb=tcp://127.0.0.1:0", f"gsb=ipc://{folder}/gsb.sock"),
            env={**SETTINGS, **(env or {})},
        ) as bus,
    ):
        yield bus


def tables(bus: BusProcess) -> dict[str, Any]:
    section: dict[str, Any] = stats(bus)["gsb"]
    return section


def check_no_state_left(bus: BusProcess) -> None:
    """Check that the bus has no call, service or waiting peer once all connections have ended."""
    until(lambda: tables(bus)["connections"] == 0, "all connections end")
    left = {
        name: tables(bus)[name] for name in ("services", "open_calls", "serving", "full", "waiting")
    }
    assert not any(left.values()), left
    check_unharmed(bus)


def failure(reply: pb.CallReply) -> Failure:
    """Return the failure in a FULL reply with code 500."""
    assert (reply.code, reply.type) == (500, 0), reply
    return read_failure(reply.data)


def failure_codes(packets: list[pb.Packet]) -> list[int]:
    """Return the codes of the failures among packets; each packet must be a failed FULL."""
    return [failure(packet.call_reply).code for packet in packets]


def connect_tcp(bus: BusProcess, **options: Any) -> Peer:
    return connect(bus.address("gsb"), **options)


def connect_ipc(bus: BusProcess, **options: Any) -> Peer:
    address = next(address for _, address in bus.listeners if address.scheme == "ipc")
    return connect(address, **options)
