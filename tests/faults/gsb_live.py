"""A live bus for GSB's fault tests: what each may ask of it, and what must be left of a test."""

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
    # Short on purpose: the path of a Unix socket has at most 107 bytes.
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
    found: dict[str, Any] = stats(bus)["gsb"]
    return found


def check_nothing_is_left(bus: BusProcess) -> None:
    """Nobody is connected any more: then no call, no service and nobody who waits is left."""
    until(lambda: tables(bus)["connections"] == 0, "connections end")
    left = {
        name: tables(bus)[name] for name in ("services", "open_calls", "serving", "full", "waiting")
    }
    assert not any(left.values()), left
    check_unharmed(bus)


def failure(reply: pb.CallReply) -> Failure:
    """What a FULL reply with code 500 says."""
    assert (reply.code, reply.type) == (500, 0), reply
    return read_failure(reply.data)


def party(bus: BusProcess, **more: Any) -> Peer:
    return connect(bus.address("gsb"), **more)


def party_over_ipc(bus: BusProcess, **more: Any) -> Peer:
    return connect(next(one for _, one in bus.listeners if one.scheme == "ipc"), **more)
