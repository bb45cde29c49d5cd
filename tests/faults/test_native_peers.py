"""Faulty clients of the native port: cut connections, slow readers, crowds, wrong identities.

The clients use Arrow Flight alone. Each test ends with a bus that serves without a fault.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.flight as flight
import pytest

from polybus.server.admin_client import ask
from polybus.testing.bus_process import BusProcess, StartFailed, serve
from tests.rig.certificates import write_certificate
from tests.rig.flight_client import Put, act, batch, bodies, code_of, connect, produce
from tests.rig.observer import check_unharmed, count, log_lines, rss_bytes, until
from tests.rig.relay import Relay
from tests.rig.second_user import User

MIB = 1 << 20
GRPC = ("native=grpc://127.0.0.1:0",)
ALICE, BOB = 4242, 4343
root_only = pytest.mark.skipif(os.getuid() != 0, reason="only root can change its uid")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may read, with a short name for sockets."""
    made = Path(tempfile.mkdtemp(prefix="pb-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def start(folder: Path, config: str = "", *flags: str, listen=GRPC) -> BusProcess:
    file = folder / "bus.toml"
    file.write_text(config)
    listen = (*listen, f"admin=unix:{folder}/admin.sock")
    given = ("--config", str(file), "--log-format", "json", *flags)
    return serve(*given, listen=listen, folder=folder)


@pytest.fixture
def bus(folder) -> Iterator[BusProcess]:
    with start(folder, "[limits]\nslow_consumer_timeout_s = 1.0\n") as running:
        yield running
        check_unharmed(running)


# --- connections that end


def test_cut_stream_keeps_answered_batches_and_splits_none(bus):
    address = bus.address("native")
    with connect(bus) as watching, Relay(address.port) as relay:
        act(watching, "topic.create", topic="t", shards=3)
        client = flight.connect(f"grpc://127.0.0.1:{relay.port}")
        put = Put(client, "produce", "t")
        answered = [put.ask(b"%d" % n, b"+")["last_id"] for n in range(20)]
        for number in range(50):
            put.send(b"%d" % number, b"x" * MIB)
        relay.cut()
        while put.reader.read() is not None:  # skip answers that arrived before the cut
            pass
        with pytest.raises(flight.FlightError):
            put.writer.close()
        until(lambda: settled(watching), "the rest is stored or gone")
        found = bodies(watching, topic="t")
        assert len(found) >= answered[-1]
        assert len(found) % 2 == 0  # a batch is stored whole or not at all
        client.close()


def settled(client) -> bool:
    first = act(client, "bounds", topic="t")["next_id"]
    time.sleep(0.05)
    return act(client, "bounds", topic="t")["next_id"] == first


def deaf_put(client) -> Put:
    """Send batches without end. Their answers are long errors, because the producer is not open."""
    put = Put(client, "produce", "t")
    stamp = json.dumps({"producer": "p" * 255, "epoch": 1, "counter": 1}).encode()

    def pour() -> None:
        try:
            while True:
                put.writer.write_with_metadata(batch(b""), stamp)
        except Exception:
            return

    threading.Thread(target=pour, daemon=True).start()
    return put


def test_only_the_client_that_does_not_read_is_cut(bus):
    with connect(bus) as other:
        act(other, "topic.create", topic="t", shards=1)
        for _ in range(64):
            produce(other, "t", b"x" * MIB)
        before = rss_bytes(bus.pid)
        deaf = connect(bus)
        stream = deaf.do_get(flight.Ticket(b'{"topic": "t"}'))
        until(lambda: count(bus, "connections", "closed", "slow_consumer") == 1, "cut")
        assert produce(other, "t", b"y")["last_id"] == 65
        assert rss_bytes(bus.pid) - before < 64 * MIB
        with pytest.raises(flight.FlightError):
            stream.read_all()
        (line,) = log_lines(bus, event="connection cut", reason="slow_consumer")
        assert line["dialect"] == "native"


def test_client_that_does_not_read_answers_is_cut(bus):
    with connect(bus) as other:
        act(other, "topic.create", topic="t", shards=1)
        deaf = connect(bus)
        held = deaf_put(deaf)
        until(lambda: count(bus, "connections", "closed", "slow_consumer") == 1, "cut", 60)
        assert produce(other, "t", b"y")["first_id"] == 1
        del held


# --- waiting


def test_waits_beyond_the_limit_are_refused(folder):
    """1024 calls wait, the others are refused; news wakes all waits."""
    with start(folder, "[native]\nmax_streams = 4096\n") as bus, connect(bus) as client:
        act(client, "topic.create", topic="t", shards=1)
        places = [{"topic": "t", "shard": 0, "offset": 0}]
        with ThreadPoolExecutor(2000) as pool:
            waits = [pool.submit(wait, client, places) for _ in range(2000)]
            until(lambda: sum(one.done() for one in waits) == 2000 - 1024, "976 are refused", 60)
            assert {one.result() for one in waits if one.done()} == {"limit_reached"}
            produce(client, "t", b"x")
            outcomes = [one.result(60) for one in waits]
        assert outcomes.count("news") == 1024
        assert wait(client, places) == "news"
        check_unharmed(bus)


def wait(client, places) -> str:
    try:
        return "news" if act(client, "wait", positions=places)["news"] else "none"
    except flight.FlightError as error:
        return code_of(error)


def test_connections_beyond_the_limit_are_refused(folder):
    config = "[native]\nmax_connections = 8\n"
    with start(folder, config) as bus, connect(bus) as client:
        act(client, "topic.list")
        port = bus.address("native").port
        crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        for sock in crowd:
            sock.setblocking(False)
        until(lambda: sum(map(has_ended, crowd)) == 13, "those beyond the limit are closed")
        assert act(client, "topic.list") == {"topics": []}
        assert count(bus, "refused", "native_max_connections") == 13
        for sock in crowd:
            sock.close()
        check_unharmed(bus)


def has_ended(sock: socket.socket) -> bool:
    """Return whether the peer has hung up. Discards received bytes."""
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def test_wait_of_a_disconnected_client_ends(folder):
    with start(folder, "[native]\nmax_waits = 1\n") as bus, connect(bus) as client:
        act(client, "topic.create", topic="t", shards=1)
        places = [{"topic": "t", "shard": 0, "offset": 0}]
        relay = Relay(bus.address("native").port)
        gone = flight.connect(f"grpc://127.0.0.1:{relay.port}")
        threading.Thread(target=wait_in_turn, args=(gone, places), daemon=True).start()
        until(lambda: wait_a_little(client, places) == "limit_reached", "it waits")
        relay.cut()
        until(lambda: wait_a_little(client, places) == "none", "its place is free again")
        check_unharmed(bus)


def wait_in_turn(client, places) -> None:
    while wait_or_lost(client, places) == "limit_reached":
        pass  # the polling call takes the only place for a moment


def wait_a_little(client, places) -> str:
    try:
        return "news" if act(client, "wait", positions=places, timeout_ms=1)["news"] else "none"
    except flight.FlightError as error:
        return code_of(error)


def test_dropped_topic_ends_waits_and_reads_and_is_created_again(bus):
    with connect(bus) as client, ThreadPoolExecutor(2) as pool:
        act(client, "topic.create", topic="t", shards=1)
        put = Put(client, "produce", "t")
        put.ask(b"1")
        waiting = pool.submit(wait, client, [{"topic": "t", "shard": 0, "offset": 1}])
        stream = client.do_get(flight.Ticket(b'{"topic": "t", "wait_ms": 30000}'))
        assert stream.read_chunk().data.num_rows == 1
        act(client, "topic.drop", topic="t")
        assert waiting.result(20) in ("does_not_exist", "none")
        with pytest.raises(flight.FlightError) as caught:
            stream.read_chunk()
        assert code_of(caught.value) == "does_not_exist"
        assert put.ask(b"2")["first_id"] == 2  # producing makes it again, and ids go on
        put.close()
        assert bodies(client, topic="t") == [b"2"]


# --- tokens and certificates


TOKENS = """
# who      token                 until
ops        0123456789abcdef-ops
late       0123456789abcdef-late 2020-01-01T00:00:00Z
"""


def bearer(token: str) -> flight.FlightCallOptions:
    return flight.FlightCallOptions(headers=[(b"authorization", token.encode())])


def tokens(folder: Path, text: str = TOKENS, mode: int = 0o600) -> str:
    path = folder / "tokens"
    path.write_text(text)
    path.chmod(mode)
    return f"[native]\ntokens = '{path}'\n"


def shown(client, token: str) -> str:
    """The creator of a topic that is made with this token, or the error's code."""
    name = f"topic {time.monotonic_ns()}"
    try:
        return act(client, "topic.create", options=bearer(token), topic=name)["creator"]
    except flight.FlightUnauthenticatedError as error:
        return code_of(error)


def test_tokens_identify_callers(folder):
    with start(folder, tokens(folder)) as bus, connect(bus) as client:
        assert shown(client, "Bearer 0123456789abcdef-ops") == "key:ops"
        assert act(client, "topic.create", topic="x")["creator"] == f"uid:{os.getuid()}"
        for wrong in ("late", "no", ""):
            assert shown(client, f"Bearer 0123456789abcdef-{wrong}") == "denied"
        # gRPC refuses metadata of 8 to 16 KiB at random, and larger ones always.
        for wrong in ("0123456789abcdef-ops", "Basic 0123456789abcdef-ops", "Bearer", "x" * 6000):
            assert shown(client, wrong) == "denied"
        tokens(folder, "ops 0123456789abcdef-new\n")
        bus.signal(signal.SIGHUP)
        until(lambda: shown(client, "Bearer 0123456789abcdef-new") == "key:ops", "the new token")
        assert shown(client, "Bearer 0123456789abcdef-ops") == "denied"
        tokens(folder, "ops short\n")
        bus.signal(signal.SIGHUP)
        until(lambda: log_lines(bus, event="reload failed", what="native"), "the log says so")
        assert shown(client, "Bearer 0123456789abcdef-new") == "key:ops"


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (TOKENS, 0o644, "others may read it: chmod 600"),
        (TOKENS, 0o640, "others may read it: chmod 600"),
        ("ops short", 0o600, "line 1: a token has at least 16 characters"),
        ("ops", 0o600, "line 1: write NAME TOKEN"),
        ("\nops 0123456789abcdef tomorrow", 0o600, "line 2: write NAME TOKEN"),
        ("ops 0123456789abcdef 2027-01-01 x", 0o600, "line 1: write NAME TOKEN"),
    ],
)
def test_bus_with_an_invalid_token_file_does_not_start(folder, text, mode, says):
    with pytest.raises(StartFailed) as caught:
        start(folder, tokens(folder, text, mode)).close()
    assert caught.value.code == 2
    assert says in caught.value.stderr
    assert caught.value.stderr.count("\n") == 1
    assert caught.value.stdout == ""


