"""`polybus pipeline dead-letters`: counted by reason, and queued again, each letter once."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from polybus.errors import DoesNotExist, UsageError
from polybus.model.arrow import HEADERS_TYPE
from polybus.spark.pipelines.dead_letters import requeue
from polybus.spark.pipelines.dead_letters.dead_letters_pipeline import dead_letters

REASONS = ("ValueError: bad", "KeyError: 'x'", "handler took too long")
LETTERS = 60


def letter(n: int, topic: str) -> list[tuple[str, bytes]]:
    told = {
        "topic": topic,
        "shard": n % 2,
        "offset": n,
        "id": n + 1,
        "group": f"g{n % 2}",
        "deliveries": 5,
        "reason": REASONS[n % 3],
    }
    return [("mine", b"kept"), *((f"polybus.{k}", str(v).encode()) for k, v in told.items())]


def messages(client: Any, topic: str) -> list[dict[str, Any]]:
    return [row for batch in client.read(topic) for row in batch.to_pylist()]


def numbers(client: Any, topic: str) -> list[int]:
    return sorted(int(row["body"]) for row in messages(client, topic))


@pytest.fixture
def given_up(client, topic):
    """A topic, and dead letters of it as the bus writes them."""
    client.create_topic(topic, shards=2)
    client.create_topic(f"{topic}.dlq", shards=2)
    some = range(LETTERS)
    columns = [
        pa.array([f"k{n % 5}" for n in some]),
        pa.array([b"%d" % n for n in some]),
        pa.array([letter(n, topic) for n in some], HEADERS_TYPE),
    ]
    rows = pa.record_batch(columns, ["shard_key", "body", "headers"])
    with client.producer() as producer:
        producer.produce_rows(f"{topic}.dlq", rows).result()
    return topic


@pytest.fixture
def run(spark, bus, given_up):
    def run(**given: Any) -> Any:
        return dead_letters(spark, given.pop("topic", given_up), bus=bus.url, once=True, **given)

    return run


def counted(summary: Any) -> dict[str, int]:
    assert summary.table.columns[2] == "letters"
    return {row[1]: row[2] for row in summary.table.rows}


def test_letters_are_counted_by_what_is_asked(run):
    assert counted(run()) == dict.fromkeys(REASONS, 20)
    assert counted(run(by="group")) == {"g0": 30, "g1": 30}
    kinds = counted(run(by="kind", where="deliveries = 5 AND from_id <= 30"))
    assert kinds == {"ValueError": 10, "KeyError": 10, "handler took too long": 10}


def test_each_letter_is_queued_again_once_whoever_chooses_it(run, client, given_up):
    assert run(requeue=True, reason=["ValueError*"], group=["g0"]).rows == 10
    assert numbers(client, given_up) == list(range(0, LETTERS, 6))
    assert counted(run()) == {"ValueError: bad": 10, REASONS[1]: 20, REASONS[2]: 20}
    assert run(requeue=True, letter=[1, 2], where="id > 0").rows <= 2
    assert run(requeue=True, every_letter=True).rows >= 48
    assert run(requeue=True, every_letter=True).rows == 0
    assert numbers(client, given_up) == list(range(LETTERS))
    by_key: dict[str, list[int]] = {}
    for row in messages(client, given_up):
        assert dict(row["headers"]) == {"mine": b"kept", "polybus.requeued": b"1"}
        by_key.setdefault(row["shard_key"], []).append(int(row["body"]))
    assert {key: {n % 5 for n in one} for key, one in by_key.items()} == {
        f"k{n}": {n} for n in range(5)
    }


def test_letters_are_mended_on_their_way(run, client, given_up):
    out = f"{given_up}.mended"
    mended = "concat('7', cast(body AS string)) AS body, upper(shard_key) AS shard_key"
    assert run(requeue=True, where="kind = 'KeyError'", select=mended, into=out).rows == 20
    assert numbers(client, out) == sorted(int(f"7{n}") for n in range(1, LETTERS, 3))


def test_of_two_at_once_one_looks_again(run, spark, bus, client, given_up):
    """Both have seen the same letters."""
    choice = requeue.LetterSelection("reason LIKE 'V%'", None, None)
    first, second = (requeue.DeadLetterTopic(spark, bus.url, f"{given_up}.dlq") for _ in range(2))
    assert first.requeue(choice)
    assert not second.requeue(requeue.LetterSelection(None, None, None))
    assert numbers(client, given_up) == list(range(0, LETTERS, 3))
    assert run(requeue=True, every_letter=True).rows == 40
    assert numbers(client, given_up) == list(range(LETTERS))


def test_markers_that_were_dropped_are_begun_anew(run, client, given_up):
    """Then every letter is one that waits."""
    assert run(requeue=True, reason=["Value*"]).rows == LETTERS / 3
    client.drop_topic(f"{given_up}.dlq.requeued")
    assert run(requeue=True, every_letter=True).rows == LETTERS
    assert run(requeue=True, every_letter=True).rows == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"requeue": True}, "--requeue needs a choice: --reason, --group, --id, --where, or --all"),
        ({"by": "colour"}, "--by is one of reason, kind, group, from_topic, not 'colour'"),
        ({"into": "x"}, "--select and --into are for --requeue"),
        ({"where": "reason ="}, "--where 'reason =' does not parse"),
        ({"where": "resaon = 'x'"}, "`resaon` cannot be resolved"),
        ({"requeue": True, "where": "rand() < 0.5"}, "must say the same each time"),
        (
            {"requeue": True, "every_letter": True, "select": "id AS body"},
            "column body is bigint",
        ),
    ],
)
def test_what_cannot_be_is_told_at_once(run, given, says):
    with pytest.raises(UsageError) as caught:
        run(**given)
    assert says in str(caught.value).splitlines()[0]


def test_a_topic_without_dead_letters(run):
    with pytest.raises(DoesNotExist, match=r"there is no durable topic 'nowhere\.dlq'"):
        run(topic="nowhere")
    with pytest.raises(DoesNotExist, match=r"no durable topic matches 'nowhere\*.dlq'"):
        run(topic="nowhere*")


def test_a_topic_that_was_dropped_is_not_made_again(run, client, given_up):
    client.drop_topic(given_up)
    with pytest.raises(DoesNotExist, match="is not there: say where to, --into TOPIC"):
        run(requeue=True, every_letter=True)
    assert run(requeue=True, every_letter=True, into=f"{given_up}.new").rows == LETTERS
