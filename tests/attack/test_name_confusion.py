"""Names that look like another topic's: dead letters and the topics of the bus, attacked by bob.

Bob is a real second user with a raw client of each dialect, and root runs the bus. Bob has the
default rights of every user; the tests show the requests that are beyond them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polybus import fdq, native
from polybus.server.admin_client import ask
from polybus.store.engine_registry import canonical_url, open_store
from polybus.testing import bus_process
from polybus.testing.bus_process import BusProcess, StartFailed
from tests.attack.whole_bus import LISTEN
from tests.rig import gsb_peer, rqueue_client
from tests.rig.observer import check_unharmed, count, until
from tests.rig.pirate.zmq_client import Bare
from tests.rig.raw_attempts import BODY, DENIED, OK, SENT
from tests.rig.second_user import User

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root to run as another user")

BOB = 4343
TOPIC, LETTERS, CALLS = "orders", "orders.dlq", "gsb.calls"
AUDIT = "[gsb]\naudit = true\n"
WITH_ANSWERS = ("native", "freud", "gsb", "pirate")


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that every user may look into, with a short name."""
    made = Path(tempfile.mkdtemp(prefix="pb-names-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def start(folder: Path, config: str = "") -> BusProcess:
    file = folder / "bus.toml"
    file.write_text(config)
    listen = [one.format(folder=folder) for one in LISTEN]
    flags = ("--config", str(file), "--log-format", "json")
    return bus_process.serve(*flags, listen=listen, folder=folder)


@pytest.fixture
def bus(folder: Path) -> Iterator[BusProcess]:
    with start(folder) as bus:
        yield bus
        check_unharmed(bus)


@pytest.fixture
def audited(folder: Path) -> Iterator[BusProcess]:
    with start(folder, AUDIT) as bus:
        yield bus
        check_unharmed(bus)


@pytest.fixture(scope="module")
def bob() -> Iterator[User]:
    with User(BOB) as user:
        yield user


def url(bus: BusProcess) -> str:
    return f"polybus://127.0.0.1:{bus.address('native').port}"


def produce(bus: BusProcess, *messages: tuple[str, bytes]) -> None:
    with fdq.Producer(url(bus)) as producer:
        for key, body in messages:
            producer.produce(TOPIC, key, body)


def consume(bus: BusProcess, done: list[bytes]) -> fdq.Consumer:
    """A consumer of root that fails on the message `bad` and appends all others to `done`."""

    def handle(envelope: Any) -> None:
        if envelope.message == b"bad":
            raise ValueError("bad\x1b[2J")
        done.append(envelope.message)

    consumer = fdq.Consumer(url(bus))
    consumer.consume(TOPIC, "c", handle, max_deliver=2, first_backoff_s=0.01, last_backoff_s=0.1)
    return consumer


def bodies(bus: BusProcess, topic: str) -> list[bytes]:
    return [envelope.message for envelope in fdq.replay(url(bus), topic)]


def exists(bus: BusProcess, topic: str) -> Callable[[], bool]:
    def look() -> bool:
        with native.Client(url(bus)) as client:
            return bool(client.act("topic.list", pattern=topic)["topics"])

    return look


def alarms(bus: BusProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask(bus.admin_path, "alarms")["alarms"]
    return found


def outcomes(bus: BusProcess, user: User, verb: str, topic: str) -> dict[str, str]:
    """Send a request in every dialect. Returns each dialect's answer; rqueue has none."""
    assert user.attempt("rqueue", bus.address("rqueue"), verb, topic) == SENT
    return {
        dialect: user.attempt(dialect, bus.address(dialect), verb, topic)
        for dialect in WITH_ANSWERS
    }


# --- dead letters


@pytest.mark.sabotage("inheritance-off", expects=r"\{'native': 'ok'\} != ")
def test_user_denied_on_a_topic_cannot_read_its_dead_letters(bus, bob):
    produce(bus, ("a", b"bad"))
    with consume(bus, []):
        until(exists(bus, LETTERS), "the dead letter")
    ask(bus.admin_path, "acl_add", rule=f"deny user:{BOB} subscribe {TOPIC}")
    before = count(bus, "refused", "subscribe_denied")
    assert outcomes(bus, bob, "subscribe", LETTERS) == DENIED
    assert count(bus, "refused", "subscribe_denied") == before + 3  # rqueue, Freud, GSB
    assert bob.attempt("native", bus.address("native"), "group.join", LETTERS) == "denied"
    tested = bus.run(
        "acl", "test", f"user:{BOB}", "subscribe", LETTERS, "--admin", str(bus.admin_path)
    )
    rule = f'"deny user:{BOB} subscribe {TOPIC}" (acl.toml)'
    assert tested.stdout == f"denied: rule {rule} names the caller\n"
    (letter,) = fdq.replay(url(bus), LETTERS)
    assert letter.headers["polybus.reason"] == b"ValueError: bad\\x1b[2J"


@pytest.mark.sabotage("squatted-letters-filled", expects=r"assert \[b'bad'\] == \[\]")
def test_dead_letters_never_go_to_a_topic_of_another_user(bus, bob):
    native = bus.address("native")
    assert bob.attempt("native", native, "topic.create", LETTERS) == OK
    produce(bus, ("a", b"bad"), ("a", b"after"), ("b", b"other"))
    done: list[bytes] = []
    with consume(bus, done):
        until(lambda: done == [b"other"], "another key goes on")
        until(lambda: alarms(bus) or bodies(bus, LETTERS), "the alarm")
        assert bodies(bus, LETTERS) == []
        (alarm,) = alarms(bus)
        assert (alarm["kind"], alarm["object"]) == ("dead_letters_blocked", TOPIC)
        assert f"{TOPIC} cannot be written to {LETTERS}" in alarm["text"]
        assert f"belongs to uid:{BOB}" in alarm["text"]
        assert done == [b"other"]  # the failed message holds its key
        removed = bus.run("topic", "rm", LETTERS, "--bus", url(bus))
        assert removed.returncode == 0, removed.stderr
        until(lambda: done == [b"other", b"after"], "the key goes on")
        until(lambda: not alarms(bus), "the alarm is cleared")
    assert bodies(bus, LETTERS) == [b"bad"]
    assert bob.attempt("native", native, "topic.drop", LETTERS) == "denied"


def test_user_cannot_take_the_name_of_dead_letters_to_come(bus, bob):
    produce(bus, ("a", b"bad"))
    assert bob.attempt("freud", bus.address("freud"), "create", LETTERS) == "no"
    assert bob.attempt("native", bus.address("native"), "topic.create", LETTERS) == OK
    with consume(bus, []):
        until(lambda: bodies(bus, LETTERS) == [b"bad"], "the dead letter")
    assert alarms(bus) == []
    assert bob.attempt("native", bus.address("native"), "topic.drop", LETTERS) == "denied"
    assert bob.attempt("native", bus.address("native"), "topic.trim", LETTERS) == "denied"


def test_user_cannot_forge_dead_letters(bus, bob):
    """`polybus pipeline dead-letters` would send them where their headers say."""
    produce(bus, ("a", b"bad"))
    with consume(bus, []):
        until(exists(bus, LETTERS), "the dead letter")
    with rqueue_client.connect(bus.address("rqueue")) as reader:
        reader.send(rqueue_client.subscribe(LETTERS.encode()))
        reader.settle()
        assert outcomes(bus, bob, "produce", LETTERS) == DENIED
        assert reader.settle() == []
    assert bodies(bus, LETTERS) == [b"bad"]
    assert count(bus, "dropped", "denied") == 1  # of rqueue
    ask(bus.admin_path, "acl_add", rule=f"allow user:{BOB} produce *.dlq")
    assert bob.attempt("native", bus.address("native"), "produce", LETTERS) == OK
    assert bodies(bus, LETTERS) == [b"bad", BODY]


def test_ephemeral_dead_letters_cannot_be_forged(bus, bob):
    """Freud's compiled path asks the policy, too."""
    freud = bus.address("freud")
    assert bob.attempt("freud", freud, "create", "news.dlq") == OK
    assert bob.attempt("freud", freud, "produce", "news.dlq") == "no"


# --- topics of the bus


@pytest.mark.sabotage("reserved-off", expects=r"\{'native': 'ok'\} != ")
def test_user_can_neither_read_nor_change_the_call_log(audited, bob):
    with gsb_peer.connect(audited.address("gsb")) as caller:
        caller.send(gsb_peer.call("sys/ping", "1", b"x"))
        caller.reply()
    until(lambda: len(bodies(audited, CALLS)) == 1, "the call is logged")
    assert outcomes(audited, bob, "subscribe", CALLS) == DENIED
    assert outcomes(audited, bob, "produce", CALLS) == DENIED
    native = audited.address("native")
    for verb in ("topic.drop", "topic.trim", "topic.configure", "group.join"):
        assert bob.attempt("native", native, verb, CALLS) == "denied", verb
    assert bob.attempt("native", native, "topic.create", CALLS) != OK
    assert bob.attempt("native", native, "topic.reshard", CALLS) != OK
    assert bob.attempt("freud", audited.address("freud"), "create", CALLS) != OK
    assert bob.attempt("freud", audited.address("freud"), "delete", CALLS) == "no"
    assert BODY not in bodies(audited, CALLS)
    ask(audited.admin_path, "acl_add", rule=f"allow user:{BOB} subscribe {CALLS}")
    assert bob.attempt("native", native, "subscribe", CALLS) == OK


def test_no_client_takes_the_name_of_the_call_log(bus, bob):
    """The names of the bus are reserved, also while it does not write them."""
    native = bus.address("native")
    assert bob.attempt("native", native, "topic.create", CALLS) == "denied"
    assert bob.attempt("native", native, "produce", CALLS) == "denied"
    assert bob.attempt("freud", bus.address("freud"), "create", CALLS) == "no"
    assert bob.attempt("pirate", bus.address("pirate"), "subscribe", CALLS) == "DENIED"
    refused = bus.run("topic", "create", CALLS, "--bus", url(bus))  # by root
    assert refused.returncode == 4
    assert "it is reserved for the log of GSB calls" in refused.stderr


def test_removed_call_log_is_created_again(audited):
    def call(number: int) -> None:
        with gsb_peer.connect(audited.address("gsb")) as caller:
            caller.send(gsb_peer.call("sys/ping", str(number), b"x" * number))
            caller.reply()

    call(1)
    until(lambda: len(bodies(audited, CALLS)) == 1, "the first call is logged")
    assert audited.run("topic", "rm", CALLS, "--bus", url(audited)).returncode == 0
    until(exists(audited, CALLS), "the topic is created again")
    call(2)
    until(lambda: bodies(audited, CALLS), "the second call is logged")
    assert b'"request_bytes":2' in bodies(audited, CALLS)[0]


def test_bus_does_not_log_calls_to_a_topic_that_a_client_created(folder):
    """A folder of a release that did not reserve the name."""
    with start(folder) as bus:
        place = canonical_url(f"lmdb:{bus.data}")
    before = bus.log_path.read_text()
    store = open_store(place)
    store.create(CALLS, 1, {"creator": {"uid": BOB, "service": "", "key": ""}})
    store.close()
    with pytest.raises(StartFailed) as caught:
        start(folder, AUDIT).close()
    assert caught.value.code == 2
    line = caught.value.stderr.removeprefix(before)
    assert line == (
        f"polybus: gsb.audit: topic {CALLS} was created by uid:{BOB}, not by the bus; start once"
        f" with audit = false, run `polybus topic rm {CALLS}` as an admin, and start again\n"
    )
    with start(folder) as bus:
        assert bus.run("topic", "rm", CALLS, "--bus", url(bus)).returncode == 0
    with start(folder, AUDIT) as bus:
        until(exists(bus, CALLS), "the call log")
        check_unharmed(bus)


def test_pirate_subscriber_does_not_decide_how_long_dead_letters_stay(bus):
    address = bus.address("pirate")
    produce(bus, ("k", b"good"))
    with Bare(f"tcp://{address.host}:{address.port}", b"\x01reader") as reader:
        reader.hello()
        assert reader.sub(LETTERS)[0] == "OK"
        assert reader.unsub(LETTERS)[0] == "OK"
    assert exists(bus, LETTERS)()
