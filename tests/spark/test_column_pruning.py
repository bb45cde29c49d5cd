"""Column pruning: queries read only the columns they need, with the same results."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from polybus.spark.source import column_pruning
from polybus.spark.source.topic_schema import SCHEMA
from tests.rig.native_bus import NativeBus

SCAN = re.compile(r"RelationV2\[([^]]*)\] polybus")
NUMBER = re.compile(r"#\d+L?")
ALL = ", ".join(SCHEMA.names)


@pytest.fixture
def load(spark: SparkSession, bus: NativeBus, client: Any, topic: str) -> Any:
    client.create_topic(topic, 3)
    with client.producer() as producer:
        for key in ("a", "b", "c"):
            producer.produce(topic, [key.encode() * n for n in range(5)], [key] * 5).result()

    def load(session: SparkSession = spark) -> DataFrame:
        return session.read.format("polybus").options(bus=bus.url, topic=topic).load()

    return load


def scanned(query: DataFrame) -> list[str]:
    """Return the columns of each scan of a topic in the optimized plan."""
    plan = query._jdf.queryExecution().optimizedPlan().toString()
    return [NUMBER.sub("", columns) for columns in SCAN.findall(plan)]


QUERIES = {
    "select sum(length(body)) from {rows}": ["body"],
    "select count(*) from {rows}": ["shard"],
    "select id from {rows} where shard = 1 and offset > 2 order by id": ["shard, offset, id"],
    "select shard_key, count(*) n from {rows} group by all order by 1": ["shard_key"],
    "select count(headers), min(topic), max(timestamp) from {rows}": ["topic, timestamp, headers"],
    "select x.body from {rows} x join {rows} y on x.id = y.id + 1 order by x.id": [
        "id, body",
        "id",
    ],
    "select body from {rows} where id = (select max(id) from {rows})": ["id", "id, body"],
    "select * from {rows} where shard = 1 order by id": [ALL],
}


def test_queries_read_needed_columns_with_the_same_results(spark, load):
    rows = load()
    # The expected results come from the same queries on a copy of all rows.
    copied = spark.createDataFrame(rows.collect(), SCHEMA)
    for query, columns in QUERIES.items():
        result = spark.sql(query, rows=rows)
        assert scanned(result) == columns, query
        assert result.collect() == spark.sql(query, rows=copied).collect(), query


def test_table_keeps_its_rows_with_pruned_columns(load, client, topic):
    rows = load()
    assert rows.count() == 15
    with client.producer() as producer:
        producer.produce(topic, [b"later"]).result()
    assert rows.select("body").where("body = 'later'").count() == 0
    assert len(rows.collect()) == 15
    assert load().select("id").count() == 16


def test_errors_are_the_same_with_pruned_columns(load, client, topic):
    rows = load()
    assert rows.count() == 15
    client.drop_topic(topic)
    with pytest.raises(PySparkException, match=f"topic '{topic}', shard"):
        rows.select("body").collect()
    with pytest.raises(PySparkException, match=f"there is no durable topic '{topic}'"):
        load().select("body").collect()


def test_rule_is_installed_once(spark):
    column_pruning.install(spark)
    rules = spark._jsparkSession.experimental().extraOptimizations()
    assert [rules.apply(n).ruleName() for n in range(rules.size())] == [column_pruning.RULE]


def test_rule_for_another_spark_is_skipped(spark, load, tmp_path, monkeypatch, caplog):
    foreign = tmp_path / column_pruning.SOURCE.name
    foreign.write_text(
        column_pruning.SOURCE.read_text().replace("AttributeSet;", "OfAnotherSpark;")
    )
    monkeypatch.setattr(column_pruning, "SOURCE", foreign)
    other = spark.newSession()
    with caplog.at_level(logging.INFO, "polybus.spark"):
        column_pruning.install(other)
    assert "column pruning is off" in caplog.text
    ids = load(other).select("id")
    assert (scanned(ids), ids.count()) == ([ALL], 15)
