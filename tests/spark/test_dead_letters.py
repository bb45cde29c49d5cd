"""`polybus pipeline dead-letters`: counts by reason, and re-queues each letter once."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from polybus.errors import DoesNotExist, UsageError
from polybus.model.arrow import HEADERS_TYPE
from polybus.spark.pipelines import requeue
from polybus.spark.pipelines.dead_letters import dead_letters

REASONS = ("ValueError: bad", "KeyError: 'x'", "handler took too long")
LETTERS = 60


def letter(n: int, topic: str) -> list[tuple[str, bytes]]:
    headers = {
        "topic": topic,
        "shard": n % 2,
        "offset": n,
        "id": n + 1,
        "group": f"g{n % 2}",
        "deliveries": 5,
        "reason": REASONS[n % 3],
    }
    return [("mine", b"kept"), *((f"polybus.{k}", str(v).encode()) for k, v in headers.items())]


def messages(client: Any, topic: str) -> list[dict[str, Any]]:
    return [row for batch in client.read(topic) for row in batch.to_pylist()]


def numbers(client: Any, topic: str) -> list[int]:
    return sorted(int(row["body"]) for row in messages(client, topic))


@pytest.fixture
def topic_with_letters(client, topic):
    """A topic with dead letters as the bus writes them."""
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
def run(spark, bus, topic_with_letters):
    def run(**given: Any) -> Any:
        return dead_letters(
            spark, given.pop("topic", topic_with_letters), bus=bus.url, once=True, **given
        )

    return run


def counted(summary: Any) -> dict[str, int]:
    assert summary.table.columns[2] == "letters"
    return {row[1]: row[2] for row in summary.table.rows}


def test_letters_are_counted_by_column(run):
    assert counted(run()) == dict.fromkeys(REASONS, 20)
    assert counted(run(by="group")) == {"g0": 30, "g1": 30}
    kinds = counted(run(by="kind", where="deliveries = 5 AND from_id <= 30"))
    assert kinds == {"ValueError": 10, "KeyError": 10, "handler took too long": 10}


def test_each_letter_is_requeued_once(run, client, topic_with_letters):
    assert run(requeue=True, reason=["ValueError*"], group=["g0"]).rows == 10
    assert numbers(client, topic_with_letters) == list(range(0, LETTERS, 6))
    assert counted(run()) == {"ValueError: bad": 10, REASONS[1]: 20, REASONS[2]: 20}
    assert run(requeue=True, letter=[1, 2], where="id > 0").rows <= 2
    assert run(requeue=True, every_letter=True).rows >= 48
    assert run(requeue=True, every_letter=True).rows == 0
    assert numbers(client, topic_with_letters) == list(range(LETTERS))
    by_key: dict[str, list[int]] = {}
    for row in messages(client, topic_with_letters):
        assert dict(row["headers"]) == {"mine": b"kept", "polybus.requeued": b"1"}
        by_key.setdefault(row["shard_key"], []).append(int(row["body"]))
    assert {key: {n % 5 for n in letters} for key, letters in by_key.items()} == {
        f"k{n}": {n} for n in range(5)
    }


def test_letters_are_changed_by_select(run, client, topic_with_letters):
    out = f"{topic_with_letters}.mended"
    mended = "concat('7', cast(body AS string)) AS body, upper(shard_key) AS shard_key"
    assert run(requeue=True, where="kind = 'KeyError'", select=mended, into=out).rows == 20
    assert numbers(client, out) == sorted(int(f"7{n}") for n in range(1, LETTERS, 3))


def test_concurrent_requeue_is_detected(run, spark, bus, client, topic_with_letters):
    """Both runs have read the same letters."""
    choice = requeue.LetterSelection("reason LIKE 'V%'", None, None)
    first, second = (
        requeue.DeadLetterTopic(spark, bus.url, f"{topic_with_letters}.dlq") for _ in range(2)
    )
    assert first.requeue(choice)
    assert not second.requeue(requeue.LetterSelection(None, None, None))
    assert numbers(client, topic_with_letters) == list(range(0, LETTERS, 3))
    assert run(requeue=True, every_letter=True).rows == 40
    assert numbers(client, topic_with_letters) == list(range(LETTERS))


def test_letters_are_requeued_again_if_markers_were_dropped(run, client, topic_with_letters):
    assert run(requeue=True, reason=["Value*"]).rows == LETTERS / 3
    client.drop_topic(f"{topic_with_letters}.dlq.requeued")
    assert run(requeue=True, every_letter=True).rows == LETTERS
    assert run(requeue=True, every_letter=True).rows == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"requeue": True}, "--requeue needs a choice: --reason, --group, --id, --where, or --all"),
        ({"by": "colour"}, "--by must be one of reason, kind, group, from_topic, got 'colour'"),
        ({"into": "x"}, "--select and --into need --requeue"),
        ({"where": "reason ="}, "--where 'reason =' does not parse"),
        ({"where": "resaon = 'x'"}, "`resaon` cannot be resolved"),
        ({"requeue": True, "where": "rand() < 0.5"}, "must be deterministic"),
        (
            {"requeue": True, "every_letter": True, "select": "id AS body"},
            "column body is bigint",
        ),
    ],
)
def test_invalid_arguments_are_reported(run, given, message):
    with pytest.raises(UsageError) as caught:
        run(**given)
    assert message in str(caught.value).splitlines()[0]


def test_topic_without_dead_letters(run):
    with pytest.raises(DoesNotExist, match=r"there is no durable topic 'nowhere\.dlq'"):
        run(topic="nowhere")
    with pytest.raises(DoesNotExist, match=r"no durable topic matches 'nowhere\*.dlq'"):
        run(topic="nowhere*")


def test_dropped_topic_is_not_created_again(run, client, topic_with_letters):
    client.drop_topic(topic_with_letters)
    with pytest.raises(DoesNotExist, match="does not exist: give --into TOPIC"):
        run(requeue=True, every_letter=True)
    assert run(requeue=True, every_letter=True, into=f"{topic_with_letters}.new").rows == LETTERS
