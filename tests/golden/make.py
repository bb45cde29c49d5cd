"""Make the golden folders of one format version.

    python -m tests.golden.make v2          (from the root of the repository)

A golden folder is data that one version of polybus wrote. It is committed, and from then on
`test_golden.py` and `tests/spark/test_golden_checkpoints.py` open a copy of it at every
commit, compare it with its `expected.json` and go on where it ends. So a renamed record key,
error code, counter, config key or pickled module path turns a test red.

    data/                a data folder: the store, as `polybus store backup` copies it
    archive/             an archive of one topic
    checkpoint-source/   the checkpoint of a Spark query that reads a topic
    checkpoint-sink/     the checkpoint of a Spark query that writes a topic
    pirate-client/       state folders of pirate clients, each with a request that has no answer
    acl.toml             rules, as `polybus acl add` writes them
    config.toml          a configuration that sets most keys
    expected.json        the state that all of the above must have

An existing version is never changed: data that today's code writes again proves nothing
about data that older code wrote. When a format changes, make the next version and keep the
former ones. The names of topics, groups, producers and clients are fixed, and so are all
bodies, keys, ids and offsets; times, stage names and ids of queries differ between runs.

The script uses public APIs only: the command line, `polybus.native`, `polybus.pirate`,
`polybus.spark` and Arrow Flight.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

import polybus
from polybus import native, pirate
from polybus.errors import OutcomeUnknown
from tests.golden import goldenread
from tests.golden.goldenbus import (
    HERE,
    READ_CALLS,
    GoldenBus,
    command,
    copied,
    plain_environment,
    wait_until,
)

LONG_DEAD_MS = 3_600_000  # the member is still there when a test opens the folder
READINGS = 20  # read by the queries and archived; as many again are left unread
UNREAD = 10
LARGE_BODY = b"large " * 12_000  # the journal of a pirate client is written again after 64 KiB
SETTINGS = {"POLYBUS_GSB_AUDIT": "true", "POLYBUS_NATIVE_DEFAULT_SHARDS": "3"}

CLOSED = {
    f"connections.closed.{reason}"
    for reason in ("bad_greeting", "payload_too_large", "peer", "too_large")
}

RULES = (
    "allow user:4242 produce,subscribe orders.*",
    "allow group:4343 subscribe salaries",
    "deny user:4244 produce *",
    "allow service:backup.service subscribe orders.*",
    "deny service:/usr/bin/untrusted call *",
    "allow key:golden create,produce,subscribe,delete *",
    "deny anonymous create,produce *",
    "allow everyone subscribe news.*",
    "allow user:4245 admin ops.*",
)
QUESTIONS = tuple(
    (who, verb, topic)
    for who in (
        "user:4242",
        "group:4343",
        "user:4244",
        "user:4245",
        "user:4247",
        "user:4248",
        "service:backup.service",
        "user:4246,service:/usr/bin/untrusted",
        "key:golden",
        "anonymous",
    )
    for verb, topic in (
        ("produce", "orders.eu"),
        ("subscribe", "orders.eu"),
        ("subscribe", "salaries"),
        ("subscribe", "news.today"),
        ("create", "anything"),
        ("delete", "ops.a"),
        ("admin", "ops.a"),
        ("call", "a.service"),
    )
)

CONFIG = """\
# Sets most keys to values that are not their defaults.
durability = "interval"
commit_interval_ms = 20
insecure = false
acl = ["deny user:4247 produce,subscribe *", "allow user:4248 admin *"]
data = "data"

[server]
drain_timeout_s = 1.5
max_admin_connections = 32
admin_idle_timeout_s = 20.0

[log]
format = "json"
level = "debug"
max_repeats_per_s = 10

[limits]
max_connections = 500
max_topics = 1000
max_subscriptions_per_connection = 100
outbox_max_bytes = 33554432
outbox_high_water_bytes = 1048576
max_uncommitted_bytes = 4194304
slow_consumer_min_bytes_per_s = 32768
slow_consumer_timeout_s = 4.0

[quotas]
quota_bytes = 1048576
quota_subscriptions = 100
quota_topics = 200
quota_connections = 50

[quotas.users.4242]
quota_topics = 300

[rqueue]
max_payload = 4096
part_timeout_s = 10.0
max_message_bytes = 1048576

[freud]
max_frame_bytes = 1048576
subscriber_timeout_s = 10.0
max_unread_messages = 1000

