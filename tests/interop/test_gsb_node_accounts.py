"""Calls of other nodes are counted and logged by node, refused ones included."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from polybus import gsb
from polybus.dialects.gsb.network.node_key import NodeKey
from tests.rig.gsb_call_signer import CallSigner
from tests.rig.gsb_link_peer import LinkPeer, pack
from tests.rig.gsb_wire import read_failure
from tests.rig.native_bus import NativeBus
from tests.rig.observer import until

FRIEND, ORIGIN = NodeKey(b"r" * 32), NodeKey(b"n" * 32)
RULES = (
    f"allow node:{FRIEND.node_id} call public/echo",
    f"allow node:{FRIEND.node_id} call public/gsb/acl",
)


class Bus(NativeBus):
    """A bus with the log of calls, and a service for other nodes."""

    def rows(self) -> list[dict[str, Any]]:
        """Stop the bus, so that all calls are logged, start it again, and read the log."""
        assert self.stop() == 0
        self.start()
        with self.client() as client:
            batches = client.read("gsb.calls")
            bodies = [body for batch in batches for body in batch.column("body").to_pylist()]
        return [json.loads(body) for body in bodies]

    def accounts(self) -> dict[str, dict[str, int]]:
        stats = json.loads(self.process.run("stats", "--json").stdout)
        accounts: dict[str, dict[str, int]] = stats["gsb"]["network"]["callers"]
        return accounts


@pytest.fixture
def bus() -> Iterator[Bus]:
    env = {"POLYBUS_GSB_AUDIT": "true", "POLYBUS_ACL": ";".join(RULES)}
    with Bus(listen=("gsb=tcp://127.0.0.1:0",), env=env) as running:
        yield running


@pytest.fixture
def friend(bus) -> Iterator[LinkPeer]:
    with LinkPeer(bus.process.address("gsb"), FRIEND) as peer:
        peer.announce()
        peer.settle()
        yield peer


def codes(peer: LinkPeer, *calls: Any) -> list[int]:
    """Make the calls one after another, and return the codes with which they end."""
    ended = []
    for call in calls:
        peer.send_call(call)
        reply = peer.wait_for("call_reply")
        ended.append(read_failure(reply.data).code if reply.code else 0)
    return ended


def test_refused_calls_are_the_calling_nodes(bus, friend):
    """A friend relays calls of a node behind it, which no rule names."""
    friend.announce(
        friend.announcement(FRIEND, [friend.bus_id, ORIGIN.node_id]),
        friend.announcement(ORIGIN, [FRIEND.node_id]),
    )
    friend.settle()
    with gsb.blocking.connect(str(bus.process.address("gsb"))) as service:

        @service.service("public/echo")
        def echo(call: gsb.Call) -> object:
            return call.data

        assert codes(friend, friend.call("public/echo", data=b"\x07")) == [0]
        friend.signer = CallSigner(ORIGIN, friend.instance)
        bad = [friend.call(name, data=b"12") for name in ("public/echo", "public/none", "private")]
        large = friend.call("public/gsb/ping", data=bytes(2000))
        acl = friend.call("public/gsb/acl", data=msgpack.packb({"verb": "ls"}))
        channel = friend.call("public/gsb/channel", data=b"public/news")
        assert codes(friend, *bad, large, acl, channel) == [403, 404, 404, 413, 403, 403]
        forged = friend.call("public/echo", data=b"\x08")
        forged.data = b"\x09"
        old = friend.call("public/echo", instance=99)
        assert codes(friend, forged, old) == [403, 503]
        accounts = bus.accounts()
    assert {name: (one["calls"], one["failures"]) for name, one in accounts.items()} == {
        FRIEND.node_id: (1, 0),
        ORIGIN.node_id: (6, 6),
    }
    assert accounts[ORIGIN.node_id]["request_bytes"] == 3 * 2 + 2000 + len(acl.data) + 11
    rows = [(row["caller"], row["address"], row["code"]) for row in bus.rows()]
    assert rows == [
        (FRIEND.node_id, "public/echo", 0),
        (ORIGIN.node_id, "public/echo", 403),
        (ORIGIN.node_id, "public/none", 404),
        (ORIGIN.node_id, "private", 404),
        (ORIGIN.node_id, "public/gsb/ping", 413),
        (ORIGIN.node_id, "public/gsb/acl", 403),
        (ORIGIN.node_id, "public/gsb/channel", 403),
        # Not signed by the origin, so they are those of the neighbour.
        (FRIEND.node_id, "public/echo", 403),
        (FRIEND.node_id, "public/echo", 503),
    ]


def test_a_node_changes_rules_in_its_own_name(bus, friend):
    def request(verb: str, rule: str = "") -> Any:
        return friend.call("public/gsb/acl", data=msgpack.packb({"verb": verb, "rule": rule}))

    rule = f"allow node:{ORIGIN.node_id} call public/echo"
    added, pinged = request("add", rule), friend.call("public/gsb/ping", data=b"\x01")
    assert codes(friend, added, pinged) == [0, 0]
    listed = json.loads(bus.process.run("acl", "ls", "--json").stdout)
    assert [row["by"] for row in listed if row["rule"] == rule] == [f"node:{FRIEND.node_id}"]
    assert f"by node:{FRIEND.node_id}" in bus.process.run("acl", "ls").stdout
    assert codes(friend, request("rm", RULES[0])) == [403], "it is one of an admin"
    refused = (
        f"allow node:{ORIGIN.node_id} subscribe public/echo",
        "allow user:0 call public/echo",
        "allow everyone admin *",
        f"allow node:{ORIGIN.node_id} call private",
        "deny node:* call public/*",
        f"allow node:{ORIGIN.node_id} call public/gsb/acl",
    )
    for one in refused:
        assert codes(friend, request("add", one), request("rm", one)) == [400, 400], one
    changed = re.compile(f"rule added.*user=node:{FRIEND.node_id}")
    until(lambda: changed.search(bus.process.log()), "the log names the node")
    account = bus.accounts()[FRIEND.node_id]
    assert (account["calls"], account["failures"]) == (3 + 2 * len(refused), 1 + 2 * len(refused))
    rows = [(row["caller"], row["service"], row["code"]) for row in bus.rows()][:3]
    assert rows == [
        (FRIEND.node_id, "public/gsb/acl", 0),
        (FRIEND.node_id, "public/gsb/ping", 0),
        (FRIEND.node_id, "", 403),
    ]
    listed = json.loads(bus.process.run("acl", "ls", "--json").stdout)
    assert rule in [row["rule"] for row in listed], "the rule was not kept"


def test_changes_of_rules_at_a_time_are_bounded(bus, friend):
    """Each waits for the disk; those that come meanwhile are refused."""
    rule = f"allow node:{ORIGIN.node_id} call public/"
    calls = [
        friend.call("public/gsb/acl", data=msgpack.packb({"verb": "add", "rule": f"{rule}{n}"}))
        for n in range(60)
    ]
    friend.peer.send(*(pack(relay_call=call) for call in calls))
    replies = [friend.wait_for("call_reply") for _ in calls]
    refused = [read_failure(reply.data).code for reply in replies if reply.code]
    assert set(refused) == {503}
    listed = json.loads(bus.process.run("acl", "ls", "--json").stdout)
    assert len(listed) == len(RULES) + len(calls) - len(refused)


def test_a_wide_rule_does_not_let_a_node_change_rules(bus, friend):
    friend.announce(
        friend.announcement(FRIEND, [friend.bus_id, ORIGIN.node_id]),
        friend.announcement(ORIGIN, [FRIEND.node_id]),
    )
    friend.settle()
    wide = f"allow node:{ORIGIN.node_id} call public/*"
    assert bus.process.run("acl", "add", wide).returncode == 0
    data = msgpack.packb({"verb": "ls"})
    assert codes(friend, friend.call("public/gsb/acl", data=data)) == [0]
    friend.signer = CallSigner(ORIGIN, friend.instance)
    assert codes(friend, friend.call("public/gsb/acl", data=data)) == [403]
