"""Kill route, replay, dead-letters and stats at the same time, each at a point of its own.

All four run in one driver until each waits at its point, in the middle of its work. Then driver,
Java and all workers get SIGKILL. Another driver finishes the work, while some of its tasks are
killed and fail. At the end each result must be that of the same pipeline without faults: the same
rows in the topics, none lost or duplicated, and the same tables.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polybus.errors import DoesNotExist
from polybus.model.arrow import HEADERS_TYPE
from tests.rig.native_bus import NativeBus
from tests.rig.observer import until
from tests.rig.points import SPARK
from tests.rig.spark.kill_points import FaultOrders
from tests.rig.spark.pipeline_group import PipelineGroup

SOURCE, LETTERS = "in", "in.dlq"
ROWS, ROWS_PER_BATCH = 120, 40
BATCHES = ROWS // ROWS_PER_BATCH
SINK = ("begun", "mid-stage", "staged", "publishing", "published")
POINTS = {
    "route": (*SINK, "planned", "reading"),
    "replay": (*SINK, "reading"),
    "dead_letters": (*SINK, "reading"),
    "stats": ("reading", "counting", "counted"),
}
# The points at which each sabotage must be detected.
LAST_POINTS = dict.fromkeys(POINTS, "published") | {"stats": "counted"}
TABLES = ("windows", "keys", "shards", "topics")
SOAK_ROUNDS = 10
PATIENCE_S = 300.0


class PipelineScenario:
    """A bus and the four pipelines."""

    def __init__(self, bus: NativeBus, folder: Path, sabotaged: bool) -> None:
        self.bus, self.client = bus, bus.client()
        self.folder = folder
        self.orders = FaultOrders(folder / "orders")
        self.sabotaged = sabotaged
        self.client.create_topic(SOURCE, shards=3)
        for name in ("", "calm."):
            self.client.create_topic(name + LETTERS, shards=2)
        with self.client.producer() as producer:
            for topic in (SOURCE, LETTERS, f"calm.{LETTERS}"):
                producer.produce_rows(topic, messages()).result(PATIENCE_S)

    def driver(self) -> PipelineGroup:
        return PipelineGroup(self.orders.environment | SPARK.environment)

    def work(self, pipeline: str, calm: str = "") -> tuple[str, list[str], dict[str, Any]]:
        """Return the arguments of a pipeline. `calm` is the prefix of the run without faults."""
        place = str(self.folder / f"{calm}{pipeline}")
        named: dict[str, Any] = {"bus": self.bus.url, "once": True}
        if pipeline == "dead_letters":
            named |= {"requeue": True, "where": "id % 7 != 0", "into": f"{calm}{pipeline}"}
            return pipeline, [calm + LETTERS], named
        named["rows_per_batch"] = ROWS_PER_BATCH
        if pipeline == "stats":
            return pipeline, [SOURCE], named | {"out": place, "window": 3600}
        where = "cast(cast(body AS string) AS int) % 3 != 0"
        shape = {"select": "concat(cast(body AS string), '!') AS body, shard_key, headers"}
        target = {"into": f"{calm}{pipeline}", "checkpoint": place}
        return pipeline, [SOURCE], {**named, **target, **shape, "where": where}

    def begin(self, driver: PipelineGroup, pipeline: str, calm: str = "") -> None:
        name, given, named = self.work(pipeline, calm)
        driver.start(name, *given, **named)

    def count_rows(self, topic: str) -> Counter[tuple[object, ...]]:
        try:
            batches = list(self.client.read(topic))
        except DoesNotExist:
            return Counter()
        rows = [row for batch in batches for row in batch.to_pylist()]
        return Counter((row["body"], row["shard_key"], str(row["headers"])) for row in rows)

    def tables(self, name: str) -> dict[str, object]:
        folder = self.folder / name
        return {table: pq.read_table(folder / f"{table}.parquet").to_pylist() for table in TABLES}


def messages() -> pa.RecordBatch:
    headers = [[("n", b"%d" % n), ("polybus.reason", b"because")] for n in range(ROWS)]
    columns = {
        "shard_key": pa.array([f"k{n % 11}" for n in range(ROWS)]),
        "body": pa.array([b"%d" % n for n in range(ROWS)]),
        "headers": pa.array(headers, HEADERS_TYPE),
    }
    return pa.record_batch(list(columns.values()), list(columns))


def kill_all(
    scenario: PipelineScenario, driver: PipelineGroup, points: dict[str, str], rng: random.Random
) -> None:
    for pipeline, point in points.items():
        batch = 1 if pipeline == "dead_letters" else rng.randint(1, BATCHES)
        scenario.orders.clear()
        scenario.orders.give(point, "wait", 1 if scenario.sabotaged else batch)
        scenario.begin(driver, pipeline)
        there = partial(scenario.orders.done, point, "wait")
        until(there, f"{pipeline} at {point}", PATIENCE_S)
    driver.kill()
    for pipeline in ("route", "replay", "dead_letters"):
        check_once(scenario, pipeline)


def check_once(scenario: PipelineScenario, topic: str) -> None:
    twice = [row for row, count in scenario.count_rows(topic).items() if count > 1]
    assert not twice, f"{topic}: {len(twice)} rows are duplicated"


def finish(scenario: PipelineScenario, driver: PipelineGroup) -> None:
    """Finish the pipelines while tasks are killed and fail. Spark retries them."""
    scenario.orders.clear()
    if not scenario.sabotaged:
        scenario.orders.give("mid-stage", "kill self", 2)
        scenario.orders.give("staged", "fail", 1)
    for pipeline in POINTS:
        if pipeline == "stats" and not scenario.sabotaged:
            scenario.orders.give("reading", "kill self", 1)
        scenario.begin(driver, pipeline)
        driver.finish()
    scenario.orders.clear()


def calm(scenario: PipelineScenario, driver: PipelineGroup) -> None:
    """Run the same pipelines without faults, in parallel."""
    for pipeline in POINTS:
        scenario.begin(driver, pipeline, "calm.")
    driver.finish(len(POINTS))


def compare(scenario: PipelineScenario) -> None:
    for pipeline in POINTS:
        if pipeline == "stats":
            assert scenario.tables(pipeline) == scenario.tables(f"calm.{pipeline}")
        else:
            check_once(scenario, pipeline)
            expected = scenario.count_rows(f"calm.{pipeline}")
            assert len(expected) > ROWS / 2
            assert scenario.count_rows(pipeline) == expected, pipeline


def run_scenario(folder: Path, seed: int, sabotaged: bool = False) -> None:
    rng = random.Random(seed)
    points = (
        LAST_POINTS
        if sabotaged
        else {pipeline: rng.choice(choices) for pipeline, choices in POINTS.items()}
    )
    with NativeBus() as bus:
        scenario = PipelineScenario(bus, folder, sabotaged)
        # Both drivers start at once, because the start of a session takes seconds.
        with scenario.driver() as first, scenario.driver() as second:
            calm(scenario, first)
            kill_all(scenario, first, points, rng)
            finish(scenario, second)
        compare(scenario)


@pytest.mark.sabotage("stamps-off", expects=r"(route|replay): \d+ rows are duplicated")
@pytest.mark.sabotage("marks-off", expects=r"dead_letters: \d+ rows are duplicated")
@pytest.mark.sabotage("parts-add", expects=r"assert \{'windows': .* == \{'windows': ")
@pytest.mark.timeout(900)
def test_killed_pipelines_give_the_results_of_an_undisturbed_run(tmp_path, sabotaged):
    seed = random.randrange(1 << 30)
    try:
        run_scenario(tmp_path, seed, sabotaged)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(SOAK_ROUNDS))
def test_killed_pipelines_give_the_same_results_soak(tmp_path, number):
    run_scenario(tmp_path, number)