[gsb]
max_packet_bytes = 65536
deadline_ms = 5000
outbox_full_bytes = 131072
outbox_free_bytes = 65536
free_partials = 32
free_bytes = 65536
ping_idle_s = 10.0
ping_timeout_s = 20.0
max_open_calls = 100
max_services = 10
stuck_timeout_s = 10.0
audit = true

[native]
max_batch_bytes = 68157440
max_action_bytes = 131072
max_batches_in_flight = 32
max_bytes_in_flight = 1048576
max_uncommitted_bytes = 68157440
max_calls = 128
max_connections = 64
max_waits = 32
max_wait_s = 10.0
default_shards = 3
max_groups = 16
max_user_groups = 8
max_members = 4
max_fetch_rows = 100
max_fetch_bytes = 65536

[pirate]
max_clients = 100
max_subscriptions = 50
max_user_subscriptions = 25
max_client_requests = 8
max_uncommitted_bytes = 68157440
subscriber_ttl_s = 3600.0
max_unfinished_bytes = 69206016
max_unread_bytes = 138412032
curve = false
"""


def main() -> None:
    if len(sys.argv) != 2 or not sys.argv[1].startswith("v"):
        raise SystemExit("usage: python -m tests.golden.make vN")
    target = HERE / sys.argv[1]
    if target.exists():
        raise SystemExit(f"{target} exists: a golden version is never made again")
    with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        make(made, Path(scratch))
        shutil.copytree(made, target)


def make(made: Path, scratch: Path) -> None:
    data = scratch / "data"
    expected: dict[str, Any] = {"made_by": polybus.__version__}
    (made / "config.toml").write_text(CONFIG)
    with GoldenBus(data, env=SETTINGS) as bus:
        with bus.client() as client:
            expected["producers"] = make_orders(bus, client)
            expected["members"] = make_groups(client)
            expected["removed_group"] = make_removed_group(client)
            expected["dropped_topic"] = make_dropped_topic(client)
            expected["stage"] = make_stage(client)
            make_calls(bus, client)
            expected["pirate"] = make_pirate(bus, client, made / "pirate-client")
            expected["spark"] = make_spark(bus, client, made)
        assert bus.stop() == 0
        expected["pirate"]["reader"] |= leave_put_without_bus(bus, made / "pirate-client")
    (made / "data").mkdir()
    done = command(
        "store", "backup", str(data), str(made / "data" / "store"), env=plain_environment()
    )
    assert done.returncode == 0, done.stderr
    expected["acl"] = make_rules(made, scratch)
    expected |= read_back(made, scratch)
    tidy(made)
    (made / "expected.json").write_text(shown(expected) + "\n")


# --- topics and producers


def order_body(number: int) -> bytes:
    return b"order %03d" % number


def make_orders(bus: GoldenBus, client: native.Client) -> dict[str, Any]:
    """Topics with several shards, and producers of each kind that stays known to the bus."""
    client.create_topic("orders", shards=4)
    client.create_topic("events", shards=2, settings={"max_bytes": 10_000_000})
    producers: dict[str, Any] = {}

    producer = client.producer("importer")
    last: Any = None
    for batch in range(5):
        numbers = range(batch * 16, batch * 16 + 16)
        bodies = [order_body(n) for n in numbers]
        last = producer.produce("orders", bodies, [f"key-{n % 16}" for n in numbers]).result()
    producers["importer"] = {
        "topic": "orders",
        "epoch": producer.epoch,
        "counter": 5,
        "first_id": last.first_id,
        "last_id": last.last_id,
    }

    with_headers = pa.record_batch(
        [
            pa.array(["a", None], pa.utf8()),
            pa.array([b"with headers", b"\x00\xff without"], pa.binary()),
            pa.array([1_700_000_000_000, None], pa.int64()),
            pa.array([[("kind", b"first"), ("n", b"1")], None], pa.map_(pa.utf8(), pa.binary())),
        ],
        names=["shard_key", "body", "insertion_ms", "headers"],
    )
    with client.producer() as unnamed:  # closed, so the bus forgets it
        unnamed.produce_rows("events", with_headers).result()

    with bus.flight() as port:
        for name, settings, counters in (
            ("", {}, (1, 2)),
            ("with-gaps", {"dense": False, "kept_results": 4}, (1, 10)),
        ):
            opened = client.act("producer.open", producer=name, **settings)
            answer: dict[str, Any] = {}
            for counter in counters:
                stamp = {"producer": opened["producer"], "epoch": opened["epoch"]}
                bodies = [b"%s %d %d" % (name.encode() or b"anonymous", counter, n) for n in (1, 2)]
                answer = port.produce("events", bodies, ["a", "b"], stamp | {"counter": counter})
            producers[name or "anonymous"] = {
                "name": opened["producer"],
                "topic": "events",
                "epoch": opened["epoch"],
                "counter": counters[-1],
                "first_id": answer["first_id"],
                "last_id": answer["last_id"],
            }
    client.trim("events", {1: 1})
    assert client.bounds("events")["shards"][1]["start"] == 1
    return producers


def make_dropped_topic(client: native.Client) -> dict[str, Any]:
    """A name whose ids must go on when it is used again."""
    client.create_topic("dropped", shards=1)
    with client.producer() as producer:
        producer.produce("dropped", [b"a", b"b", b"c"]).result()
    bounds = client.bounds("dropped")
    client.drop_topic("dropped")
    return {
        "topic": "dropped",
        "next_id": bounds["next_id"],
        "next_offset": bounds["shards"][0]["end"],
    }


def make_stage(client: native.Client) -> dict[str, Any]:
    """One stage that was published with a stamp, and one that was not published."""
    opened = client.act("producer.open", producer="publisher")
    stamp = {"producer": "publisher", "epoch": opened["epoch"], "counter": 1}
    with client.stage() as first:
        first.put("invoices", [b"invoice 1"], ["a"])
        client.publish([first], stamp)
    bodies = [b"invoice 2", b"invoice 3"]
    with client.stage(lease_s=86_400.0) as second:
        second.put("invoices", bodies, ["a", "b"])
        second.put("invoices.copy", bodies, ["a", "b"])
    return {
        "stage": second.name,
        "published": stamp,
        "topics": ["invoices", "invoices.copy"],
        "bodies": [body.decode() for body in bodies],
    }


def make_calls(bus: GoldenBus, client: native.Client) -> None:
    bus.run("gsb", "call", "sys/ping", '"hello"', "--at", bus.addresses["gsb"])
    bus.run("gsb", "call", "nobody", '"hello"', "--at", bus.addresses["gsb"], code=4)
    bus.run("acl", "add", *READ_CALLS.split())
    wait_until(lambda: client.topic("gsb.calls")["next_id"] == 3, "the log of calls")


# --- groups


def make_groups(client: native.Client) -> dict[str, Any]:
    """Two groups midway: one whose member is still in it, and one that its member left."""
    billing = {"topic": "orders", "group": "billing", "consumer": "billing-1"}
    joined = client.act("group.join", **billing, max_deliver=3, dead_ms=LONG_DEAD_MS)
    billing["epoch"] = joined["epoch"]
    answer, _ = client.fetch(**billing)
    epochs = {one["shard"]: one["epoch"] for one in answer["assigned"]}
    assert sorted(epochs) == [0, 1, 2, 3]

    def ack(shard: int, **report: Any) -> None:
        entry = {"shard": shard, "epoch": epochs[shard], **report}
        (judged,) = client.act("group.ack", **billing, shards=[entry])["shards"]
        assert judged.get("error") is None, judged

    def fail(shard: int, offset: int, times: int) -> None:
        for attempt in range(times):
            ack(shard, failed=[{"offset": offset, "reason": "golden", "attempt": attempt}])

    ack(0, acked=[[0, 3], [5, 7], [9, 10]], emitted=7, redelivered=1)
    ack(1, acked=[[0, 1]])
    fail(1, 1, times=2)
    fail(2, 0, times=3)  # goes to orders.dlq
    ack(2, acked=[[2, 4]])

    audit = {"topic": "orders", "group": "audit", "consumer": "audit-1"}
    audit["epoch"] = client.act("group.join", **audit)["epoch"]
    answer, _ = client.fetch(**audit)
    shards = [
        {"shard": one["shard"], "epoch": one["epoch"], "acked": [[0, 2], [3, 4]], "emitted": 3}
        for one in answer["assigned"]
    ]
    client.act("group.leave", **audit, shards=shards)

    follower = {"topic": "orders", "group": "latest", "consumer": "latest-1"}
    follower["epoch"] = client.act("group.join", **follower, start="latest")["epoch"]
    client.act("group.leave", **follower)

    return {
        "orders/billing": {
            "consumer": "billing-1",
            "epoch": joined["epoch"],
            "shard_epochs": {str(shard): epoch for shard, epoch in epochs.items()},
            "acked": {"0": [[0, 3], [5, 7], [9, 10]], "1": [[0, 1]], "2": [[0, 1], [2, 4]]},
            "attempts": {"1": {"1": 2}},
        },
        "orders/audit": {
            "acked": {str(shard): [[0, 2], [3, 4]] for shard in range(4)},
            "attempts": {},
        },
    }


def make_removed_group(client: native.Client) -> dict[str, Any]:
    """A group that was removed. One of its name must not give its epochs again."""
    member = {"topic": "orders", "group": "removed", "consumer": "removed-1"}
    for _ in range(3):
        joined = client.act("group.join", **member)
    client.act("group.rm", topic="orders", group="removed", force=True)
    return {"topic": "orders", "group": "removed", "epoch": joined["epoch"]}


# --- pirate


def make_pirate(bus: GoldenBus, client: native.Client, folder: Path) -> dict[str, Any]:
    """Two subscribers midway. `sender` has a PUT that the bus stored and did not answer."""
    server = bus.addresses["pirate"]
    bodies = [b"news %d" % n for n in range(1, 7)]
    sender_options: dict[str, Any] = {"state": folder / "sender", "timeout_s": 0.3, "tries": 1}
    with (
        pirate.blocking.connect(server, id="reader", state=folder / "reader") as reader,
        pirate.blocking.connect(server, id="sender", **sender_options) as sender,
    ):
        sender.subscribe("news")
        reader.subscribe("news")
        for body in bodies:
            reader.put("news", body)
        sender.put("news", LARGE_BODY)
        read = [reader.get("news") for _ in range(3)]
        assert [one.body for one in read if one] == bodies[:3]
        sender.get("news")
        os.kill(bus.process.pid, signal.SIGSTOP)
        try:
            sender.put("news", b"news without an answer")
            raise AssertionError("a stopped bus has answered")
        except OutcomeUnknown:
            pass
        finally:
            os.kill(bus.process.pid, signal.SIGCONT)
        wait_until(lambda: client.topic("news")["next_id"] == 9, "the PUT of the stopped bus")
        known = {"counter": sender.counter, "pending": list(sender.pending or ())[:3]}
        return {
            "reader": {"id": "reader", "next_id": 4, "read": 3, "counter": reader.counter},
            "sender": {"id": "sender", "next_id": 2, "read": 1, "stored_as": 8, **known},
        }


def leave_put_without_bus(bus: GoldenBus, folder: Path) -> dict[str, Any]:
    """`reader` gets a PUT that no bus has seen: the bus ends between its HELLO and the PUT."""
    bus.start()
    server, state = bus.addresses["pirate"], folder / "reader"
    with pirate.blocking.connect(server, state=state, timeout_s=0.3, tries=1) as reader:
        assert bus.stop() == 0
        try:
            reader.put("news", b"news that was never sent")
            raise AssertionError("a bus that has ended has answered")
        except OutcomeUnknown:
            pass
        pending = list(reader.pending or ())
        return {"counter": reader.counter, "pending": pending[:3]}


# --- Spark


def make_spark(bus: GoldenBus, client: native.Client, made: Path) -> dict[str, Any]:
    """Checkpoints that are between two batches, an archive, and messages that none has read."""
    from pyspark.sql import DataFrame

    import polybus.spark
    from polybus.spark import pipelines

    client.create_topic("readings", shards=2)
    producer = client.producer("sensor")

    def produce(first: int, count: int) -> list[str]:
        numbers = range(first, first + count)
        bodies = [b"reading %03d" % n for n in numbers]
        producer.produce("readings", bodies, [f"sensor-{n % 5}" for n in numbers]).result()
        return [body.decode() for body in bodies]

    read = produce(0, READINGS)
    spark = polybus.spark.session("local[2]", name="golden")
    source = spark.readStream.format("polybus").options(bus=bus.url, topic="readings")
    rows = source.option("maxRowsPerBatch", 8).load()
    seen: list[str] = []

    def keep(batch: DataFrame, number: int) -> None:
        seen.extend(row.body.decode() for row in batch.select("body").collect())

    reading = rows.writeStream.foreachBatch(keep).queryName("golden source")
    reading = reading.option("checkpointLocation", str(made / "checkpoint-source"))
    query = reading.trigger(availableNow=True).start()
    query.awaitTermination()
    assert sorted(seen) == read

    writing = rows.select("shard_key", "body").writeStream.format("polybus")
    writing = writing.options(bus=bus.url, topic="readings.copy").queryName("golden sink")
    writing = writing.option("checkpointLocation", str(made / "checkpoint-sink"))
    sink = writing.trigger(availableNow=True).start()
    sink.awaitTermination()

    table = spark.createDataFrame([("written once",)], "body string")
    once = {"bus": bus.url, "topic": "written", "transactionId": "golden-transaction"}
    table.write.format("polybus").mode("append").options(**once).save()

    pipelines.archive(spark, "readings", str(made / "archive"), bus=bus.url, once=True)
    spark.stop()
    unread = produce(READINGS, UNREAD)
    return {
        "source_query": str(query.id),
        "sink_query": str(sink.id),
        "read": read,
        "unread": unread,
        "epochs": len(list((made / "checkpoint-sink" / "commits").glob("[0-9]*"))),
        "transaction": {"topic": "written", "id": "golden-transaction", "rows": 1},
    }


# --- rules, configuration, and reading back


def make_rules(made: Path, scratch: Path) -> list[dict[str, Any]]:
    """`acl.toml` as the bus writes it, and the decisions of a bus with it and `config.toml`."""
    folder = scratch / "rules"
    folder.mkdir()
    shutil.copy(made / "config.toml", folder)
    with GoldenBus(None, "--config", str(folder / "config.toml")) as bus:
        for rule in RULES:
            bus.run("acl", "add", *rule.split())
        shutil.copy(folder / "data" / "acl.toml", made / "acl.toml")
        with bus.client() as client:
            return [goldenread.decision(client, *question) for question in QUESTIONS]


def read_back(made: Path, scratch: Path) -> dict[str, Any]:
    """Open the folder in a bus and return its state, which must match the written messages."""
    with GoldenBus(copied(made / "data", scratch / "copy")) as bus, bus.client() as client:
        state = goldenread.bus_state(client)
        goldenread.provoke_counters(bus)
        wait_until(lambda: set(goldenread.counter_names(bus)) >= CLOSED, "closed connections")
        counters = goldenread.counter_names(bus)
    for topic, bodies in {
        "orders": [order_body(n) for n in range(80)],
        "readings": [b"reading %03d" % n for n in range(READINGS + UNREAD)],
        "readings.copy": [b"reading %03d" % n for n in range(READINGS)],
    }.items():
        found = sorted(row[6] for row in state["topics"][topic]["messages"])
        assert found == sorted(map(goldenread.digest, bodies)), topic
    config = command("config", "show", "--json", env=plain_environment())
    given = command("config", "show", str(made / "config.toml"), "--json", env=plain_environment())
    return {
        **state,
        "archive": goldenread.archive_rows(made / "archive"),
        "error_codes": goldenread.error_codes(),
        "counters": counters,
        "config": {
            "keys": sorted(json.loads(config.stdout)),
            "values": {
                key: one["value"]
                for key, one in sorted(json.loads(given.stdout).items())
                if one["source"] != "default" and key != "data"
            },
        },
    }


def tidy(made: Path) -> None:
    """Remove files that hold nothing: locks, and checksums that Spark does not need."""
    for path in sorted(made.rglob("*")):
        if path.name in ("lock", "owner.lock", "lock.mdb") or path.name.endswith(".crc"):
            path.unlink()


def shown(value: Any, depth: int = 0) -> str:
    """JSON with short values on one line each."""
    line = json.dumps(value, sort_keys=True, ensure_ascii=False)
    if len(line) <= 160 - depth or not isinstance(value, dict | list) or not value:
        return line
    indent = "\n" + " " * (depth + 1)
    if isinstance(value, list):
        parts = [shown(one, depth + 1) for one in value]
        return f"[{indent}{(',' + indent).join(parts)}\n{' ' * depth}]"
    parts = [f"{json.dumps(key)}: {shown(one, depth + 1)}" for key, one in sorted(value.items())]
    return f"{{{indent}{(',' + indent).join(parts)}\n{' ' * depth}}}"


if __name__ == "__main__":
    main()
