"""Bus and client with different state: two clients with one id, late copies, kills, a backup."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from polybus.dialects.pirate.client import pirate_blocking
from polybus.errors import Conflict
from tests.rig.observer import count, until
from tests.rig.pirate import wire
from tests.rig.pirate.pirate_bus import PirateBus
from tests.rig.pirate.zmq_client import Bare

FENCED = wire.error("FENCED")


@pytest.fixture
def bus() -> Iterator[PirateBus]:
    with PirateBus() as one:
        yield one


@pytest.fixture
def bare(bus: PirateBus) -> Iterator[Bare]:
    with Bare(bus.endpoint, b"a", try_s=5.0) as one:
        yield one


@pytest.mark.sabotage("client-epochs-off", expects=r"\('OK', 2, 0\) == \('ERR', 'FENCED'\)")
def test_newer_of_two_clients_with_one_id_fences_the_older(bare):
    older, newer = (bare.ask(wire.hello(b"a", number))[1] for number in (1, 2))
    assert (older, newer) == (1, 2)
    assert bare.ask(wire.counted(wire.SUB, b"a", newer, 1, "t")) == ("OK", 1, 0)
    for op in (wire.SUB, wire.UNSUB, wire.PUT):
        body = [b"x"] * (op == wire.PUT)
        assert bare.ask(wire.counted(op, b"a", older, 2, "t", *body)) == FENCED
    assert bare.ask(wire.get(b"a", older, "t", 0)) == FENCED
    assert bare.ask(wire.counted(wire.PUT, b"a", newer, 2, "t", b"y")) == ("OK", 2, 1)
    assert bare.ask(wire.get(b"a", newer, "t", 0)) == ("MSG", 1, b"y")
    assert bare.ask(wire.get(b"a", newer + 1, "t", 0)) == FENCED, "an epoch that no HELLO was given"
    assert bare.ask(wire.get(b"b", 1, "t", 0)) == FENCED, "no HELLO before"


@pytest.mark.sabotage("greetings-off", expects=r"\('OK', 3, 5\) == \('OK', 1, 5\)")
def test_late_copy_of_hello_fences_no_client_after_a_kill(bus, bare):
    assert bare.ask(wire.hello(b"a", 7)) == ("OK", 1, 0)
    assert bare.ask(wire.hello(b"a", 8)) == ("OK", 2, 0)
    bare.ask(wire.counted(wire.SUB, b"a", 2, 5, "t"))
    assert bare.ask(wire.hello(b"a", 7)) == ("OK", 1, 5)
    assert bare.ask(wire.get(b"a", 2, "t", 0)) == wire.NONE
    bus.kill()
    bus.start()
    assert bare.insist(wire.hello(b"a", 7)) == ("OK", 1, 5)
    assert bare.ask(wire.hello(b"a", 8)) == ("OK", 2, 5)
    assert bare.ask(wire.get(b"a", 2, "t", 0)) == wire.NONE


@pytest.mark.sabotage("last-off", expects=r"\('OK', 6, 0\) == \('OK', 6, 2\)")
def test_read_positions_survive_a_kill_of_the_bus(bus, bare):
    """GETs do not wait for the disk, but positions are stored before the client's next SUB is."""
    bare.hello()
    bare.sub("t")
    for body in (b"1", b"2", b"3"):
        bare.put("t", body)
    for last in range(3):
        assert bare.ask(wire.get(b"a", 1, "t", last))[:2] == ("MSG", last + 1)
    bare.sub("other")
    bus.kill()
    bus.start()
    bare.hello()
    assert bare.sub("t") == ("OK", bare.counter, 2)
    assert bare.ask(wire.get(b"a", bare.epoch, "t", 0)) == ("MSG", 3, b"3")


@pytest.mark.sabotage("collect-all", expects="assert 20 == 5")
def test_unread_messages_are_kept_and_read_ones_trimmed(bus, bare):
    with Bare(bus.endpoint, b"slow") as slow:
        for one in (bare, slow):
            one.hello()
            one.sub("t")
        for number in range(20):
            bare.put("t", b"%d" % number)
        bare.ask(wire.get(b"a", 1, "t", 20))
        slow.ask(wire.get(b"slow", 1, "t", 5))
        until(lambda: count(bus.process, "pirate", "collected") >= 5, "what both have read goes")
        assert slow.ask(wire.get(b"slow", 1, "t", 0)) == ("MSG", 6, b"5")
        assert count(bus.process, "pirate", "collected") == 5
        found = bus.process.run("store", "info", str(bus.process.data), "--json").stdout
        assert [one["first_id"] for one in json.loads(found)["topics"]] == [6]


def test_restored_bus_is_detected_and_no_message_skipped(tmp_path):
    """Ids are given a second time then: a client that read on from its LAST would miss some."""
    backup = tmp_path / "backup"
    with PirateBus() as bus:
        with _client(bus, tmp_path) as client:
            client.subscribe("t")
            client.put("t", b"kept")
            taken = bus.process.run("store", "backup", str(bus.process.data), str(backup))
            assert taken.returncode == 0, taken.stderr
            for body in (b"lost 1", b"lost 2"):
                client.put("t", body)
            read = [message.body for message in client.messages("t", wait=False)]
            assert read == [b"kept", b"lost 1", b"lost 2"]
        bus.stop()
        restored = _restored(bus, backup)
        try:
            _go_on(restored, tmp_path)
        finally:
            restored.process.close()


def _client(bus: PirateBus, tmp_path: Path, **options) -> pirate_blocking.BlockingClient:
    return pirate_blocking.connect(bus.endpoint, state=tmp_path / "state", **options)


def _restored(bus: PirateBus, backup: Path) -> PirateBus:
    """Replace the store by the backup, and restart the bus at the same address."""
    data = bus.process.data / "store"
    data.rename(data.with_name("lost"))
    done = bus.process.run("store", "restore", str(backup), str(data))
    assert done.returncode == 0, done.stderr
    bus.start()
    return bus


def _go_on(bus: PirateBus, tmp_path: Path) -> None:
    with _client(bus, tmp_path) as client:
        assert any("restored from a backup" in notice for notice in client.notices)
        client.put("t", b"new 2")  # the bus gave its id before, to a message that is lost
        with pytest.raises(Conflict, match="reread"):
            client.get("t")
    with _client(bus, tmp_path, reread=True) as client:
        bodies = [message.body for message in client.messages("t", wait=False)]
    assert bodies[-1] == b"new 2"
