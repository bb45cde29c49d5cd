"""The identity of a client: by the kernel, by a token, by a certificate; with and without TLS."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polybus import errors
from polybus.native import Client, ClientOptions
from tests.rig.certificates import write_certificate
from tests.rig.native_bus import NativeBus
from tests.rig.observer import until

SECRET = "a-secret-of-some-length"
OLD = "a-secret-that-has-expired"
CONFIG = """
acl = ["allow key:importer produce orders*", "allow key:importer create orders*",
       "deny key:importer subscribe orders.secret"]
[native]
tokens = "{folder}/tokens"
default_shards = 1
[tls]
certificate = "{folder}/cert.pem"
key = "{folder}/key.pem"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("security")
    write_certificate(found)
    tokens = found / "tokens"
    tokens.touch(0o600)
    tokens.write_text(f"importer {SECRET}\nimporter {OLD} 2020-01-01T00:00:00Z\n")
    (found / "mine").write_text(SECRET + "\n")
    (found / "old").write_text(OLD)
    (found / "wrong").write_text("x" * 30)
    (found / "bus.toml").write_text(CONFIG.format(folder=found))
    return found


@pytest.fixture(scope="module")
def bus(folder: Path) -> Iterator[NativeBus]:
    """Encrypted."""
    with NativeBus("--config", str(folder / "bus.toml"), scheme="grpc+tls") as running:
        yield running


def client(bus: NativeBus, folder: Path, **more: Any) -> Client:
    options = ClientOptions(connect_timeout_s=0.0, authorities=folder / "cert.pem", **more)
    return Client(bus.url, options)


def test_token_identifies_the_caller(bus, folder):
    with client(bus, folder, token_file=folder / "mine") as known:
        with known.producer() as producer:
            producer.produce("orders", [b"x"]).result(20)
        assert known.topic("orders")["creator"] == "key:importer"
        assert next(known.read("orders")).column("body").to_pylist() == [b"x"]


def test_url_names_the_token_file(bus, folder):
    url = f"{bus.url}?authorities={folder}/cert.pem&token_file={folder}/mine"
    with Client(url, ClientOptions(connect_timeout_s=0.0)) as known:
        assert known.create_topic("orders.by-url")["creator"] == "key:importer"


def test_loopback_user_without_a_token(bus, folder):
    with client(bus, folder) as unknown, unknown.producer() as producer:
        future = producer.produce("orders", [b"x"])
        with pytest.raises(errors.Denied):
            future.result(20)
        # After a refusal the producer continues with topics that it may write.
        assert producer.produce("others", [b"x"]).result(20).first_id == 1


def test_rule_for_a_token_name_applies(bus, folder):
    with client(bus, folder, token_file=folder / "mine") as known:
        known.create_topic("orders.secret")
        with pytest.raises(errors.Denied):
            list(known.read("orders.secret"))
        with pytest.raises(errors.Denied):
            known.bounds("orders.secret")


@pytest.mark.parametrize(("name", "says"), [("old", "expired"), ("wrong", "not known")])
def test_invalid_token_is_denied(bus, folder, name, says):
    with client(bus, folder, token_file=folder / name) as bad:
        with pytest.raises(errors.Denied, match=says):
            bad.topics()
        with pytest.raises(errors.Denied, match=says):
            bad.producer()
        with pytest.raises(errors.Denied, match=says):
            list(bad.read("orders"))


def test_expired_token_fails_at_the_next_stream(bus, folder):
    """An open stream keeps its identity; a new stream is refused.

    If a batch has its counter already, the producer fails, because the outcome of the batch is
    unknown. Else it continues once the token is valid again.
    """
    token = folder / "changing"
    token.write_text(SECRET)
    with client(bus, folder, token_file=token) as known, known.producer() as producer:
        producer.produce("orders.a", [b"x"]).result(20)
        token.write_text("x" * 30)
        with pytest.raises(errors.Denied):
            producer.produce("orders.b", [b"x"]).result(20)
        token.write_text(SECRET)
        with contextlib.suppress(errors.Denied):
            producer.produce("orders.b", [b"y"]).result(20)
        with known.producer() as another:
            another.produce("orders.b", [b"y"]).result(20)


