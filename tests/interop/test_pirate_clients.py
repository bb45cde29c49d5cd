"""`polybus pirate clients`: the clients of a bus are listed and removed."""

from __future__ import annotations

import json

import pytest

from polybus.testing.bus_process import BusProcess, run
from tests.attack.whole_bus import serve_all
from tests.rig.pirate import wire
from tests.rig.pirate.zmq_client import Bare


def clients(bus: BusProcess, *args: str) -> str:
    done = run("pirate", "clients", *args, "--admin", str(bus.admin_path))
    assert done.returncode == 0, done.stderr
    return done.stdout


def listed(bus: BusProcess, *args: str) -> dict[str, dict]:
    return {row["client"]: row for row in json.loads(clients(bus, "ls", "--json", *args))}


def open_client(bus: BusProcess, name: bytes) -> Bare:
    address = bus.address("pirate")
    return Bare(f"tcp://{address.host}:{address.port}", name)


@pytest.fixture
def bus():
    with serve_all(config="[pirate]\nmax_clients = 2\n") as running:
        yield running


def test_clients_are_listed_with_their_user(bus):
    assert clients(bus, "ls") == "no clients\n"
    with open_client(bus, b"a") as first:
        first.hello()
        first.sub("t")
        first.put("t", b"x")
    row = listed(bus)["a"]
    assert (row["user"], row["epoch"], row["subscriptions"]) == ("uid:0", 1, 1)
    assert row["counter"] == first.counter
    assert listed(bus, "--user", "uid:1") == {}


def test_removed_client_frees_its_place_and_is_fenced(bus):
    with open_client(bus, b"a") as first, open_client(bus, b"b") as second:
        first.hello()
        first.sub("t")
        first.put("t", b"x")
        second.hello()
        third = open_client(bus, b"c")
        assert third.ask(wire.hello(b"c", 1)) == wire.error("BUSY")
        epoch, counter = first.epoch, first.counter
        assert "removed: a with 1 subscriptions" in clients(bus, "rm", "a")
        assert set(listed(bus)) == {"b"}
        again = wire.counted(wire.PUT, b"a", epoch, counter + 1, "t", b"y")
        assert first.ask(again) == wire.error("FENCED")
        assert third.ask(wire.hello(b"c", 1))[0] == "OK"
        third.close()
        clients(bus, "rm", "c")
        # Its counter is kept, so a request that it repeats is not executed twice.
        first.hello()
        assert first.epoch > epoch
        repeated = wire.counted(wire.PUT, b"a", first.epoch, counter, "t", b"x")
        assert first.ask(repeated) in (("OK", counter, 1), wire.error("STALE"))


def test_unknown_client_is_an_error(bus):
    done = run("pirate", "clients", "rm", "unknown", "--admin", str(bus.admin_path))
    assert done.returncode == 4
    assert "no client unknown" in done.stderr
