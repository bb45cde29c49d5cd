"""Read the state of a bus in the form in which expected.json records it.

`make.py` writes these values and the tests compare them. Values that depend on the wall
clock or on the running process (lag in seconds, pids) are left out.
"""

from __future__ import annotations

import hashlib
import json
import socket
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from polybus import errors, native, pirate
from polybus.errors import DoesNotExist
from tests.golden.goldenbus import GoldenBus

GROUP_SHARD_FIELDS = [
    "shard",
    "epoch",
    "owner",
    "start",
    "low",
    "ranges",
    "attempts",
    "suspect_to",
    "acked",
    "emitted",
    "redelivered",
    "dead_lettered",
    "trimmed_unread",
    "lag",
]
TOPIC_FIELDS = [
    "number",
    "shards",
    "generations",
    "creator",
    "settings",
    "first_id",
    "next_id",
    "timestamp_ns",
]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def rows(client: native.Client, topic: str, start: int | None = None) -> list[dict[str, Any]]:
    """Return all messages of a topic in the order of their ids."""
    return [row for batch in client.read(topic, start=start) for row in batch.to_pylist()]


def row_state(row: dict[str, Any]) -> list[Any]:
    headers = row["headers"]
    return [
        row["id"],
        row["shard"],
        row["offset"],
        row["timestamp_ns"],
        row["insertion_ms"],
        row["shard_key"],
        digest(row["body"]),
        None if headers is None else [[name, value.decode()] for name, value in headers],
    ]


def topic_state(client: native.Client, topic: str) -> dict[str, Any]:
    info, bounds = dict(client.topic(topic)), client.bounds(topic)
    stats = client.topic_stats(topic)
    return {
        **{name: info[name] for name in TOPIC_FIELDS},
        "bounds": [[one["shard"], one["start"], one["end"]] for one in bounds["shards"]],
        "counts": stats["all"],
        "messages": [row_state(row) for row in rows(client, topic)],
        "queries": sorted(
            [one["query"], one["name"], one["offsets"], one["lag"], one["told_ns"]]
            for one in stats["queries"]
        ),
        "subscribers": sorted([one["id"], one["last"], one["lag"]] for one in stats["subscribers"]),
    }


def group_state(client: native.Client, topic: str, group: str) -> dict[str, Any]:
    info = client.act("group.info", topic=topic, group=group)
    return {
        "members": info["members"],
        "shards": [{name: one[name] for name in GROUP_SHARD_FIELDS} for one in info["shards"]],
        "ack_latency": info["ack_latency"],
    }


def group_names(client: native.Client) -> list[tuple[str, str]]:
    return sorted((one["topic"], one["group"]) for one in client.act("group.list")["groups"])


def bus_state(client: native.Client) -> dict[str, Any]:
    return {
        "topics": {
            one["topic"]: topic_state(client, one["topic"])
            for one in sorted(client.topics(), key=lambda one: str(one["topic"]))
        },
        "groups": {
            f"{topic}/{group}": group_state(client, topic, group)
            for topic, group in group_names(client)
        },
    }


def decision(client: native.Client, who: str, verb: str, topic: str) -> dict[str, Any]:
    """Return the verdict and its rule. The text of the reason is left out: it may change."""
    answer = client.act("acl.test", who=who, action=verb, topic=topic)
    found = {"allowed": answer["allowed"], "rule": answer["rule"]}
    return {"who": who, "verb": verb, "topic": topic, **found}


def provoke_counters(bus: GoldenBus) -> None:
    """Cause some events that the bus counts by their reason."""
    for dialect in ("rqueue", "freud", "gsb"):
        send_garbage(bus.addresses[dialect])
    bus.run("gsb", "call", "nobody", '"hello"', "--at", bus.addresses["gsb"], code=4)
    with (
        tempfile.TemporaryDirectory() as state,
        pirate.blocking.connect(bus.addresses["pirate"], id="counted", state=state) as client,
    ):
        for refused in (lambda: client.put("absent", b"x"), lambda: client.get("absent")):
            try:
                refused()
                raise AssertionError("a topic that does not exist was used")
            except DoesNotExist:
                pass


def counter_names(bus: GoldenBus) -> list[str]:
    return flattened(json.loads(bus.run("stats", "--json")))


def send_garbage(address: str) -> None:
    """Send bytes that are not a frame of any dialect, until the bus closes the connection."""
    scheme, _, place = address.partition(":")
    host, _, port = place.removeprefix("//").rpartition(":")
    family = socket.AF_UNIX if scheme == "unix" else socket.AF_INET
    with socket.socket(family) as peer:
        peer.settimeout(10)
        peer.connect(place if scheme == "unix" else (host, int(port)))
        peer.sendall(b"\xff" * 64)
        try:
            while peer.recv(4096):
                pass
        except ConnectionResetError:
            pass


def flattened(tree: dict[str, Any], prefix: str = "") -> list[str]:
    """The dotted names of all values of nested objects; an empty object is a name, too."""
    found: list[str] = []
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            found += flattened(value, f"{prefix}{name}.")
        else:
            found.append(prefix + name)
    return sorted(found)


def error_codes() -> list[str]:
    """The codes of all errors in the tree."""
    kinds: list[type[errors.PolybusError]] = [errors.PolybusError]
    for kind in kinds:  # grows during the loop
        kinds += [one for one in kind.__subclasses__() if one.__module__ == errors.__name__]
    return sorted({kind.code for kind in kinds})


def archive_rows(folder: Path) -> list[list[Any]]:
    """The rows of the newest manifest of each topic, by docs/spec/archive.md alone."""
    found = []
    for topic in sorted((folder / "_polybus" / "topics").iterdir()):
        newest = json.loads(max(topic.glob("*.json")).read_text())
        for file in newest["files"]:
            table = pq.ParquetFile(folder / file["path"]).read()
            for row in table.to_pylist():
                place = [newest["topic"], row["shard"], row["offset"], row["id"]]
                found.append([*place, row["timestamp_ns"], row["shard_key"], digest(row["body"])])
    return sorted(found)