def test_client_certificate_identifies_the_caller(folder):
    own, theirs = folder / "own", folder / "theirs"
    for place in (own, theirs):
        place.mkdir()
    cert, key = write_certificate(own)
    their_cert, their_key = write_certificate(theirs, "spark")
    config = f"[tls]\ncertificate = '{cert}'\nkey = '{key}'\n"
    trust = {"tls_root_certs": cert.read_bytes()}
    listen = ("native=grpc+tls://127.0.0.1:0",)
    with start(folder, config, listen=listen) as bus:
        with connect(bus, **trust) as client:
            assert act(client, "topic.create", topic="t")["creator"] == f"uid:{os.getuid()}"
        stranger = connect(bus, tls_root_certs=their_cert.read_bytes())
        with pytest.raises(flight.FlightUnavailableError):
            act(stranger, "topic.list")
    config += f"[native]\nclient_authorities = '{their_cert}'\n"
    with start(folder, config, listen=listen) as bus:
        with connect(bus, **trust) as client, pytest.raises(flight.FlightUnavailableError):
            act(client, "topic.list")
        shown_cert = {"cert_chain": their_cert.read_bytes(), "private_key": their_key.read_bytes()}
        with connect(bus, **trust, **shown_cert) as client:
            assert act(client, "topic.create", topic="u")["creator"].startswith("key:")
            assert produce(client, "u", b"x")["first_id"] == 1
        check_unharmed(bus)


