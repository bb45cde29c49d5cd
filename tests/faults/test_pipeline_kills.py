"""route, replay, dead-letters and stats are killed, all at once, each at a point of its own.

One driver runs the four side by side; each stands still at some point, in the middle of its
work, and then driver, Java and all workers get SIGKILL. Another driver finishes what is left,
while tasks of it are killed and fail. In the end each result is that of the same pipeline run
without a disturbance: the same rows in the topics, none twice, none missing, the same tables.
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
from tests.rig.spark.kill_points import Orders
from tests.rig.spark.pipeline_group import Crowd

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
# Where each sabotage must show.
LATEST = dict.fromkeys(POINTS, "published") | {"stats": "counted"}
TABLES = ("windows", "keys", "shards", "topics")
SOAK_ROUNDS = 10
PATIENCE_S = 300.0


class Story:
    """A bus, the four pipelines, and what becomes of them."""

    def __init__(self, bus: NativeBus, folder: Path, sabotaged: bool) -> None:
        self.bus, self.client = bus, bus.client()
        self.folder = folder
        self.orders = Orders(folder / "orders")
        self.sabotaged = sabotaged
        self.client.create_topic(SOURCE, shards=3)
        for name in ("", "calm."):
            self.client.create_topic(name + LETTERS, shards=2)
        with self.client.producer() as producer:
            for topic in (SOURCE, LETTERS, f"calm.{LETTERS}"):
                producer.produce_rows(topic, messages()).result(PATIENCE_S)

    def driver(self) -> Crowd:
        return Crowd(self.orders.environment | SPARK.environment)

    def work(self, pipeline: str, calm: str = "") -> tuple[str, list[str], dict[str, Any]]:
        """What each is to do. `calm` is the name of the undisturbed run."""
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

    def begin(self, driver: Crowd, pipeline: str, calm: str = "") -> None:
        name, given, named = self.work(pipeline, calm)
        driver.start(name, *given, **named)

    def found(self, topic: str) -> Counter[tuple[object, ...]]:
        try:
            batches = list(self.client.read(topic))
        except DoesNotExist:
            return Counter()
        rows = [row for batch in batches for row in batch.to_pylist()]
        return Counter((row["body"], row["shard_key"], str(row["headers"])) for row in rows)

    def tables(self, name: str) -> dict[str, object]:
        folder = self.folder / name
        return {one: pq.read_table(folder / f"{one}.parquet").to_pylist() for one in TABLES}


def messages() -> pa.RecordBatch:
    headers = [[("n", b"%d" % n), ("polybus.reason", b"because")] for n in range(ROWS)]
    columns = {
        "shard_key": pa.array([f"k{n % 11}" for n in range(ROWS)]),
        "body": pa.array([b"%d" % n for n in range(ROWS)]),
        "headers": pa.array(headers, HEADERS_TYPE),
    }
    return pa.record_batch(list(columns.values()), list(columns))


def kill_all(story: Story, driver: Crowd, points: dict[str, str], chance: random.Random) -> None:
    for pipeline, point in points.items():
        batch = 1 if pipeline == "dead_letters" else chance.randint(1, BATCHES)
        story.orders.forget()
        story.orders.give(point, "wait", 1 if story.sabotaged else batch)
        story.begin(driver, pipeline)
        there = partial(story.orders.done, point, "wait")
        until(there, f"{pipeline} at {point}", PATIENCE_S)
    driver.kill()
    for pipeline in ("route", "replay", "dead_letters"):
        check_once(story, pipeline)


def check_once(story: Story, topic: str) -> None:
    twice = [row for row, count in story.found(topic).items() if count > 1]
    assert not twice, f"{topic}: {len(twice)} are there twice"


def finish(story: Story, driver: Crowd) -> None:
    """Tasks die and fail on the way; Spark tries them again."""
    story.orders.forget()
    if not story.sabotaged:
        story.orders.give("mid-stage", "kill self", 2)
        story.orders.give("staged", "fail", 1)
    for pipeline in POINTS:
        if pipeline == "stats" and not story.sabotaged:
            story.orders.give("reading", "kill self", 1)
        story.begin(driver, pipeline)
        driver.finish()
    story.orders.forget()


def calm(story: Story, driver: Crowd) -> None:
    """The same without a disturbance, all at once."""
    for pipeline in POINTS:
        story.begin(driver, pipeline, "calm.")
    driver.finish(len(POINTS))


def compare(story: Story) -> None:
    for pipeline in POINTS:
        if pipeline == "stats":
            assert story.tables(pipeline) == story.tables(f"calm.{pipeline}")
        else:
            check_once(story, pipeline)
            expected = story.found(f"calm.{pipeline}")
            assert len(expected) > ROWS / 2
            assert story.found(pipeline) == expected, pipeline


def tell(folder: Path, seed: int, sabotaged: bool = False) -> None:
    chance = random.Random(seed)
    points = {one: chance.choice(some) for one, some in POINTS.items()} if not sabotaged else LATEST
    with NativeBus() as bus:
        story = Story(bus, folder, sabotaged)
        # Both start at once: a session takes seconds to begin, and most of them waiting.
        with story.driver() as first, story.driver() as second:
            calm(story, first)
            kill_all(story, first, points, chance)
            finish(story, second)
        compare(story)


@pytest.mark.sabotage("stamps-off", expects=r"(route|replay): \d+ are there twice")
@pytest.mark.sabotage("marks-off", expects=r"dead_letters: \d+ are there twice")
@pytest.mark.sabotage("parts-add", expects=r"assert \{'windows': .* == \{'windows': ")
@pytest.mark.timeout(900)
def test_results_are_those_of_an_undisturbed_run(tmp_path, sabotaged):
    seed = random.randrange(1 << 30)
    try:
        tell(tmp_path, seed, sabotaged)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(SOAK_ROUNDS))
def test_the_same_at_other_points(tmp_path, number):
    tell(tmp_path, number)
