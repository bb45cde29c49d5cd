"""CURVE: the id is that of the key, and a refused client fails at once.

No timeout here is ever waited for: they are long, and so a silence would be a failure.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import zmq.auth
from zmq.utils import z85

from polybus import pirate
from polybus.dialects.pirate.client import client_keys, pirate_blocking
from polybus.dialects.pirate.server.curve_key_folder import CurveKeyFolder, make_pair, read_public
from polybus.errors import ConfigError, Denied, NotConnected, OutcomeUnknown, UsageError
from tests.rig.observer import connections, count, until
from tests.rig.pirate import wire
from tests.rig.pirate.pirate_bus import PirateBus
from tests.rig.pirate.zmq_client import Bare

LONG_S = 60.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def bus():
    with PirateBus(env={"POLYBUS_PIRATE_CURVE": "true"}) as one:
        yield one


@pytest.fixture
def ring(bus, tmp_path) -> Path:
    """A client's folder of keys: its own, as `polybus keys new` makes it, and the bus's."""
    return ring_of(bus, tmp_path / "keys")


def ring_of(bus, folder) -> Path:
    make_pair(folder, "client")
    shutil.copy(bus.folder / "data" / "pirate" / "server.key", folder)
    return folder


def folder(bus) -> CurveKeyFolder:
    return CurveKeyFolder(bus.folder / "data" / "pirate")


def let_in(bus, ring, name):
    folder(bus).allow(read_public(ring / "client.key"), name)


def opened(bus, ring, tmp_path, **more):
    settings = {"state": tmp_path / "state", "curve": ring, "timeout_s": LONG_S} | more
    client = pirate_blocking.connect(bus.endpoint, **settings)
    client.open()
    return client


def let_in_and_opened(bus, ring, tmp_path, name):
    let_in(bus, ring, name)
    return opened_when_let_in(bus, ring, tmp_path)


def opened_when_let_in(bus, ring, tmp_path):
    found = []

    def opens():
        try:
            found.append(opened(bus, ring, tmp_path))
        except Denied:  # the bus looks once a second
            return False
        return True

    until(opens, "the bus lets the key in")
    return found[0]


def allowed(bus, name) -> Path:
    return folder(bus).allowed_folder / f"{name}.key"


def noticed(bus, change: Callable[[], object]) -> None:
    """Make a change, and wait until the bus has reloaded its keys."""
    before = bus.process.log().count("reloaded")
    change()
    until(lambda: bus.process.log().count("reloaded") > before, "the bus sees it")


def bare(bus, ring) -> Bare:
    own = client_keys.load_keys(ring)
    return Bare(bus.endpoint, own.client_id, curve=own, try_s=LONG_S)


def test_unknown_key_is_refused_at_once_with_advice(bus, ring, tmp_path):
    key, _ = zmq.auth.load_certificate(ring / "client.key")
    client_id = sha256(z85.decode(key)).hexdigest()[:32]
    with pytest.raises(
        Denied, match=rf"does not know the key of client hex:{client_id}.*keys allow"
    ):
        opened(bus, ring, tmp_path)


def test_allowed_key_is_the_client_id(bus, ring, tmp_path, topic):
    client = let_in_and_opened(bus, ring, tmp_path, "alice")
    key, _ = zmq.auth.load_certificate(ring / "client.key")
    assert client.id == sha256(z85.decode(key)).digest()[:16]
    client.subscribe(topic)
    assert client.put(topic, b"secret") == 1
    assert client.get(topic).body == b"secret"
    client.close()


def test_largest_frames_pass_with_curve(bus, ring, tmp_path, topic):
    """Sealed, a frame of 1 MiB has more than 1 MiB, and so it is at the bus's own bound."""
    client = let_in_and_opened(bus, ring, tmp_path, "heavy")
    client.subscribe(topic)
    body = bytes(range(256)) * (3 * MIB // 256)
    client.put(topic, body)
    assert client.get(topic).body == body
    client.close()
    with bare(bus, ring) as one:
        one.hello()
        asked = wire.counted(wire.PUT, one.client, one.epoch, 9, topic, bytes(64 * MIB + 1))
        assert one.ask(asked) == wire.error("TOO_LARGE")


def test_revoked_key_cuts_an_idle_client(bus, ring, tmp_path, topic):
    """libzmq has given up by then, and has nowhere to send to."""
    client = let_in_and_opened(bus, ring, tmp_path, "mallory")
    client.subscribe(topic)
    refused = count(bus.process, "refused", "pirate_unknown_key")
    folder(bus).revoke("mallory")
    until(lambda: count(bus.process, "refused", "pirate_unknown_key") > refused, "it is shut out")
    with pytest.raises(OutcomeUnknown, match="does not know the key"):
        client.put(topic, b"")
    with pytest.raises(Denied, match="does not know the key"):
        client.get(topic)
    client.close()


def test_key_revoked_before_the_first_message_is_refused(bus, ring):
    """The bus identifies a connection by its first message, and this one had none."""
    noticed(bus, lambda: let_in(bus, ring, "silent"))
    before = len(connections(bus.process))
    with bare(bus, ring) as one:
        until(lambda: len(connections(bus.process)) > before, "it is connected")
        noticed(bus, lambda: folder(bus).revoke("silent"))
        one.send([b"", *wire.hello(one.client, 1)])
        until(lambda: count(bus.process, "dropped", "key_revoked"), "it is not heard")
        assert one.receive(0.0) is None
    assert count(bus.process, "connections", "closed", "key_revoked")


def test_renamed_and_replaced_keys_apply_to_open_connections(bus, ring, tmp_path, topic):
    client = let_in_and_opened(bus, ring, tmp_path, "before")
    client.subscribe(topic)
    noticed(bus, lambda: allowed(bus, "before").rename(allowed(bus, "after")))
    names = {one["identity"] for one in connections(bus.process)}
    assert "key:after" in names
    assert "key:before" not in names
    client.put(topic, b"")
    other = ring_of(bus, tmp_path / "other")
    noticed(bus, lambda: allowed(bus, "after").write_text((other / "client.key").read_text()))
    with pytest.raises(OutcomeUnknown, match="does not know the key"):
        client.put(topic, b"")
    client.close()


def test_revoked_key_leaves_the_request_pending(bus, ring, tmp_path, topic):
    done = bus.process.run("keys", "allow", str(ring / "client.key"), "--name", "eve")
    assert done.returncode == 0, done.stderr
    client = opened_when_let_in(bus, ring, tmp_path)
    client.subscribe(topic)
    assert bus.process.run("keys", "revoke", "eve").returncode == 0

    def shut_out():
        try:
            client.put(topic, b"")
        except OutcomeUnknown as error:
            return "does not know the key" in str(error)
        return False

    until(shut_out, "the bus shuts it out")
    assert client.pending is not None
    client.close()


def test_client_without_key_is_denied_by_a_curve_bus(bus, tmp_path):
    with pytest.raises(Denied, match=r"requires a CURVE key; use --curve"):
        opened(bus, None, tmp_path)


def test_client_with_key_is_rejected_by_a_plain_bus(endpoint, ring, tmp_path):
    client = pirate_blocking.connect(
        endpoint, state=tmp_path / "state", curve=ring, timeout_s=LONG_S
    )
    with pytest.raises(ConfigError, match="does not speak CURVE"):
        client.open()


def test_wrong_server_key_is_reported(bus, ring, tmp_path):
    shutil.copy(ring / "client.key", ring / "server.key")
    with pytest.raises(NotConnected, match=r"is server.key its public key\?"):
        opened(bus, ring, tmp_path, timeout_s=0.5, tries=1)


def test_shell_reports_an_unknown_key(bus, ring, tmp_path):
    flags = ("--server", bus.endpoint, "--state", str(tmp_path / "s"), "--keys", str(ring))
    done = bus.process.run("pirate", *flags, "--timeout", str(LONG_S))
    assert done.returncode == 4
    assert "does not know the key" in done.stderr


# --- the files


def test_id_other_than_the_key_id_is_rejected(ring):
    with pytest.raises(UsageError, match="the id must be that of the key"):
        pirate.connect(id="me", curve=ring)
    own = client_keys.load_keys(ring).client_id
    pirate.connect(id=own, curve=ring)


def test_unusable_keys_are_rejected(ring, tmp_path):
    with pytest.raises(ConfigError, match=r"client.key_secret does not exist; create it with"):
        client_keys.load_keys(tmp_path)
    (ring / "client.key_secret").chmod(0o644)
    with pytest.raises(ConfigError, match="is readable by other users; run: chmod 600"):
        client_keys.load_keys(ring)
    (ring / "client.key_secret").chmod(0o600)
    (ring / "server.key").unlink()
    with pytest.raises(ConfigError, match=r"server.key does not exist; copy it from the bus"):
        client_keys.load_keys(ring)
    (ring / "server.key").write_text("nonsense")
    with pytest.raises(ConfigError, match=r"server\.key"):
        client_keys.load_keys(ring)
    shutil.copy(ring / "client.key", ring / "client.key_secret")
    with pytest.raises(ConfigError, match="has no secret key"):
        client_keys.load_keys(ring)


def test_default_key_folder():
    assert client_keys.keys_folder({"XDG_CONFIG_HOME": "/c"}) == Path("/c/polybus/keys")
    assert client_keys.keys_folder({"HOME": "/h"}) == Path("/h/.config/polybus/keys")
    with pytest.raises(ConfigError):
        client_keys.keys_folder({})
