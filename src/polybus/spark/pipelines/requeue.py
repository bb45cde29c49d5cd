"""Re-queueing of dead letters: each letter once, without a checkpoint.

A dead letter stays in its topic. A marker in TOPIC.dlq.requeued records that it was re-queued; it
is published in the same commit as the message. The number of existing markers is the number of the
transaction. If two runs saw the same markers, the second publish has a number that is already used
and changes nothing. That run then finds that the new markers are not its own, and reads again. Each
letter is therefore re-queued once, however many runs select it and whatever is killed.

A letter without its marker would be re-queued again, so `retain` must trim markers after letters.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import broadcast

from polybus.errors import AlreadyExists, DoesNotExist
from polybus.native import Client
from polybus.spark.pipelines import message_sql
from polybus.spark.source.log_access import RECONNECT_OPTIONS, LogAccess, ShardOffsets

SUFFIX, MARKED = ".dlq", ".requeued"
PREFIX = "polybus."
HEADER_NAMES = ("topic", "shard", "offset", "id", "group", "deliveries", "reason")
REQUEUED = f"{PREFIX}requeued"  # header: how often this message was re-queued
# Columns for --where and --select, in addition to those of the message.
COLUMNS = {
    "headers": "map_filter(headers, (k, v) -> k NOT IN ({ours}))",
    "reason": "cast(headers['polybus.reason'] AS string)",
    "kind": "split(cast(headers['polybus.reason'] AS string), ':')[0]",
    "group": "cast(headers['polybus.group'] AS string)",
    "deliveries": "cast(cast(headers['polybus.deliveries'] AS string) AS int)",
    "requeued": "coalesce(try_cast(cast(headers['polybus.requeued'] AS string) AS int), 0)",
    "from_topic": "coalesce(cast(headers['polybus.topic'] AS string), {origin})",
    "from_shard": "try_cast(cast(headers['polybus.shard'] AS string) AS int)",
    "from_offset": "try_cast(cast(headers['polybus.offset'] AS string) AS long)",
    "from_id": "try_cast(cast(headers['polybus.id'] AS string) AS long)",
}
OWN = ("body", "shard_key", "id", "timestamp", "insertion_time", "shard", "offset")
HIDDEN = ("polybus_shard", "polybus_offset", "polybus_id", "polybus_into", "polybus_times")


def find_needed_markers(
    access: LogAccess, topic: str, shards: Mapping[int, ShardOffsets]
) -> dict[int, int]:
    """Return the first offset of each shard whose marker is needed, if `topic` has markers.

    A marker is needed as long as its letter is in the log.
    """
    if not topic.endswith(SUFFIX + MARKED):
        return {}
    try:
        letters = access.shards(topic.removesuffix(MARKED))
    except DoesNotExist:
        return {}

    def first_needed(shard: int, in_log: ShardOffsets) -> int:
        for batch in access.read(topic, shard, *in_log):
            places = map(json.loads, batch.column("body").to_pylist())
            for offset, place in zip(batch.column("offset").to_pylist(), places, strict=True):
                if place["offset"] >= letters[place["shard"]].start:
                    return int(offset)
        return in_log.end

    return {shard: first_needed(shard, in_log) for shard, in_log in shards.items()}


def as_letters(rows: DataFrame, topic: str) -> DataFrame:
    """Return messages of a dead letter topic, with their headers as columns."""
    ours = ", ".join(message_sql.literal(PREFIX + name) for name in HEADER_NAMES)
    given = {"ours": ours, "origin": message_sql.literal(topic.removesuffix(SUFFIX))}
    columns = [f"{text.format(**given)} AS `{name}`" for name, text in COLUMNS.items()]
    return rows.selectExpr(*OWN, *columns)


@dataclass(frozen=True)
class LetterSelection:
    """Which letters are re-queued, and how their messages change."""

    where: str | None
    select: str | None
    into: str | None

    def of(self, letters: DataFrame) -> DataFrame:
        """Return the selected letters."""
        return message_sql.apply_where(letters, self.where)

    def messages(self, letters: DataFrame) -> DataFrame:
        """Return the messages to queue again, with the position of each letter."""
        into = "from_topic" if self.into is None else message_sql.literal(self.into)
        places = ("shard", "offset", "id", into, "requeued + 1")
        hidden = [f"{place} AS {name}" for place, name in zip(places, HIDDEN, strict=True)]
        return message_sql.apply_select(
            self.of(letters), self.select or message_sql.WRITTEN, *hidden
        )


class DeadLetterTopic:
    """The letters of a topic that are not re-queued yet, as of now."""

    def __init__(self, spark: SparkSession, bus: str, topic: str) -> None:
        self._spark, self._bus = spark, bus
        self.topic, self.markers = topic, topic + MARKED
        with Client(bus, RECONNECT_OPTIONS) as client:
            self._marked = _end(client, self.markers)
        self.waiting = as_letters(self._read(topic), topic)
        if self._marked:
            place = "from_json(cast(body AS string), 'shard int, offset long') AS marked"
            marked = self._read(self.markers).selectExpr(place).selectExpr("marked.*")
            self.waiting = self.waiting.join(broadcast(marked), ["shard", "offset"], "left_anti")

    def requeue(self, choice: LetterSelection) -> bool:
        """Publish messages and markers. Returns False, without effect, if another run did."""
        run = uuid.uuid4().hex
        writer = (
            _with_markers(choice.messages(self.waiting), self.markers, run)
            .write.format("polybus")
            .mode("append")
            .options(bus=self._bus, transactionId=f"dead-letters/{self.topic}")
            .option("transactionNumber", self._marked + 1)
        )
        with Client(self._bus, RECONNECT_OPTIONS) as client:
            try:
                client.create_topic(self.markers, shards=1)
            except AlreadyExists:
                pass
            else:
                # A topic that was dropped continues at its last offset when it is created again.
                if _end(client, self.markers) != self._marked:
                    return False
            writer.save()
            # The first new marker shows which run has published under this number.
            batches = list(client.read(self.markers, 0, self._marked, self._marked + 1))
        bodies = [body for batch in batches for body in batch.column("body").to_pylist()]
        return any(run.encode() in body for body in bodies)

    def _read(self, topic: str) -> DataFrame:
        options = {"bus": self._bus, "topic": topic}
        return self._spark.read.format("polybus").options(**options).load()


def _end(client: Client, topic: str) -> int:
    try:
        return int(client.bounds(topic)["shards"][0]["end"])
    except DoesNotExist:
        return 0


def _with_markers(messages: DataFrame, markers: str, run: str) -> DataFrame:
    """Return each message, followed by the marker that it was re-queued."""
    names = messages.columns
    headers = "headers" if "headers" in names else "cast(NULL AS map<string, binary>)"
    ours = f"map('{REQUEUED}', cast(cast(polybus_times AS string) AS binary))"
    kept = f"map_filter(coalesce({headers}, map()), (k, v) -> k != '{REQUEUED}')"
    message = {
        "topic": "topic" if "topic" in names else "polybus_into",
        "shard_key": "shard_key" if "shard_key" in names else "cast(NULL AS string)",
        "body": "cast(body AS binary)",
        "headers": f"map_concat({kept}, {ours})",
    }
    marker_fields = {
        "shard": "polybus_shard",
        "offset": "polybus_offset",
        "id": "polybus_id",
        "into": message["topic"],
        "run": message_sql.literal(run),
    }
    marker = {
        "topic": message_sql.literal(markers),
        "shard_key": "cast(NULL AS string)",
        "body": f"cast(to_json({_struct(marker_fields)}) AS binary)",
        "headers": "cast(NULL AS map<string, binary>)",
    }
    return messages.selectExpr(f"inline(array({_struct(message)}, {_struct(marker)}))")


def _struct(fields: dict[str, str]) -> str:
    return f"named_struct({', '.join(f'{message_sql.literal(k)}, {v}' for k, v in fields.items())})"
