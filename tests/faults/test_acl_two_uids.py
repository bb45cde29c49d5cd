"""The policy between real users, with different rights, over each kind of socket.

Every test here needs root, because only root can run as another user.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from polybus.model.address import Address
from polybus.server.admin_client import ask
from polybus.testing import bus_process
from polybus.testing.bus_process import BusProcess, StartFailed
from tests.rig import rqueue_client
from tests.rig.observer import check_unharmed, connections, count, log_lines, until
from tests.rig.rqueue_client import publish, subscribe
from tests.rig.second_user import Done, User

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root to run as another user")

ALICE, BOB = 4242, 4343
STAFF = 4999
NOBODY, NOGROUP = 65534, 65534  # an account that every Linux has, and its group
ORDERS = b"orders.eu"


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that every user may look into, with a short name."""
    made = Path(tempfile.mkdtemp(prefix="pb-acl-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def start(folder: Path, config: str = "") -> BusProcess:
    file = folder / "bus.toml"
    file.write_text(config)
    listen = (
        "rqueue=tcp://127.0.0.1:0",
        "rqueue=tcp://[::1]:0",
        f"rqueue=unix:{folder}/rqueue.sock",
        f"admin=unix:{folder}/admin.sock",
    )
    flags = ("--config", str(file), "--log-format", "json")
    return bus_process.serve(*flags, listen=listen, folder=folder)


@pytest.fixture
def bus(folder: Path) -> Iterator[BusProcess]:
    with start(folder) as bus:
        yield bus
        check_unharmed(bus)


@pytest.fixture(scope="module")
def alice() -> Iterator[User]:
    with User(ALICE, groups=[STAFF]) as user:
        yield user


@pytest.fixture(scope="module")
def bob() -> Iterator[User]:
    with User(BOB) as user:
        yield user


def acl(bus: BusProcess, *words: str) -> Done:
    done = bus.run("acl", *words, "--admin", str(bus.admin_path))
    return Done(done.returncode, done.stdout, done.stderr)


def add(bus: BusProcess, rule: str) -> None:
    ask(bus.admin_path, "acl_add", rule=rule)


def places(bus: BusProcess) -> dict[str, Address]:
    ipv4, ipv6, unix = (address for dialect, address in bus.listeners if dialect == "rqueue")
    return {"tcp": ipv4, "tcp6": ipv6, "unix": unix}


KINDS = ["tcp", "unix"]


# --- the point of it all


@pytest.mark.sabotage("no-rules", expects=r"assert \[\(b'orders\.eu.* == \[\(b'open'")
@pytest.mark.parametrize("kind", KINDS)
def test_one_user_may_publish_and_another_may_not(bus, alice, bob, kind):
    add(bus, f"allow user:{ALICE} produce orders.*")
    with rqueue_client.connect(bus.address()) as reader:
        reader.send(subscribe(ORDERS), subscribe(b"open"))
        reader.settle()
        for user, text in ((bob, b"from bob"), (alice, b"from alice")):
            link = user.connect(places(bus)[kind])
            link.send(publish(ORDERS, text), publish(b"open", text))
            link.settle()  # a probe is free of rules
        found = reader.messages(3)
    assert found == [(b"open", b"from bob"), (ORDERS, b"from alice"), (b"open", b"from alice")]
    assert count(bus, "dropped", "denied") == 1
    (line,) = log_lines(bus, event="refused")
    assert (line["user"], line["topic"], line["reason"]) == (
        f"uid:{BOB}",
        "orders.eu",
        "produce_denied",
    )


@pytest.mark.sabotage("no-rules", expects=r"where 1 = settle\(\)")
@pytest.mark.parametrize("kind", KINDS)
def test_one_user_may_subscribe_and_another_may_not(bus, alice, bob, kind):
    add(bus, f"deny user:{BOB} subscribe *")
    links = [user.connect(places(bus)[kind]) for user in (alice, bob)]
    for link in links:
        link.send(subscribe(ORDERS))
        link.settle()
    with rqueue_client.connect(bus.address()) as writer:
        writer.send(publish(ORDERS, b"x"))
        writer.settle()
    assert links[0].messages(1) == [(ORDERS, b"x")]
    assert links[1].settle() == 0
    assert count(bus, "refused", "subscribe_denied") == 1


def test_acl_test_explains_the_verdict(bus):
    add(bus, f"allow user:{ALICE} produce orders.*")
    rule = f'rule "allow user:{ALICE} produce orders.*" (acl.toml)'
    allowed = acl(bus, "test", f"user:{ALICE}", "produce", "orders.eu")
    assert allowed == (0, f"allowed: {rule} names the caller\n", "")
    denied = acl(bus, "test", f"user:{BOB}", "produce", "orders.eu")
    assert denied == (4, f"denied: {rule} names others, and no rule names this caller\n", "")


def test_rule_change_applies_to_connected_clients_at_once(bus, alice, bob):
    reader, writer = alice.connect(places(bus)["tcp"]), bob.connect(places(bus)["unix"])
    reader.send(subscribe(ORDERS))
    reader.settle()

    def say(text: bytes) -> None:
        writer.send(publish(ORDERS, text))
        writer.settle()

    say(b"1")
    add(bus, f"deny user:{BOB} produce orders.*")
    say(b"2")
    ask(bus.admin_path, "acl_rm", rule=f"deny user:{BOB} produce orders.*")
    say(b"3")
    add(bus, f"deny user:{ALICE} subscribe orders.*")
    say(b"4")
    ask(bus.admin_path, "acl_rm", rule=f"deny user:{ALICE} subscribe orders.*")
    say(b"5")  # the subscription does not come back by itself
    reader.send(subscribe(ORDERS))
    reader.settle()
    say(b"6")
    assert [text for _, text in reader.messages(3)] == [b"1", b"3", b"6"]
    assert count(bus, "refused", "subscription_revoked") == 1


# --- identity


@pytest.mark.parametrize("kind", ["tcp", "tcp6", "unix"])
def test_connections_lists_user_names(bus, alice, kind):
    alice.connect(places(bus)[kind])
    until(lambda: connections(bus), "the connection")
    assert [one["identity"] for one in connections(bus)] == [f"uid:{ALICE}"]


def blocked(bus: BusProcess, user: User, kind: str, topic: bytes) -> bool:
    """Publish as this user. Returns whether the bus denied it."""
    before = count(bus, "dropped", "denied")
    link = user.connect(places(bus)[kind])
    link.send(publish(topic, b"x"))
    link.settle()
    link.close()
    return count(bus, "dropped", "denied") > before


def test_process_groups_apply_over_a_unix_socket(bus, alice, bob):
    add(bus, f"deny group:{STAFF} produce supplementary")
    add(bus, f"deny group:{BOB} produce main")
    assert blocked(bus, alice, "unix", b"supplementary")
    assert not blocked(bus, bob, "unix", b"supplementary")
    assert blocked(bus, bob, "unix", b"main")


def test_database_groups_apply_over_tcp(bus, alice):
    """Over TCP the kernel reports a uid without groups, so the groups of the account apply."""
    add(bus, f"deny group:{NOGROUP} produce x")
    add(bus, f"deny group:{STAFF} produce y")
    with User(NOBODY, gid=STAFF) as nobody:
        assert blocked(bus, nobody, "tcp", b"x")
        assert not blocked(bus, nobody, "unix", b"x")
        assert not blocked(bus, nobody, "tcp", b"y")
        assert blocked(bus, nobody, "unix", b"y")
    assert not blocked(bus, alice, "tcp", b"y")


def test_service_is_known_over_a_unix_socket_only(bus, alice):
    unit = Path(f"/proc/{alice.pid}/exe").readlink()
    add(bus, f"deny service:{unit} produce x")
    assert blocked(bus, alice, "unix", b"x")
    assert not blocked(bus, alice, "tcp", b"x")


# --- the admin socket


def test_rights_of_a_user_at_the_admin_socket(bus, alice):
    path = str(bus.admin_path)
    assert alice.polybus("stats", "--admin", path).code == 0
    tested = alice.polybus("acl", "test", "anonymous", "admin", "x", "--admin", path)
    assert tested.code == 4
    assert tested.stdout.startswith("denied: no rule speaks of it")
    for command in (
        ("connections",),
        ("acl", "ls"),
        ("acl", "add", "allow", f"user:{ALICE}", "produce", "x"),
        ("acl", "rm", "allow", f"user:{ALICE}", "produce", "x"),
    ):
        refused = alice.polybus(*command, "--admin", path)
        assert refused.code == 4
        assert refused.stderr.startswith("polybus: ")
        assert refused.stderr.count("\n") == 1
    assert ask(bus.admin_path, "acl_ls") == []


def test_admin_rule_makes_an_admin(bus, alice):
    path = str(bus.admin_path)
    add(bus, f"allow user:{ALICE} admin *")
    assert alice.polybus("connections", "--admin", path).code == 0
    added = alice.polybus("acl", "add", "deny", "anonymous", "produce", "x", "--admin", path)
    assert added == (0, "added: deny anonymous produce x\n", "")


def test_revoked_admin_is_denied(bus, alice):
    """Also on a connection that it made as an admin."""
    add(bus, f"allow user:{ALICE} admin *")
    link = alice.connect(Address("unix", path=str(bus.admin_path)))
    until(lambda: alice.polybus("connections", "--admin", str(bus.admin_path)).code == 0, "admin")
    ask(bus.admin_path, "acl_rm", rule=f"allow user:{ALICE} admin *")
    link.send(b'{"verb": "connections"}\n')
    refusal = b'{"error":{"code":"denied"'
    assert link.receive(len(refusal)) == refusal


# --- rules that stay


def test_rules_survive_a_restart(folder, bob):
    with start(folder) as bus:
        add(bus, f"deny user:{BOB} produce x")
    with start(folder) as bus:
        assert blocked(bus, bob, "tcp", b"x")
        assert not blocked(bus, bob, "tcp", b"y")


def test_rules_survive_a_kill(folder, bob):
    with start(folder) as bus:
        add(bus, f"deny user:{BOB} produce x")
        bus.process.kill()
        bus.wait()
    with start(folder) as bus:
        assert blocked(bus, bob, "tcp", b"x")


def reload(bus: BusProcess, event: str, **fields: object) -> dict[str, object]:
    before = len(log_lines(bus, event=event, what="policy"))
    bus.signal(signal.SIGHUP)
    until(lambda: len(log_lines(bus, event=event, what="policy")) > before, event)
    return log_lines(bus, event=event, what="policy")[-1]


def test_sighup_reloads_rules_unless_the_file_is_invalid(folder, bob):
    config, kept = folder / "bus.toml", folder / "data" / "acl.toml"
    with start(folder, f'acl = ["deny user:{BOB} produce x"]\n') as bus:
        add(bus, f"deny user:{BOB} produce y")
        config.write_text(f'acl = ["deny user:{BOB} produce z"]\n')
        assert reload(bus, "reloaded")["rules"] == 2
        assert [blocked(bus, bob, "tcp", topic) for topic in (b"x", b"y", b"z")] == [
            False,
            True,
            True,
        ]
        for file in (config, kept):
            good = file.read_text()
            file.write_text("acl = [\n")
            assert str(file) in str(reload(bus, "reload failed")["reason"])
            assert blocked(bus, bob, "tcp", b"z")
            assert blocked(bus, bob, "tcp", b"y")
            file.write_text(good)
        config.write_text("")
        reload(bus, "reloaded")
        assert not blocked(bus, bob, "tcp", b"z")
        assert blocked(bus, bob, "tcp", b"y")


@pytest.mark.parametrize(
    ("where", "text", "says"),
    [
        ("acl.toml", "acl = [", "acl.toml: not valid TOML"),
        ("acl.toml", "[[acl]]\nrule = 'no'", "has 1 words"),
        (
            "bus.toml",
            'acl = ["allow bob produce x"]',
            "bus.toml: acl: 'allow bob produce x': who is",
        ),
        ("bus.toml", 'acl = ["allow user:no-such produce x"]', "no user called 'no-such'"),
    ],
)
def test_bus_with_invalid_rules_does_not_start(folder, where, text, says):
    data = folder / "data"
    data.mkdir(mode=0o700)
    if where == "acl.toml":
        (data / where).write_text(text)
    with pytest.raises(StartFailed) as caught:
        start(folder, text if where == "bus.toml" else "").close()
    assert caught.value.code == 2
    assert says in caught.value.stderr
    assert caught.value.stderr.count("\n") == 1
    assert caught.value.stdout == ""


# --- quotas


def freud_bus(folder: Path, config: str) -> BusProcess:
    file = folder / "bus.toml"
    file.write_text(config)
    listen = (f"freud=unix:{folder}/freud.sock", f"admin=unix:{folder}/admin.sock")
    flags = ("--config", str(file), "--log-format", "json")
    return bus_process.serve(*flags, listen=listen, folder=folder)


LIST = bytes([6, 0, 0, 0, 0, 0, 0, 0])  # a Freud request with an empty answer
EMPTY_LIST = bytes([0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0])


def is_served(user: User, bus: BusProcess) -> bool:
    """Connects, asks, and keeps the connection; False if it was closed at once."""
    try:
        link = user.connect(bus.address("freud"))
        link.send(LIST)
        return link.receive(len(EMPTY_LIST)) == EMPTY_LIST
    except ConnectionError:
        return False


def test_each_user_has_its_own_connection_quota(folder, bob):
    config = f"[quotas]\nquota_connections = 2\n[quotas.users.{BOB}]\nquota_connections = 3\n"
    with freud_bus(folder, config) as bus, User(ALICE) as alice:
        assert [is_served(alice, bus) for _ in range(4)] == [True, True, False, False]
        assert [is_served(bob, bus) for _ in range(4)] == [True, True, True, False]
        assert count(bus, "refused", "quota_connections") == 3
        reached = {"event": "quota reached", "quota": "quota_connections"}
        until(lambda: bool(log_lines(bus, **reached)), "the refusal is logged")
        line = log_lines(bus, **reached)[0]
        assert (line["user"], line["limit"]) == (f"uid:{ALICE}", 2)
        alice.ask("close", 0)
        until(lambda: len(connections(bus)) == 4, "the place is free again")
        assert [is_served(alice, bus) for _ in range(2)] == [True, False]
        check_unharmed(bus)


def test_creator_sets_rules_for_its_topic(folder, alice, bob):
    def request(kind: int, name: bytes) -> bytes:
        payload = len(name).to_bytes(4, "little") + name
        return kind.to_bytes(4, "little") + len(payload).to_bytes(4, "little") + payload

    create, delete, subscribe_to = 0, 1, 2
    ok, no = bytes(8), bytes([2, 0, 0, 0, 0, 0, 0, 0])
    with freud_bus(folder, "") as bus:
        hers, his = (user.connect(bus.address("freud")) for user in (alice, bob))
        hers.send(request(create, b"hers"))
        assert hers.receive(8) == ok
        his.send(request(delete, b"hers"))
        assert his.receive(8) == no
        admin = ("--admin", str(bus.admin_path))
        rule = f"deny user:{BOB} subscribe hers"
        assert bob.polybus("acl", "add", rule, *admin).code == 4
        assert alice.polybus("acl", "add", rule, *admin) == (0, f"added: {rule}\n", "")
        his.send(request(subscribe_to, b"hers"))
        assert his.receive(8) == no
        assert bob.polybus("acl", "rm", rule, *admin).code == 4
        assert alice.polybus("acl", "ls", "hers", *admin).code == 0
        add(bus, f"deny user:{ALICE} delete *")
        hers.send(request(delete, b"hers"))
        assert hers.receive(8) == no  # deny wins over the creator's right
        refused = alice.polybus("acl", "rm", f"deny user:{ALICE} delete *", *admin)
        assert refused.code == 4
        ask(bus.admin_path, "acl_rm", rule=f"deny user:{ALICE} delete *")
        hers.send(request(delete, b"hers"))
        assert hers.receive(8) == ok
        check_unharmed(bus)
