"""`polybus pipeline replay`: what it brings back, and that it is there once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polybus.errors import Damaged, DoesNotExist, UsageError, WrongFormat
from polybus.spark.pipelines.replay.replay_pipeline import replay

ROWS, STEP = 200, 40


def bodies(client: Any, topic: str) -> list[int]:
    return sorted(int(one) for batch in client.read(topic) for one in batch["body"].to_pylist())


@pytest.fixture
def history(client, topic):
    """Numbers in five commits; the bus's time of each commit, in milliseconds."""
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


def test_all_of_it_once_also_into_itself(history, run, client, topic):
    told = []
    assert run(into=topic, tell=told.append).rows == ROWS
    assert run(into=topic).rows == 0
    assert bodies(client, topic) == sorted([*range(ROWS)] * 2)
    assert (told[-1].rows, told[-1].lag) == (ROWS, 0)


def test_by_id_key_and_sql_and_reshaped(history, run, client, topic):
    """Ids run shard by shard within a commit: which numbers these are the topic tells."""
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


def test_by_time_not_faster_than_it_may_be(history, run, client, topic):
    """To the millisecond, as places are written: commits of one are together."""
    out, first, last = f"{topic}.out", history[1] // 10**6, history[4] // 10**6
    summary = run(into=out, start=f"@{first}", end=f"@{last}", rate=30)
    rows = [row for batch in client.read(topic) for row in batch.to_pylist()]
    times = {int(row["body"]): row["timestamp_ns"] for row in rows}
    wanted = [n for n, ns in times.items() if first * 10**6 <= ns < last * 10**6]
    assert bodies(client, out) == sorted(wanted)
    assert summary.rows <= 30 * summary.seconds
    assert summary.facts["parts"] >= len(wanted) / 30


def test_a_replay_ends_where_it_ended_when_it_was_begun(history, run, client, topic):
    """Between its parts the topic grows."""
    out, told = f"{topic}.out", []

    def meanwhile(progress: Any) -> None:
        if not told:
            with client.producer() as producer:
                producer.produce(topic, [b"999"] * 50).result()
        told.append(progress)

    run(into=out, rate=90, tell=meanwhile)
    assert len(told) > 2
    assert bodies(client, out) == list(range(ROWS))


def test_another_replay_needs_another_checkpoint(history, run, topic):
    run(into=f"{topic}.out", where="id < 10")
    with pytest.raises(UsageError, match="--where was 'id < 10', and is 'id < 11'"):
        run(into=f"{topic}.out", where="id < 11")


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"where": "id >"}, UsageError, "--where 'id >' does not parse"),
        ({"start": "noon"}, UsageError, "'noon' is no place to begin"),
        ({"end": "@noon"}, UsageError, "'@noon' is no time"),
        ({"rate": 0}, UsageError, "--rate is messages a second"),
        ({"log": False}, UsageError, "--no-log leaves nothing to read"),
        ({"topic": "a,b"}, UsageError, "one topic at a time"),
        ({"topic": "nowhere"}, DoesNotExist, "there is no durable topic 'nowhere'"),
        ({"checkpoint": None}, UsageError, "--checkpoint FOLDER is missing"),
        ({"checkpoint": "/proc/here"}, UsageError, "cannot be written"),
        ({"archive": "/proc"}, WrongFormat, "/proc is no archive"),
    ],
)
def test_what_cannot_be_is_told_at_once(history, run, topic, given, error, says):
    with pytest.raises(error) as caught:
        run(**{"into": f"{topic}.out", **given})
    assert says in str(caught.value).splitlines()[0]


def test_into_itself_for_ever_is_refused(history, run, topic):
    with pytest.raises(UsageError, match="give --once or --to"):
        run(into=topic, once=False)


def test_nor_does_sql_send_it_round_for_ever(history, run, client, topic):
    with pytest.raises(UsageError, match="round for ever"):
        run(select=f"body, '{topic}' AS topic", once=False)
    assert bodies(client, topic) == list(range(ROWS))


def test_sql_that_fails_for_a_message_is_told_in_one_line(history, run, topic, capfd):
    with pytest.raises(UsageError, match=r"it fails for a message: .* cannot be cast to"):
        run(into=f"{topic}.out", where="cast(concat(shard_key, id) AS int) > 1")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["replay.json", "position.json"])
def test_a_checkpoint_that_is_damaged_is_told(history, run, topic, tmp_path, name):
    run(into=f"{topic}.out", where="id = 1")
    place = tmp_path / "checkpoint" / name
    for text in ("{", '{"version": 1}', json.dumps({"version": 2})):
        place.write_text(text)
        with pytest.raises(Damaged, match=name):
            run(into=f"{topic}.out", where="id = 1")