def test_missing_token_file_is_reported(bus, folder):
    with (
        client(bus, folder, token_file=folder / "missing") as lost,
        pytest.raises(errors.ConfigError, match=r"cannot read token .*missing"),
    ):
        lost.topics()


def test_untrusted_bus_is_not_connected(bus, folder, tmp_path):
    write_certificate(tmp_path)
    with client(bus, tmp_path) as careful, pytest.raises(errors.Unavailable):
        careful.topics()
    plain = Client(bus.url.replace("polybus+tls", "polybus"), ClientOptions(connect_timeout_s=0.0))
    with plain, pytest.raises(errors.Unavailable):
        plain.topics()


def test_new_token_is_valid_after_sighup(bus, folder):
    later = "a-secret-that-came-later"
    with (folder / "tokens").open("a") as file:
        file.write(f"late {later}\n")
    (folder / "later").write_text(later)
    bus.process.signal(signal.SIGHUP)
    options = ClientOptions(
        connect_timeout_s=0.0, authorities=folder / "cert.pem", token_file=folder / "later"
    )
    while True:  # pytest's own timeout ends it
        try:
            with Client(bus.url, options) as late:
                assert late.create_topic("late")["creator"] == "key:late"
            break
        except errors.Denied:
            continue


def test_certificate_identifies_the_caller(folder, tmp_path):
    """By the first of its names: the test's certificates are localhost's."""
    write_certificate(tmp_path)
    rules = CONFIG.format(folder=folder).replace("key:importer", "key:localhost")
    clients = f'client_authorities = "{tmp_path}/cert.pem"\n[tls]'
    config = tmp_path / "bus.toml"
    config.write_text(rules.replace("[tls]", clients))
    with NativeBus("--config", str(config), scheme="grpc+tls") as bus:
        mine = {"certificate": tmp_path / "cert.pem", "key": tmp_path / "key.pem"}
        with client(bus, folder, **mine) as known:
            assert known.create_topic("orders")["creator"] == "key:localhost"
        with client(bus, folder) as unknown, pytest.raises(errors.Unavailable):
            unknown.topics()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[NativeBus, Path]]:
    """A bus whose certificate a test may change."""
    write_certificate(tmp_path)
    (tmp_path / "tokens").touch(0o600)
    (tmp_path / "bus.toml").write_text(CONFIG.format(folder=tmp_path))
    with NativeBus("--config", str(tmp_path / "bus.toml"), scheme="grpc+tls") as running:
        yield running, tmp_path


def trusts(bus: NativeBus, authorities: Path) -> bool:
    try:
        with Client(bus.url, ClientOptions(connect_timeout_s=0.0, authorities=authorities)) as one:
            one.topics()
    except errors.Unavailable:
        return False
    return True


def test_new_certificate_is_used_after_sighup_and_open_streams_continue(own):
    bus, folder = own
    old = folder / "old.pem"
    old.write_bytes((folder / "cert.pem").read_bytes())
    with client(bus, folder) as there, there.producer() as producer:
        producer.produce("t", [b"a"]).result(20)
        write_certificate(folder)
        bus.process.signal(signal.SIGHUP)
        until(lambda: trusts(bus, folder / "cert.pem"), "newcomers see the new certificate")
        assert producer.produce("t", [b"b"]).result(20).last_id == 2
        assert not trusts(bus, old)
    assert bus.stop() == 0


def test_invalid_certificate_keeps_the_old_one(own):
    bus, folder = own
    good = folder / "good.pem"
    good.write_bytes((folder / "cert.pem").read_bytes())
    (folder / "cert.pem").write_text("no certificate")
    bus.process.signal(signal.SIGHUP)
    until(lambda: "reload failed" in bus.process.log(), "the log says so")
    assert trusts(bus, good)
