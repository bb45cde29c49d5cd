"""`polybus pipeline replay`: selection, rate, checkpoints, and each message once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polybus.errors import Damaged, DoesNotExist, UsageError, WrongFormat
from polybus.spark.pipelines.replay import replay

ROWS, STEP = 200, 40


def bodies(client: Any, topic: str) -> list[int]:
    return sorted(int(body) for batch in client.read(topic) for body in batch["body"].to_pylist())


@pytest.fixture
def history(client, topic):
    """Produce numbers in five commits. Returns the bus's time of each, in milliseconds."""
    client.create_topic(topic, shards=3)
    with client.producer() as producer:
        for first in range(0, ROWS, STEP):
            some = range(first, first + STEP)
            keys = [f"k{n % 7}" for n in some]
            producer.produce(topic, [b"%d" % n for n in some], keys).result()
    stamps = {ns for batch in client.read(topic) for ns in batch["timestamp_ns"].to_pylist()}
    return sorted(stamps)


@pytest.fixture
def run(spark, bus, topic, tmp_path):
    def run(**given: Any) -> Any:
        options = {"bus": bus.url, "checkpoint": str(tmp_path / "checkpoint"), "once": True}
        return replay(spark, given.pop("topic", topic), **{**options, **given})

    return run


def test_topic_is_replayed_into_itself_once(history, run, client, topic):
    reported = []
    assert run(into=topic, tell=reported.append).rows == ROWS
    assert run(into=topic).rows == 0
    assert bodies(client, topic) == sorted([*range(ROWS)] * 2)
    assert (reported[-1].rows, reported[-1].lag) == (ROWS, 0)


def test_replay_by_id_key_and_sql(history, run, client, topic):
    """Ids grow shard by shard within a commit, so the topic itself gives the expected numbers."""
    rows = [row for batch in client.read(topic) for row in batch.to_pylist()]
    wanted = [r for r in rows if 41 <= r["id"] < 121 and r["shard_key"] in ("k1", "k2")]
    out = f"{topic}.out"
    summary = run(
        into=out,
        start="41",
        end="121",
        key=["k1", "k2"],
        where="cast(cast(body AS string) AS int) % 2 = 0",
        select="concat('1', cast(body AS string)) AS body, upper(shard_key) AS shard_key",
    )
    expected = sorted(int(b"1" + r["body"]) for r in wanted if int(r["body"]) % 2 == 0)
    assert summary.rows == len(expected) > 0
    assert bodies(client, out) == expected
    keys = {key for batch in client.read(out) for key in batch["shard_key"].to_pylist()}
    assert keys == {"K1", "K2"}


def test_replay_by_time_within_the_rate(history, run, client, topic):
    """Positions have a precision of a millisecond: commits of one millisecond stay together."""
    out, first, last = f"{topic}.out", history[1] // 10**6, history[4] // 10**6
    summary = run(into=out, start=f"@{first}", end=f"@{last}", rate=30)
    rows = [row for batch in client.read(topic) for row in batch.to_pylist()]
    times = {int(row["body"]): row["timestamp_ns"] for row in rows}
    wanted = [n for n, ns in times.items() if first * 10**6 <= ns < last * 10**6]
    assert bodies(client, out) == sorted(wanted)
    assert summary.rows <= 30 * summary.seconds
    assert summary.facts["parts"] >= len(wanted) / 30


def test_replay_ends_at_the_end_of_its_start(history, run, client, topic):
    """The topic grows between parts."""
    out, reported = f"{topic}.out", []

    def produce_between_parts(progress: Any) -> None:
        if not reported:
            with client.producer() as producer:
                producer.produce(topic, [b"999"] * 50).result()
        reported.append(progress)

    run(into=out, rate=90, tell=produce_between_parts)
    assert len(reported) > 2
    assert bodies(client, out) == list(range(ROWS))


def test_checkpoint_of_another_replay_is_refused(history, run, topic):
    run(into=f"{topic}.out", where="id < 10")
    with pytest.raises(UsageError, match="--where was 'id < 10', got 'id < 11'"):
        run(into=f"{topic}.out", where="id < 11")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"where": "id >"}, UsageError, "--where 'id >' does not parse"),
        ({"start": "noon"}, UsageError, "invalid start position 'noon'"),
        ({"end": "@noon"}, UsageError, "invalid time '@noon'"),
        ({"rate": 0}, UsageError, "--rate must be > 0"),
        ({"log": False}, UsageError, "--no-log needs --archive"),
        ({"topic": "a,b"}, UsageError, "replay takes one topic"),
        ({"topic": "nowhere"}, DoesNotExist, "there is no durable topic 'nowhere'"),
        ({"checkpoint": None}, UsageError, "--checkpoint FOLDER is missing"),
        ({"checkpoint": "/proc/here"}, UsageError, "is not writable"),
        ({"archive": "/proc"}, WrongFormat, "/proc is not an archive"),
    ],
)
def test_invalid_arguments_are_reported(history, run, topic, given, error, message):
    with pytest.raises(error) as caught:
        run(**{"into": f"{topic}.out", **given})
    assert message in str(caught.value).splitlines()[0]


def test_endless_replay_into_itself_is_refused(history, run, topic):
    with pytest.raises(UsageError, match="give --once or --to"):
        run(into=topic, once=False)


def test_sql_that_would_loop_is_refused(history, run, client, topic):
    with pytest.raises(UsageError, match="loop forever"):
        run(select=f"body, '{topic}' AS topic", once=False)
    assert bodies(client, topic) == list(range(ROWS))


def test_failing_sql_is_reported_in_one_line(history, run, topic, capfd):
    with pytest.raises(
        UsageError, match=r"the SQL, which fails for a message: .* cannot be cast to"
    ):
        run(into=f"{topic}.out", where="cast(concat(shard_key, id) AS int) > 1")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["replay.json", "position.json"])
def test_damaged_checkpoint_is_reported(history, run, topic, tmp_path, name):
    run(into=f"{topic}.out", where="id = 1")
    place = tmp_path / "checkpoint" / name
    for text in ("{", '{"version": 1}', json.dumps({"version": 2})):
        place.write_text(text)
        with pytest.raises(Damaged, match=name):
            run(into=f"{topic}.out", where="id = 1")
