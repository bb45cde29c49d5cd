"""`polybus topic stats` and `polybus inspect` on a running bus and on its files."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from base64 import b64encode
from collections.abc import Iterator

import pytest

from polybus.testing.bus_process import POLYBUS
from tests.rig.native_bus import NativeBus

PATIENCE_S = 60


@pytest.fixture(scope="module")
def bus() -> Iterator[NativeBus]:
    with NativeBus() as running:
        yield running


@pytest.fixture
def orders(bus, request) -> str:
    """A topic of two shards and five messages, of which one was trimmed."""
    name = str(request.node.name)
    with bus.client() as client, client.producer() as producer:
        client.create_topic(name, shards=2)
        for at, key in enumerate(["é", "é", "a", "a"]):  # two in each shard
            producer.produce(name, [b"body %d" % at], keys=[key]).result()
        producer.produce(name, [b"\xff\x00" * 50], keys=["customer-7"]).result()
        client.trim(name, {0: 1})
    return name


def paths(text: str) -> dict[str, str]:
    return dict(line.split(" -> ", 1) for line in text.splitlines())


def test_stats_of_one_topic(polybus, orders):
    (row,) = json.loads(polybus("topic", "stats", orders, "--json"))
    counted = {"all", "shards", "groups", "queries", "subscribers", "delayed"}
    assert set(row) == {"topic", "paused"} | counted
    assert row["all"]["inserted"] == row["all"]["routed"] == 5
    assert row["all"]["trimmed"] == 1
    assert sum(one["inserted"] for one in row["shards"]) == 5
    shown = polybus("topic", "stats", orders).splitlines()
    assert shown[1].split()[:5] == [orders, "2", "4", "5", "1"]
    assert [line.split()[:2] for line in shown[2:]] == [["shard", "0"], ["shard", "1"]]


def test_stats_of_many_are_a_row_each(polybus, orders):
    shown = polybus("topic", "stats").splitlines()
    assert shown[0].split()[:3] == ["topic", "shards", "messages"]
    assert orders in {line.split()[0] for line in shown}
    assert not any("shard 0" in line for line in shown)
    assert polybus("topic", "stats", "no.such.*").splitlines()[1:] == []


def watching(bus: NativeBus, *args: str, stdout: int) -> subprocess.Popen[bytes]:
    env = bus.process.env | {"POLYBUS_URL": bus.url, "TERM": "xterm", "COLUMNS": "200"}
    return subprocess.Popen(
        [*POLYBUS, "topic", "stats", *args], env=env, stdout=stdout, stderr=subprocess.PIPE
    )


def test_watch_prints_a_line_per_round_and_survives_a_restart():
    with NativeBus() as bus, bus.client() as client:
        client.create_topic("t", shards=1)
        with watching(bus, "t", "--watch", "0.1", stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert json.loads(child.stdout.readline())[0]["all"]["inserted"] == 0
            bus.kill()
            bus.start()
            with client.producer() as producer:
                producer.produce("t", [b"x"]).result()
            while json.loads(child.stdout.readline())[0]["all"]["inserted"] != 1:
                pass
            child.send_signal(signal.SIGINT)
            assert child.communicate(timeout=PATIENCE_S)[1] == b""
        assert child.returncode == 130


def test_watch_is_a_live_table_on_a_terminal(bus, orders):
    master, slave = pty.openpty()
    with watching(bus, orders, "--watch", "0.1", stdout=slave) as child:
        os.close(slave)
        shown = b""
        while shown.count(b"\x1b[H\x1b[2J") < 3:
            shown += os.read(master, 65536)
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=PATIENCE_S)
    os.close(master)
    assert b"acked/s" in shown
    assert orders.encode()[:20] in shown


@pytest.mark.parametrize("where", ["bus", "files"])
def test_inspect_prints_the_store_as_a_tree(polybus, bus, orders, where):
    place = ["--store", str(bus.folder / "data")] if where == "files" else []
    tree = paths(polybus("inspect", orders, *place))
    config = json.loads(tree[f"fdq/config/topics/{orders}"])
    assert (config["shards"], config["settings"]["keep"]) == (2, "all")
    shard = json.loads(tree[f"fdq/config/topics/{orders}/shards/0"])
    assert (shard["start"], shard["owners"]) == (1, {})
    assert tree[f"fdq/topic/{orders}/all/stats/inserted"] == "5"
    assert tree[f"fdq/topic/{orders}/all/stats/acked"] == "0"
    assert tree[f"fdq/topic/{orders}/shards/0/stats/trimmed"] == "1"
    data = {path: body for path, body in tree.items() if "/data/" in path}
    assert sum(f"/{orders}/all/data/" in path for path in data) == 4  # three, and one more
    assert '"body 1"' in data.values()
    (keyed,) = {body for path, body in data.items() if path.endswith(":5:customer-7")}
    assert keyed == f"0x{'ff00' * 32} … 100 bytes"
    (rest,) = (body for path, body in data.items() if path.endswith(f"/{orders}/all/data/…"))
    assert rest.startswith("1 more: -n 4")


@pytest.mark.parametrize("where", ["bus", "files"])
def test_inspect_limits_its_output(polybus, bus, orders, where):
    place = ["--store", str(bus.folder / "data")] if where == "files" else []
    none = paths(polybus("inspect", orders, "-n", "0", *place))
    assert [path.rsplit("/", 1)[1] for path in none if "/data/" in path] == ["…", "…", "…"]
    whole = polybus("inspect", orders, "--every", "--body-bytes", "100", *place)
    assert "ff00" * 50 in whole
    assert "…" not in whole
    lines = [json.loads(line) for line in polybus("inspect", orders, "--json", *place).splitlines()]
    bodies = [line["value"] for line in lines if line["path"].endswith(":5:customer-7")]
    assert {one["body_base64"] for one in bodies} == {b64encode(b"\xff\x00" * 50).decode()}
    assert {one["key"] for one in bodies} == {"customer-7"}


def test_message_bytes_are_escaped_on_a_terminal(polybus, bus, request):
    name = request.node.name
    with bus.client() as client, client.producer() as producer:
        client.create_topic(name, shards=1)
        producer.produce(name, ["\x1b[31m\u009b é".encode()], keys=["a\nb\x07"]).result()
    shown = polybus("inspect", name)
    assert "\x1b" not in shown
    assert "\x9b" not in shown
    assert ":1:a\\nb\\x07 -> " in shown
    assert " é" in shown


def test_dropped_topic_is_not_in_the_tree(polybus, bus, orders):
    with bus.client() as client:
        client.drop_topic(orders)
    assert orders not in polybus("inspect")
    assert orders not in polybus("inspect", "--store", str(bus.folder / "data"))


@pytest.mark.parametrize(
    ("code", "says", "args"),
    [
        (2, "SECONDS needs --watch", ["topic", "stats", "any", "5"]),
        (2, "SECONDS must be a number >= 0.1", ["topic", "stats", "any", "0", "--watch"]),
        (2, "SECONDS", ["topic", "stats", "any", "soon", "--watch"]),
        (4, "no durable topic 'missing'", ["inspect", "missing"]),
        (4, "no durable topic 'missing'", ["inspect", "missing", "--store", "{store}"]),
        (2, "no such folder", ["inspect", "--store", "/no/such"]),
        (2, "no store in", ["inspect", "--store", "/usr"]),
        (2, "has no files", ["inspect", "--store", "memory:"]),
        (2, "exclude each other", ["inspect", "--store", "{store}", "--bus", "polybus://h:1"]),
        (2, "-n", ["inspect", "-n", "-1"]),
        (3, "no bus answers", ["inspect", "--bus", "polybus://127.0.0.1:1"]),
    ],
)
def test_errors_are_one_line(polybus, bus, code, says, args):
    error = polybus(*(one.format(store=bus.folder / "data") for one in args), code=code)
    assert says in error
    assert error.count("\n") == 1