def test_port_beyond_loopback_must_encrypt(folder):
    with pytest.raises(StartFailed) as caught:
        start(folder, listen=("native=grpc://0.0.0.0:0",)).close()
    assert "insecure = true" in caught.value.stderr


def test_address_in_use_is_one_line(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartFailed) as caught:
            start(folder, listen=(f"native=grpc://127.0.0.1:{port}",)).close()
    assert caught.value.code == 2
    assert caught.value.stderr.count("\n") == 1
    assert "is in use by another listener" in caught.value.stderr
    with start(folder) as bus, connect(bus) as client:  # the failed start left nothing open
        assert produce(client, "t", b"x")["first_id"] == 1


# --- users


@pytest.fixture(scope="module")
def alice() -> Iterator[User]:
    with User(ALICE) as user:
        yield user


@pytest.fixture(scope="module")
def bob() -> Iterator[User]:
    with User(BOB) as user:
        yield user


def flight_as(user: User, bus: BusProcess, what: str, *args: object) -> dict[str, object]:
    return user.ask("flight", bus.address("native").port, what, *args)


@root_only
def test_topic_of_another_user_cannot_be_changed(bus, alice, bob):
    made = flight_as(alice, bus, "act", "topic.create", {"topic": "hers", "shards": 1})
    assert made["creator"] == f"uid:{ALICE}"
    assert flight_as(bob, bus, "produce", "hers", "from bob")["first_id"] == 1  # by default
    for name, fields in (
        ("topic.drop", {}),
        ("topic.trim", {"before": {"0": 1}}),
        ("topic.configure", {"settings": {"max_bytes": 1}}),
    ):
        assert flight_as(bob, bus, "act", name, {"topic": "hers", **fields}) == {"code": "denied"}
    rule = {"rule": f"deny user:{BOB} produce hers"}
    assert flight_as(bob, bus, "act", "acl.add", rule) == {"code": "denied"}
    assert flight_as(alice, bus, "act", "acl.add", rule)["changed"] is True
    assert flight_as(bob, bus, "produce", "hers", "again") == {"code": "denied"}
    with connect(bus) as client:
        assert bodies(client, topic="hers") == [b"from bob"]
    assert flight_as(alice, bus, "act", "topic.configure", {"topic": "hers"})["topic"] == "hers"
    assert flight_as(alice, bus, "act", "topic.drop", {"topic": "hers"}) == {}


