"""`polybus pipeline stats`: tables match the messages, also over several runs."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from typing import Any

import pyarrow.parquet as pq
import pytest

from polybus.dialects import fdq
from polybus.errors import DoesNotExist, UsageError
from polybus.spark.pipelines.stats import partial_sums
from polybus.spark.pipelines.stats.stats_pipeline import stats
from tests.rig.observer import until

ROWS = 300


@pytest.fixture
def feed(client, topic):
    """Produce messages of growing size; a third has the same key, some have none."""
    client.create_topic(topic, shards=3)
    sent = 0

    def produce(count: int = ROWS) -> None:
        nonlocal sent
        some = range(sent, sent + count)
        keys = ["hot" if n % 3 == 0 else None if n % 10 == 1 else f"k{n % 7}" for n in some]
        with client.producer() as producer:
            producer.produce(topic, [b"x" * (n % 50 + 1) for n in some], keys).result()
        sent += count

    return produce


@pytest.fixture
def run(spark, bus, topic, tmp_path):
    def run(**given: Any) -> Any:
        options = {"bus": bus.url, "out": str(tmp_path / "out"), "once": True, "window": 3600}
        return stats(spark, given.pop("topic", topic), **{**options, **given})

    return run


def table(tmp_path: Any, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(tmp_path / "out" / f"{name}.parquet").to_pylist()
    return rows


def messages(client: Any, topic: str) -> list[dict[str, Any]]:
    return [row for batch in client.read(topic) for row in batch.to_pylist()]


def check(client: Any, topic: str, tmp_path: Any) -> None:
    """Compare every table with the messages."""
    rows = messages(client, topic)
    size = sum(len(row["body"]) for row in rows)
    windows = table(tmp_path, "windows")
    assert sum(one["messages"] for one in windows) == len(rows)
    assert sum(one["bytes"] for one in windows) == size
    assert all(one["size_p50"] <= one["size_p99"] <= one["size_max"] for one in windows)
    assert all(0 < one["latency_ms_p50"] <= one["latency_ms_max"] for one in windows)
    keys = Counter(row["shard_key"] for row in rows if row["shard_key"] is not None)
    assert {one["shard_key"]: one["messages"] for one in table(tmp_path, "keys")} == keys
    shards = Counter(row["shard"] for row in rows)
    assert {one["shard"]: one["messages"] for one in table(tmp_path, "shards")} == shards
    (whole,) = table(tmp_path, "topics")
    assert (whole["messages"], whole["bytes"]) == (len(rows), size)
    assert (whole["keys"], whole["keyless"]) == (len(keys), len(rows) - keys.total())
    assert whole["largest_key"] == "hot"
    assert whole["largest_key_share"] == keys["hot"] / len(rows)


def test_tables_match_the_messages_over_two_runs(feed, run, client, topic, tmp_path, monkeypatch):
    """The second run adds to the first. Partial sums are merged during the runs."""
    monkeypatch.setattr(partial_sums, "MOST_FILES", 2)
    feed()
    assert run().rows == ROWS
    check(client, topic, tmp_path)
    for _ in range(2):
        feed(50)
        assert run().rows == 50
        check(client, topic, tmp_path)
    assert run().rows == 0
    check(client, topic, tmp_path)
    names = sorted(path.name for path in (tmp_path / "out" / "_parts").glob("*.keys.parquet"))
    assert len(names) <= 3
    page = (tmp_path / "out" / "report.html").read_text()
    assert topic in page
    assert "Keys with the most messages" in page


def test_group_samples(feed, run, bus, topic, tmp_path):
    feed()
    handled = []
    with fdq.Consumer(bus.url) as consumer:
        consumer.consume(topic, "c-1", handled.append, group="billing")
        until(lambda: len(handled) == ROWS, "all to be handled")
    run()
    (group,) = table(tmp_path, "groups")
    assert (group["topic"], group["group"], group["lag"]) == (topic, "billing", 0)
    assert group["acked"] == ROWS
    assert group["ack_p50_ms"] <= group["ack_p99_ms"]
    assert "Group billing" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"out": None}, UsageError, "--out FOLDER is missing"),
        ({"out": "/proc/here"}, UsageError, "--out /proc/here is not writable"),
        ({"topic": "nowhere"}, DoesNotExist, "there is no durable topic 'nowhere'"),
        ({"window": 7200}, UsageError, "--window was 3600, got 7200"),
    ],
)
def test_invalid_arguments_are_reported(feed, run, tmp_path, topic, given, error, message):
    (tmp_path / "out").mkdir()
    mark = {"version": 1, "TOPIC": topic, "--window": 3600, "--checkpoint": None}
    (tmp_path / "out" / "stats.json").write_text(json.dumps(mark))
    with pytest.raises(error) as caught:
        run(**given)
    assert message in str(caught.value).splitlines()[0]


def test_folder_with_other_files_is_refused(feed, run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "stats.json").write_text("[1]")
    with pytest.raises(UsageError, match="has stats with other arguments"):
        run()


def test_sums_and_checkpoint_must_match(feed, run, tmp_path):
    """Batch numbers restart with another checkpoint, which would replace counted batches."""
    feed(10)
    run()
    shutil.copytree(tmp_path / "out" / "_checkpoint", tmp_path / "kept")
    with pytest.raises(UsageError, match=r"--checkpoint was None, got '.*kept'"):
        run(checkpoint=str(tmp_path / "kept"))
    with pytest.raises(UsageError, match="kept belongs to other stats: give another --checkpoint"):
        run(out=str(tmp_path / "other"), checkpoint=str(tmp_path / "kept"))
    shutil.rmtree(tmp_path / "out" / "_checkpoint")
    with pytest.raises(UsageError, match=r"the checkpoint of .* is missing"):
        run()
