"""`polybus group`, and the groups in `topic stats` and `inspect`, on a running bus."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from polybus import fdq
from polybus.errors import Fenced
from polybus.native import Client
from polybus.testing.bus_process import POLYBUS
from tests.rig.native_bus import NativeBus
from tests.rig.observer import until

PATIENCE_S = 60


@pytest.fixture(scope="module")
def bus() -> Iterator[NativeBus]:
    with NativeBus() as running:
        yield running


@pytest.fixture
def client(bus) -> Iterator[Client]:
    with bus.client() as opened:
        yield opened


@pytest.fixture
def topic(client, request) -> str:
    """A topic with four messages in one shard and three in the other."""
    name = str(request.node.name)
    client.create_topic(name, shards=2)
    with client.producer() as producer:
        for at, key in enumerate(["é", "é", "é", "é", "a", "a", "a"]):
            producer.produce(name, [b"%d" % at], keys=[key]).result()
    return name


class Member:
    """A consumer of group "billing" that uses the native actions directly."""

    def __init__(self, client: Client, topic: str, name: str) -> None:
        self._client = client
        self._who = {"topic": topic, "group": "billing", "consumer": name}
        joined = client.act("group.join", **self._who)
        self._who["epoch"] = joined["epoch"]

    def assigned(self) -> dict[int, int]:
        """Return the epochs of its shards."""
        answer, _ = self._client.fetch(**self._who, held=[], max_rows=1)
        return {one["shard"]: one["epoch"] for one in answer["assigned"]}

    def ack(self, shard: int, start: int, end: int, **more: Any) -> dict[str, Any]:
        entry = {"shard": shard, "epoch": self.assigned()[shard], "acked": [[start, end]], **more}
        return self._client.act("group.ack", **self._who, shards=[entry])["shards"][0]

    def leave(self) -> None:
        self._client.act("group.leave", **self._who)


@pytest.fixture
def member(client, topic) -> Member:
    """A member that owns both shards and has acked some of their messages."""
    joined = Member(client, topic, "billing-1")
    until(lambda: len(joined.assigned()) == 2, "it has both shards")
    assert joined.ack(0, 0, 2, emitted=3, redelivered=1)["error"] is None
    assert joined.ack(1, 1, 2, emitted=1)["error"] is None
    return joined


def cells(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_groups_are_listed(polybus, topic, member):
    assert polybus("group", "ls", "no.such.*") == "no groups\n"
    heading, row = cells(polybus("group", "ls", topic))
    assert heading == ["topic", "group", "members", "shards", "acked", "lag", "paused"]
    assert row == [topic, "billing", "1", "2", "3", "4", "-"]
    (one,) = json.loads(polybus("group", "ls", topic, "--json"))
    assert (one["group"], one["lag"]) == ("billing", 4)


def test_group_info_shows_consumers_and_shards(polybus, topic, member):
    rows = cells(polybus("group", "info", topic, "billing"))
    assert rows[0] == ["consumer", "epoch", "shards"]
    assert rows[1][0] == "billing-1"
    assert rows[1][2:] == ["0,", "1"]
    assert rows[4][:3] == ["billing", "1", "4"]
    assert rows[5][:4] == ["shard", "0", "billing-1", "2"]
    assert rows[6][:4] == ["shard", "1", "billing-1", "2"]
    found = json.loads(polybus("group", "info", topic, "billing", "--json"))
    assert (found["acked"], found["lag"], found["emitted"], found["redelivered"]) == (3, 4, 4, 1)
    assert sum(found["ack_latency"].values()) == 3
    member.leave()
    assert polybus("group", "info", topic, "billing").startswith("no consumers\n")


def test_stats_of_a_topic_have_its_groups(polybus, topic, member):
    (found,) = json.loads(polybus("topic", "stats", topic, "--json"))
    whole = found["all"]
    assert (whole["inserted"], whole["acked"], whole["emitted"]) == (7, 3, 4)
    assert [one["acked"] for one in found["shards"]] == [2, 1]
    (group,) = found["groups"]
    assert (group["lag"], group["members"][0]["shards"]) == (4, [0, 1])
    assert 0 < group["lag_s"] < PATIENCE_S * 60
    shown = cells(polybus("topic", "stats", topic))
    assert ["billing", "1", "4"] in [row[:3] for row in shown]


@pytest.mark.parametrize("where", ["bus", "files"])
def test_inspect_shows_consumers_and_owners(polybus, bus, topic, member, where):
    place = ["--store", str(bus.folder / "data")] if where == "files" else []
    tree = dict(line.split(" -> ", 1) for line in polybus("inspect", topic, *place).splitlines())
    config = f"fdq/config/topics/{topic}"
    assert tree[f"{config}/consumers/billing:billing-1"] == "[0, 1]"
    assert json.loads(tree[f"{config}/shards/1"])["owners"] == {"billing": "billing-1"}
    assert tree[f"fdq/topic/{topic}/all/stats/acked"] == "3"
    assert tree[f"fdq/topic/{topic}/shards/1/stats/acked"] == "1"


def test_stats_survive_a_kill_and_a_clean_stop(polybus, monkeypatch):
    with NativeBus() as bus, bus.client() as client:
        monkeypatch.setenv("POLYBUS_URL", bus.url)
        client.create_topic("t", shards=1)
        with client.producer() as producer:
            producer.produce("t", [b"1", b"2", b"3"]).result()
        joined = Member(client, "t", "a")
        until(lambda: joined.assigned(), "it has the shard")
        joined.ack(0, 0, 2, emitted=2)
        before = json.loads(polybus("topic", "stats", "t", "--json"))
        bus.kill()
        bus.start()
        after = json.loads(polybus("topic", "stats", "t", "--json"))
        for one in (*before, *after):
            assert one["groups"][0].pop("lag_s") > 0
            assert one["groups"][0]["shards"][0].pop("lag_s") > 0
        assert after == before
        joined.ack(0, 0, 2, emitted=5, redelivered=1)  # without a new ack
        bus.stop()
        bus.start()
        (found,) = json.loads(polybus("topic", "stats", "t", "--json"))
        assert (found["all"]["emitted"], found["all"]["redelivered"]) == (5, 1)


@pytest.mark.parametrize(
    ("to", "lag"),
    [("earliest", 7), ("latest", 0), ("5", 3), ("@2020-01-01", 7), ("@2100-01-01", 0)],
)
def test_group_reset(polybus, topic, member, to, lag):
    member.leave()
    said = polybus("group", "reset", topic, "billing", "--to", to)
    assert said == f"{lag} messages to read\n"
    found = json.loads(polybus("group", "info", topic, "billing", "--json"))
    assert (found["acked"], found["lag"]) == (0, lag)  # counted from the new position


def test_group_in_use_is_reset_and_removed_only_by_force(polybus, topic, member):
    move = ("group", "reset", topic, "billing", "--to", "earliest")
    remove = ("group", "rm", topic, "billing")
    for command in (move, remove):
        said = polybus(*command, code=4)
        assert "has consumers: billing-1" in said
        assert "--force" in said
    assert json.loads(polybus("group", "info", topic, "billing", "--json"))["acked"] == 3
    assert polybus(*move, "--force") == "7 messages to read\n"
    polybus(*remove, "--force")
    assert polybus("group", "ls", topic) == "no groups\n"
    with pytest.raises(Fenced):
        member.assigned()


def test_trimmed_unread_messages_are_counted(polybus, topic, member):
    polybus("topic", "trim", topic, "0:4")
    found = json.loads(polybus("group", "info", topic, "billing", "--json"))
    assert (found["trimmed_unread"], found["lag"], found["acked"]) == (2, 2, 3)


def test_groups_are_removed_with_their_topic(polybus, client, topic, member):
    client.drop_topic(topic)
    assert polybus("group", "ls", topic) == "no groups\n"
    client.create_topic(topic, shards=1)
    assert "no group 'billing'" in polybus("group", "info", topic, "billing", code=4)


def test_reset_asks_on_a_terminal(bus, topic, member):
    member.leave()
    master, slave = pty.openpty()
    env = bus.process.env | {"POLYBUS_URL": bus.url}
    command = [*POLYBUS, "group", "reset", topic, "billing", "--to", "earliest"]
    child = subprocess.Popen(command, env=env, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    os.write(master, b"n\n")
    assert child.wait(PATIENCE_S) == 130
    assert b"Move group billing" in os.read(master, 65536)
    os.close(master)


@pytest.mark.parametrize(
    ("code", "says", "args"),
    [
        (4, "no durable topic 'missing'", ["info", "missing", "billing"]),
        (4, "no group 'missing'", ["info", "{topic}", "missing"]),
        (4, "no group 'missing'", ["rm", "{topic}", "missing"]),
        (4, "no group 'missing'", ["reset", "{topic}", "missing", "--to", "latest"]),
        (2, "invalid start position", ["reset", "{topic}", "billing", "--to", "yesterday"]),
        (2, "invalid time", ["reset", "{topic}", "billing", "--to", "@noon"]),
        (2, "--to", ["reset", "{topic}", "billing"]),
        (2, "GROUP", ["rm", "{topic}"]),
        (2, "control characters", ["info", "{topic}", "a\nb"]),
        (2, "1 to 128 bytes", ["info", "{topic}", "x" * 129]),
        (3, "no bus answers", ["ls", "--bus", "polybus://127.0.0.1:1"]),
    ],
)
def test_errors_are_one_line(polybus, topic, code, says, args):
    said = polybus("group", *(one.format(topic=topic) for one in args), code=code)
    assert says in said
    assert said.count("\n") == 1


def test_spark_queries_are_listed_with_the_groups(polybus, client, topic):
    progress = {"query": "q-1", "topic": topic, "offsets": {"0": 1, "1": 3}, "name": "totals"}
    client.act("query.progress", **progress)
    (found,) = json.loads(polybus("topic", "stats", topic, "--json"))
    (query,) = found["queries"]
    assert (query["query"], query["name"], query["lag"]) == ("q-1", "totals", 3)
    assert ["q-1", "totals", "3"] in cells(polybus("topic", "stats", topic))


def test_commands_work_on_an_unused_folder(polybus, tmp_path):
    url = f"lmdb:{tmp_path / 'data'}"
    with fdq.Producer(url) as producer, fdq.Consumer(url) as consumer:
        producer.produce("t", "k", b"1")
        consumer.consume("t", "a", lambda _: None, group="g")
        until(lambda: fdq.stats(url, "t")["all"]["acked"] == 1, "it is acked")
    assert cells(polybus("group", "ls", "--bus", url))[1][:3] == ["t", "g", "0"]
    assert polybus("group", "reset", "t", "g", "--to", "earliest", "--bus", url) == (
        "1 messages to read\n"
    )
    (found,) = json.loads(polybus("topic", "stats", "t", "--json", "--bus", url))
    assert found["groups"][0]["lag"] == 1
    assert "no such folder" in polybus("group", "ls", "--bus", url + "-mistyped", code=2)
    assert not (tmp_path / "data-mistyped").exists()