@root_only
def test_producer_of_another_user_is_denied(bus, alice, bob):
    assert flight_as(alice, bus, "act", "producer.open", {"producer": "p"})["epoch"] == 1
    for name, fields in (("producer.open", {}), ("producer.close", {"epoch": 1})):
        assert flight_as(bob, bus, "act", name, {"producer": "p", **fields}) == {"code": "denied"}
    stamp = {"producer": "p", "epoch": 1, "counter": 1}
    assert flight_as(bob, bus, "produce", "t", "x", stamp) == {"code": "denied"}
    assert flight_as(bob, bus, "act", "stage.publish", {"stages": [], "stamp": stamp}) == {
        "code": "denied"
    }
    assert flight_as(alice, bus, "produce", "t", "x", stamp)["duplicate"] is False
    flight_as(alice, bus, "act", "producer.close", {"producer": "p", "epoch": 1})
    assert flight_as(bob, bus, "act", "producer.open", {"producer": "p"})["epoch"] == 1
    assert flight_as(alice, bus, "produce", "t", "y", stamp) == {"code": "denied"}


@root_only
def test_changed_rules_apply_to_an_open_stream(bus, alice):
    with connect(bus) as client:
        act(client, "topic.create", topic="t", shards=1)
        address = bus.address("native").port
        assert alice.ask("flight_open", address, "t")["ok"] is True
        assert alice.ask("flight_send", "1")["first_id"] == 1
        ask(bus.admin_path, "acl_add", rule=f"deny user:{ALICE} produce t")
        assert alice.ask("flight_send", "2") == {"code": "denied"}
        ask(bus.admin_path, "acl_rm", rule=f"deny user:{ALICE} produce t")
        assert alice.ask("flight_send", "3")["first_id"] == 2
        assert bodies(client, topic="t") == [b"1", b"3"]


