"""Buses that are linked: calls, streams and rules between nodes, over real TLS connections."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from polybus import gsb
from polybus.errors import (
    DeadlinePassed,
    Denied,
    DoesNotExist,
    MalformedRequest,
    ServiceFailed,
    ServiceGone,
)
from tests.rig.gsb_network import GsbNetwork
from tests.rig.observer import open_descriptors, until

UNKNOWN = "0x" + "1" * 40


@pytest.fixture(scope="module")
def line() -> Iterator[GsbNetwork]:
    """Four nodes on a line: a – b – c – d."""
    with GsbNetwork() as net:
        net.start("a")
        for name, other in (("b", "a"), ("c", "b"), ("d", "c")):
            net.start(name, links=[other])
        net.await_nodes(4)
        yield net


@pytest.fixture
def service(line) -> Iterator[Any]:
    with line.client("d") as client:
        yield client


@pytest.fixture
def caller(line) -> Iterator[Any]:
    with line.client("a") as client:
        yield client


def test_nodes_know_the_shortest_way_to_each_other(line):
    assert line.reachable("a") == {"b": 1, "c": 2, "d": 3}
    assert line.reachable("c") == {"b": 1, "d": 1, "a": 2}


def test_a_call_reaches_a_service_three_hops_away_and_names_its_caller(line, service, caller):
    @service.service("public/greeter")
    def greet(call: gsb.Call) -> object:
        return {"hello": call.data["name"], "caller": call.caller, "address": call.address}

    answer = caller.call(line.remote("d", "public/greeter"), {"name": "Ada"})
    assert answer == {"hello": "Ada", "caller": line.ids["a"], "address": "public/greeter"}
    short = caller.call(f"{line.ids['d']}/public/greeter/method", {"name": "Bob"})
    assert short["address"] == "public/greeter/method"
    local = service.call(line.remote("d", "public/greeter"), {"name": "Eve"})
    assert local["caller"].startswith("local:")  # the own node's id means local


def test_streams_arrive_whole_and_in_order(line, service, caller):
    @service.service("public/count")
    def count(call: gsb.Call) -> object:
        yield from range(call.data)

    assert list(caller.stream(line.remote("d", "public/count"), 5000)) == list(range(5000))


def test_large_data_goes_both_ways(line, service, caller):
    @service.service("public/echo")
    def echo(call: gsb.Call) -> object:
        return call.data

    data = bytes(range(256)) * 16384  # 4 MiB
    assert caller.call(line.remote("d", "public/echo"), data) == data


def test_failures_of_a_service_and_of_the_way_to_it(line, service, caller):
    @service.service("public/broken")
    def broken(call: gsb.Call) -> object:
        raise ValueError("as planned")

    with pytest.raises(ServiceFailed, match="as planned"):
        caller.call(line.remote("d", "public/broken"))
    with pytest.raises(DoesNotExist, match="no service"):
        caller.call(line.remote("d", "public/missing"))
    with pytest.raises(DoesNotExist, match="unknown node"):
        caller.call(f"/net/{UNKNOWN}/public/x")
    with pytest.raises(MalformedRequest):
        caller.call("/net/nothing/public/x")


def test_only_public_services_are_visible(line, service, caller):
    @service.service("private")
    def private(call: gsb.Call) -> object:
        return 1

    assert service.call("private") == 1
    with pytest.raises(DoesNotExist, match="no service 'private'"):
        caller.call(line.remote("d", "private"))
    with pytest.raises(DoesNotExist):
        caller.call(line.remote("d", "sys/stats"))
    with pytest.raises(MalformedRequest, match="reserved"):
        service.register("public/gsb/acl", lambda call: None)


def test_a_cancel_reaches_the_service(line, service, caller):
    cancelled, begun = threading.Event(), threading.Event()

    @service.service("public/endless")
    def endless(call: gsb.Call) -> object:
        begun.set()
        try:
            while True:
                yield 1
        finally:
            cancelled.set()

    stream = caller.stream(line.remote("d", "public/endless"))
    assert next(iter(stream)) == 1
    stream.close()
    assert cancelled.wait(20)
    assert begun.is_set()


def test_a_deadline_ends_a_call_once(line, service):
    release = threading.Event()

    @service.service("public/slow")
    def slow(call: gsb.Call) -> object:
        release.wait(20)
        return 1

    with gsb.blocking.connect(str(line.client_address("a")), deadline_s=0.3) as caller:
        with pytest.raises(DeadlinePassed):
            caller.call(line.remote("d", "public/slow"))
        assert caller.call(line.remote("d", "public/gsb/ping"), "still here") == "still here"
    release.set()


def test_a_slow_caller_slows_only_its_own_stream(line, service, caller):
    sent = 0

    @service.service("public/flood")
    def flood(call: gsb.Call) -> object:
        nonlocal sent
        for _ in range(4000):
            sent += 1
            yield bytes(100_000)

    @service.service("public/quick")
    def quick(call: gsb.Call) -> object:
        return call.data

    with line.client("a") as slow:
        stream = iter(slow.stream(line.remote("d", "public/flood")))
        next(stream)
        before = -1
        while sent != before:  # it stops by itself: the caller takes nothing
            before = sent
            time.sleep(0.5)
        assert sent < 1000, "the service was not slowed down"
        for number in range(100):
            assert caller.call(line.remote("d", "public/quick"), number) == number


def test_pynng_without_polybus_calls_three_hops_away(line, service):
    pynng = pytest.importorskip("pynng")
    from polybus.dialects.gsb import gsb_pb2 as pb

    @service.service("public/plain")
    def plain(call: gsb.Call) -> object:
        return "from afar"

    with pynng.Pair0(dial=str(line.client_address("a")), recv_timeout=20_000) as socket:
        request = pb.ServiceCallRequest(address=line.remote("d", "public/plain"), request_id="1")
        socket.send(pb.Packet(service_call_request=request).SerializeToString())
        reply = pb.Packet.FromString(socket.recv()).call_reply
    assert (reply.request_id, reply.code, reply.type) == ("1", 0, 0)
    assert reply.data == b"\xa9from afar"


@pytest.fixture(scope="module")
def readable() -> Iterator[GsbNetwork]:
    """Three nodes on a line, whose topics under public/ every node may read."""
    with GsbNetwork(acl="allow node:* subscribe public/*") as net:
        net.start("a")
        net.start("b", links=["a"])
        net.start("c", links=["b"])
        net.await_nodes(3)
        yield net


def test_a_topic_of_another_node_is_read_by_all_subscribers(readable):
    net = readable
    topic = f"/net/{net.ids['c']}/public/news"
    with net.client("a") as first, net.client("a") as second, net.client("c") as sender:
        readers = [first.subscribe(topic), second.subscribe(topic), first.subscribe(topic)]
        for number in range(300):
            sender.broadcast("public/news", number)
        for reader in readers:
            messages = [reader.get(20) for _ in range(300)]
            assert [one.data for one in messages] == list(range(300))
            assert {one.topic for one in messages} == {topic}
            assert {one.caller for one in messages} == {net.ids["c"]}
        assert net.buses["c"].run("gsb", "ls", "--at", str(net.client_address("c"))).returncode == 0
        for reader in readers:
            reader.unsubscribe()
    until(lambda: connections(net, "c") == 0, "the other node has no subscription left")
    until(lambda: connections(net, "a") == 0, "this node has none either")


def connections(net: GsbNetwork, name: str) -> int:
    """The connections of a node that are not links; the asking one not counted."""
    with net.client(name) as client:
        stats = client.call("sys/stats")["gsb"]
    return int(stats["connections"]) - int(stats["network"]["links"]) - 1


def test_only_public_topics_are_read_and_only_by_a_rule(readable, line):
    net = readable
    with net.client("a") as reader:
        with pytest.raises(DoesNotExist, match="only topics under public/"):
            reader.subscribe(f"/net/{net.ids['c']}/private")
        with pytest.raises(DoesNotExist, match="unknown node"):
            reader.subscribe(f"/net/{UNKNOWN}/public/news")
        with pytest.raises(MalformedRequest):
            reader.subscribe("/net/nothing/public/news")
        with pytest.raises(MalformedRequest, match="subscribe to the topic"):
            reader.call(f"/net/{net.ids['c']}/public/gsb/channel", b"public/news")
        with pytest.raises(MalformedRequest, match="is this node: subscribe to 'public/own'"):
            reader.subscribe(f"/net/{net.ids['a']}/public/own")
    with line.client("a") as reader, pytest.raises(Denied, match="not allowed to subscribe"):
        reader.subscribe(f"/net/{line.ids['c']}/public/news")


def test_a_subscription_outlives_a_broken_link():
    with GsbNetwork(acl="allow node:* subscribe public/*") as net:
        net.start("a")
        net.start("b", links=["a"])
        net.start("c", links=["b"])
        net.await_nodes(3)
        with net.client("a") as client:
            reader = client.subscribe(f"/net/{net.ids['c']}/public/news")
            net.kill("b")
            until(lambda: net.reachable("a") == {}, "the loss is noticed")
            net.start("b", links=["a"])
            net.await_nodes(3)
            with net.client("c") as sender:

                def has_arrived() -> bool:
                    sender.broadcast("public/news", 1)
                    return reader.get(0.2) is not None

                until(has_arrived, "messages arrive again")


def test_the_command_line_shows_nodes_and_calls_them(line, service):
    @service.service("public/json")
    def answer(call: gsb.Call) -> object:
        return call.data

    bus, at = line.buses["a"], str(line.client_address("a"))
    assert bus.run("gsb", "id", "--at", at).stdout.strip() == line.ids["a"]
    shown = json.loads(bus.run("gsb", "nodes", "--json", "--at", at).stdout)
    assert [one["hops"] for one in shown["nodes"] if one["id"] == line.ids["d"]] == [3]
    table = bus.run("gsb", "nodes", "--at", at).stdout
    assert line.ids["d"] in table
    done = bus.run("gsb", "call", line.remote("d", "public/json"), '{"n": 1}', "--at", at)
    assert json.loads(done.stdout) == {"n": 1}
    assert " ms" in bus.run("gsb", "ping", f"/net/{line.ids['d']}", "--at", at).stdout
    for node in (line.ids["d"], f"/net/{line.ids['d']}/", line.ids["a"]):  # the last is its own
        pinged = bus.run("gsb", "ping", node, "-n", "2", "--at", at)
        assert pinged.returncode == 0, pinged.stderr
        assert pinged.stdout.count(" ms") == 2
    failed = bus.run("gsb", "ping", UNKNOWN, "--at", at)
    assert (failed.returncode, "unknown node" in failed.stderr) == (4, True)
    for wrong in ("0xAB", "d", UNKNOWN.upper(), f"/net/{line.ids['d']}/public/json"):
        failed = bus.run("gsb", "ping", wrong, "--at", at)
        assert (failed.returncode, "0x and 40 hex digits" in failed.stderr) == (2, True)
    failed = bus.run("gsb", "call", f"/net/{line.ids['d']}", "--at", at)
    assert (failed.returncode, "a service of the node" in failed.stderr) == (2, True)


def test_rules_decide_by_the_calling_node():
    with GsbNetwork(acl="") as net:
        net.start("b")
        rule = "allow node:{} call public/greeter"
        net.start("a", links=["b"])
        net.start("c", links=["b"])
        net.await_nodes(3)
        with net.client("b") as service, net.client("a") as ann, net.client("c") as cem:

            @service.service("public/greeter")
            def greet(call: gsb.Call) -> object:
                return call.caller

            address = net.remote("b", "public/greeter")
            for caller in (ann, cem):
                with pytest.raises(Denied, match="not allowed to call"):
                    caller.call(address)
            done = net.buses["b"].run("acl", "add", rule.format(net.ids["a"]))
            assert done.returncode == 0, done
            assert ann.call(address) == net.ids["a"]
            with pytest.raises(Denied):
                cem.call(address)
            done = net.buses["b"].run("acl", "add", "deny everyone call public/greeter/secret")
            with pytest.raises(Denied):
                ann.call(f"{address}/secret")
            stats = service.call("sys/stats")["gsb"]["network"]["callers"]
            assert (stats[net.ids["a"]]["calls"], stats[net.ids["a"]]["failures"]) == (3, 2)


def test_a_granted_node_changes_the_rules_of_another_node():
    grant = "allow node:* call public/gsb/acl"
    with GsbNetwork(acl="allow node:* call public/*") as net:
        net.start("closed")
        net.start("b", POLYBUS_ACL=grant, links=["closed"])
        net.start("a", links=["b"])
        net.await_nodes(3)
        with net.client("a") as caller, net.client("b") as service:
            acl = net.remote("b", "public/gsb/acl")

            @service.service("public/greeter")
            def greet(call: gsb.Call) -> object:
                return "hello"

            with pytest.raises(Denied):
                caller.call(net.remote("b", "public/greeter"))
            rule = f"allow node:{net.ids['a']} call public/greeter"
            assert caller.call(acl, {"verb": "add", "rule": rule})["changed"]
            assert caller.call(net.remote("b", "public/greeter")) == "hello"
            assert caller.call(acl, {"verb": "ls"}) == [rule]
            for bad in (
                "allow everyone call public/greeter",
                f"allow node:{net.ids['a']} produce public/greeter",
                f"allow node:{net.ids['a']} call private",
                "allow node:* call public/gsb/acl",
                "no rule",
            ):
                with pytest.raises(MalformedRequest):
                    caller.call(acl, {"verb": "add", "rule": bad})
            with pytest.raises(MalformedRequest, match="a map with a verb"):
                caller.call(acl, "ls")
            assert caller.call(acl, {"verb": "rm", "rule": rule})["changed"]
            with pytest.raises(Denied):
                caller.call(net.remote("b", "public/greeter"))
            with pytest.raises(DoesNotExist):
                caller.call(acl, {"verb": "rm", "rule": rule})
            with pytest.raises(Denied):  # public/* does not grant it
                caller.call(net.remote("closed", "public/gsb/acl"), {"verb": "ls"})


def test_a_broken_link_ends_its_calls_at_once_and_another_way_is_found():
    """A ring of four: a – b – c – d – a. Node b is killed while a calls c through it."""
    with GsbNetwork() as net:
        net.start("a")
        net.start("b", links=["a"])
        net.start("c", links=["b"])
        net.start("d", links=["c", "a"])
        net.await_nodes(4)
        first = min(("b", "d"), key=lambda name: net.ids[name])  # of two ways, the lower id
        with net.client("c") as service, net.client("a") as caller:
            begun, release = threading.Event(), threading.Event()

            @service.service("public/slow")
            def slow(call: gsb.Call) -> object:
                begun.set()
                release.wait(20)
                return 1

            @service.service("public/quick")
            def quick(call: gsb.Call) -> object:
                return call.data

            outcome: list[BaseException] = []

            def call() -> None:
                try:
                    caller.call(net.remote("c", "public/slow"))
                except Exception as error:
                    outcome.append(error)

            thread = threading.Thread(target=call)
            thread.start()
            assert begun.wait(20)
            net.kill(first)
            thread.join(20)
            release.set()
            assert isinstance(outcome[0], ServiceGone)
            until(lambda: net.reachable("a").get("c") == 2, "another way is found")
            assert caller.call(net.remote("c", "public/quick"), 7) == 7
            with pytest.raises(ServiceGone):
                caller.call(net.remote(first, "public/x"))
            at = str(net.client_address("a"))
            failed = net.buses["a"].run("gsb", "ping", net.ids[first], "--at", at)
            assert (failed.returncode, "cannot be reached" in failed.stderr) == (3, True)


def test_a_node_that_comes_back_is_linked_again():
    with GsbNetwork() as net:
        net.start("a")
        net.start("b", links=["a"])
        net.await_nodes(2)
        net.kill("a")
        until(lambda: net.reachable("b") == {}, "the loss is noticed")
        net.start("a")  # on the same data, so with the same id
        net.await_nodes(2)
        with net.client("b") as caller:
            assert caller.call(net.remote("a", "public/gsb/ping"), 1) == 1


def test_links_are_added_listed_and_removed_live():
    with GsbNetwork() as net:
        net.start("a")
        net.start("b")
        bus, address = net.buses["b"], net.link_address("a")
        assert bus.run("gsb", "link", "add", address).returncode == 0
        net.await_nodes(2)
        (link,) = json.loads(bus.run("gsb", "link", "ls", "--json").stdout)
        assert (link["address"], link["node"], link["state"]) == (address, net.ids["a"], "up")
        assert bus.run("gsb", "link", "add", address).returncode == 4
        (other,) = json.loads(net.buses["a"].run("gsb", "link", "ls", "--json").stdout)
        assert (other["address"], other["node"]) == ("", net.ids["b"])
        assert bus.run("gsb", "link", "rm", address).returncode == 0
        until(lambda: net.reachable("a") == {}, "the link has ended")
        assert bus.run("gsb", "link", "rm", address).returncode == 4
        for wrong, text in (
            ("tcp://192.0.2.1:1", "must be tls+tcp"),
            ("tls+tcp://127.0.0.1:0", "must name the port"),
            ("tls+tcp://127.0.0.1:1#0xabc", "a node id must be 0x and 40 hex digits"),
            ("unix:/tmp/x", "must be tls+tcp or tcp"),
        ):
            failed = bus.run("gsb", "link", "add", wrong)
            assert (failed.returncode, text in failed.stderr) == (2, True), failed


def test_links_that_are_added_and_removed_many_times_leave_nothing():
    with GsbNetwork() as net:
        net.start("a")
        net.start("b")
        bus, address = net.buses["b"], net.link_address("a")
        before = 0
        for _ in range(10):
            assert bus.run("gsb", "link", "add", address).returncode == 0
            assert bus.run("gsb", "link", "rm", address).returncode == 0
            assert bus.run("gsb", "link", "add", address).returncode == 0
            net.await_nodes(2)
            assert bus.run("gsb", "link", "rm", address).returncode == 0
            until(lambda: net.reachable("a") == {}, "the link has ended")
            # Not before the first connection with TLS, for which libuv opens a descriptor to keep.
            before = before or open_descriptors(bus.process.pid)
        until(lambda: open_descriptors(bus.process.pid) <= before, "all connections have ended")
        assert json.loads(bus.run("gsb", "link", "ls", "--json").stdout) == []
        assert bus.run("gsb", "link", "add", address).returncode == 0  # one that is up at the stop
        net.await_nodes(2)
        assert bus.run("gsb", "link", "add", "tcp://127.0.0.1:9").returncode == 0  # one that is not
        assert bus.stop() == 0
        log = bus.log()
        assert not [word for word in ("Task", "Traceback", "never") if word in log], log
        until(lambda: net.reachable("a") == {}, "the other bus notices the end")


def test_the_reason_why_a_link_is_down_is_shown():
    with GsbNetwork() as net:
        net.start("a")
        net.start("b")
        bus = net.buses["b"]

        def error(address: str) -> str:
            assert bus.run("gsb", "link", "add", address).returncode == 0

            def shown() -> str:
                links = json.loads(bus.run("gsb", "link", "ls", "--json").stdout)
                return str(next(one["error"] for one in links if one["address"] == address))

            until(lambda: bool(shown()), f"{address} has an error")
            return shown()

        assert "refused" in error("tcp://127.0.0.1:9").lower()
        assert "TLS handshake" in error(str(net.client_address("a")).replace("tcp", "tls+tcp"))
        pinned = net.link_address("a", pinned=False) + "#" + UNKNOWN
        assert f"with {net.ids['a']}: wrong_node" in error(pinned)
        assert "own_node" in error(net.link_address("b", pinned=False))
        plain = str(net.link_address("a", pinned=False)).removeprefix("tls+")
        assert "the other end refused" in error(plain)


def test_a_node_with_another_id_than_the_pinned_one_is_not_linked():
    with GsbNetwork() as net:
        net.start("a")
        net.ids["a"] = UNKNOWN
        net.start("b", links=["a"])
        until(lambda: "wrong_node" in net.buses["b"].log(), "the link is refused")
        assert net.reachable("b") == {}


def test_a_second_node_with_the_same_key_is_refused_and_an_alarm_names_both():
    with GsbNetwork() as net:
        net.start("hub")
        net.start("a", links=["hub"])
        net.await_nodes(2)
        copy = net.folder / "copy"
        (copy / "data").mkdir(parents=True)
        key = "gsb-node.pem"
        (copy / "data" / key).write_bytes((net.buses["a"].data / key).read_bytes())
        net.start("copy", links=["hub"])

        def alarms() -> list[dict[str, str]]:
            stats = json.loads(net.buses["hub"].run("stats", "--json").stdout)
            return [one for one in stats["alarms"] if one["kind"] == "duplicate_node"]

        until(lambda: bool(alarms()), "an alarm is raised")
        (alarm,) = alarms()
        assert alarm["object"] == net.ids["a"]
        assert alarm["text"].count("127.0.0.1") == 2
        assert net.reachable("hub") == {"copy": 1} or net.ids["copy"] == net.ids["a"]