@root_only
def test_invisible_topic_does_not_exist(bus, alice, bob):
    flight_as(alice, bus, "act", "topic.create", {"topic": "hidden", "shards": 1})
    for verb in ("produce", "subscribe"):
        ask(bus.admin_path, "acl_add", rule=f"deny user:{BOB} {verb} hidden")
    assert flight_as(bob, bus, "act", "topic.info", {"topic": "hidden"}) == {
        "code": "does_not_exist"
    }
    assert flight_as(bob, bus, "act", "topic.list", {})["topics"] == []
    assert flight_as(bob, bus, "act", "bounds", {"topic": "hidden"}) == {"code": "denied"}


# --- the end, and a full disk


def test_bus_stops_with_open_streams_reads_and_waits(folder):
    with start(folder) as bus, connect(bus) as client, ThreadPoolExecutor(2) as pool:
        act(client, "topic.create", topic="t", shards=1)
        idle = Put(client, "produce", "t")
        assert idle.ask(b"1")["first_id"] == 1
        reading = client.do_get(flight.Ticket(b'{"topic": "t", "wait_ms": 30000}'))
        assert reading.read_chunk().data.num_rows == 1
        waiting = pool.submit(wait_or_lost, client, [{"topic": "t", "shard": 0, "offset": 1}])
        until(lambda: act(client, "stats"), "all are there")
        began = time.monotonic()
        assert bus.stop() == 0
        assert time.monotonic() - began < 10
        # A wait that arrives after the stop has begun is refused.
        assert waiting.result(20) in ("none", "lost", "store_closed")
        assert not log_lines(bus, level="error")


def wait_or_lost(client, places) -> str:
    try:
        return wait(client, places)
    except ValueError:  # gRPC's own error: it has no code of ours
        return "lost"


def test_full_store_is_reported_to_the_client(folder):
    limit = 24 * MIB
    code = (
        "import resource, sys; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "from polybus.cli.main import main; main()"
    )
    import sys

    command = [sys.executable, "-c", code, "serve", "--listen", GRPC[0], "--log-format", "json"]
    with BusProcess(command, folder=folder) as bus, connect(bus) as client:
        act(client, "topic.create", topic="t", shards=1)
        put = Put(client, "produce", "t")
        answers = [put.ask(bytes([n]) * MIB) for n in range(40)]
        put.close()
        codes = {one["error"]["code"] for one in answers if "error" in one}
        assert codes == {"store_full"}
        stored = [one for one in answers if "error" not in one]
        assert 0 < len(stored) < 40
        found = bodies(client, topic="t")
        assert [one[0] for one in found] == [
            n for n, answer in enumerate(answers) if "error" not in answer
        ]
        assert json.dumps(act(client, "topic.list"))
